"""The loop that keeps pools as large as they should be."""
