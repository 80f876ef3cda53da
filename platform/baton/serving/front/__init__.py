"""HAProxy at the public port, and the gate before the Rust frontend."""
