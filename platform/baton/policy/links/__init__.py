"""What is known of the paths KV blocks take: bandwidth, setup, failures."""
