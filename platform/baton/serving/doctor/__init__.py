"""`baton doctor`: what is wrong here, and what to do."""
