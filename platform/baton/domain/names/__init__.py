"""Names of hosts, processes, models and traces as text."""
