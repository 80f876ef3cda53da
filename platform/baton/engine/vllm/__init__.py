"""The vLLM engine: its wire, its frontend, and the adapter that runs it in a replica."""
