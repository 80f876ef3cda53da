"""Who waits for a replica, in which order, and who is rejected at once."""
