"""What requests and tenants got, as totals that only grow."""
