"""Request rates of engines, in closed form and simulated."""
