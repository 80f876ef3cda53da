"""The autoscaler: from observations to how many replicas each pool has."""
