"""What no single key shows: keys that must agree with each other."""
