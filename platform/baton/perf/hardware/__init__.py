"""What accelerators can do, from their data sheets."""
