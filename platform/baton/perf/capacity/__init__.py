"""What one replica can carry."""
