"""Whether each pair of replicas can move KV blocks, found out by trying."""
