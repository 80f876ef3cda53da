"""The same deployment in virtual time, and what a simulation makes of each key."""
