"""A body in virtual time that carries out the brain's commands: replicas, network, arrivals."""
