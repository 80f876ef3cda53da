"""Sans-I/O machines: they take events and return commands, and know no clock and no socket."""
