"""What other packages are built with, worked out from a configuration."""
