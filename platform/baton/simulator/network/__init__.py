"""Virtual time, and transfers that share network interfaces."""
