"""What is asked of a fleet, and when: recorded traces, and generators."""
