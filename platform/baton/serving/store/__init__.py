"""What outlives processes: kept in the store of Ray's head."""
