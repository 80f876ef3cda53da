"""Inference engines behind one port: vLLM's EngineCore, and a simulated engine in real time."""
