"""The command line's side of a running deployment."""
