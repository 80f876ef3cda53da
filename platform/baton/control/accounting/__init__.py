"""Results of requests and usage of tenants, as totals that only grow."""
