"""How many replicas of which role there should be: what is seen, what is wanted, by which rule."""
