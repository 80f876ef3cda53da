"""What listens at the public port: HAProxy, and the gate before the Rust frontend."""
