"""The replica's deployment: an engine and the fleet link in front of it."""
