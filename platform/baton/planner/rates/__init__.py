"""What engines carry, in closed form and simulated."""
