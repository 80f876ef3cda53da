"""A long-lived process and its machine: clock, sockets, child processes."""
