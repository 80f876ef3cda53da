"""What one GPU does under baton, beside what it does under `vllm serve`."""
