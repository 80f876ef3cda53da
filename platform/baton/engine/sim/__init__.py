"""A simulated engine in real time: same port as vLLM's, no weights, a hundred fit on a laptop."""

from baton.engine.sim.engine import SimEngine
from baton.simulator.engine.settings import OnTransferFailure, SimSettings
from baton.simulator.engine.tokens import expected_tokens

__all__ = ["OnTransferFailure", "SimEngine", "SimSettings", "expected_tokens"]
