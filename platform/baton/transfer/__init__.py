"""The KV-transfer service: links and their bandwidth, leases' timers, probes, NIXL."""
