"""Files for machines without Kubernetes: compose, systemd, `ray up`."""
