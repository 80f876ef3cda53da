"""Every key that a configuration may hold."""
