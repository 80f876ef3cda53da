"""State that outlives processes, in the store of Ray's head."""
