"""Results of a benchmark, as figures and tables."""
