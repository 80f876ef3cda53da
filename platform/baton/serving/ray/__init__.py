"""Everything that depends on Ray's private API."""
