"""Use of NIXL and UCX: side channels checked, transports read, settings chosen."""
