"""Which engines and fleets are worth simulating."""
