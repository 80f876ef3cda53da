"""What the command line holds of a running deployment."""
