"""What a benchmark found, as figures and tables."""
