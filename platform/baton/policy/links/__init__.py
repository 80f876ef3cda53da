"""Estimates of the paths that KV blocks take: bandwidth, setup, failures."""
