"""What a long-lived process needs of its machine: clock, sockets, child processes."""
