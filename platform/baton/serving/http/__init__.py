"""HTTP servers beside what a process is for."""
