"""Facts of a machine, a configuration and a cluster, their checks, and the checks of a start."""
