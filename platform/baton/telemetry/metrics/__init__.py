"""What each process measures for Prometheus."""
