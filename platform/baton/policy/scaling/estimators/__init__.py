"""What recent values say of the next ones."""
