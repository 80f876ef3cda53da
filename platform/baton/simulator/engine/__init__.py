"""One simulated engine without a clock: its scheduler, its paged memory, its pretended model."""
