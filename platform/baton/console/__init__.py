"""A live web page of the fleet's state."""
