"""One simulated engine without a clock: scheduler, paged KV memory and simulated model."""
