"""One of those that are compared, and what every one of them is started with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baton.simulator.engine.settings import SimSettings
from benchmarks._systems import ENGINE, System, engine_settings, scenario
from benchmarks.rivals.programs import compiled
from benchmarks.rivals.stacks import Program

SIMULATED, MOCK = "simulated engine", "mock of vLLM's HTTP API"
OWN, REAL = "its own mock engine", "vLLM on the CPU"
LOCAL_SCENARIO, PD_SCENARIO = "rivals-local", "rivals-pd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What every contender is started with."""

    model: Path
    bytes_per_token: float

    def config_sets(self, *more: str) -> tuple[str, ...]:
        """For baton's scenarios."""
        return (f"model.source={self.model}", *more)

    def engine(self) -> SimSettings:
        """The simulated engine, which mocks step like."""
        return engine_settings(scenario(LOCAL_SCENARIO))


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One of those that are compared."""

    name: str
    what: str
    engine: str
    make: Callable[[Site], System]
    """Builds it; raises NotAvailableError where it cannot be had."""
    quickack: bool = True
    """Whether clients acknowledge at once; an ordinary client does not."""


def mock_program(site: Site, port: int) -> Program:
    """The mock of vLLM's HTTP API, with an engine that steps like baton's simulated one."""
    engine = site.engine()
    microseconds = {
        "step": engine.step_overhead_s * 1e6,
        "decode": engine.decode_step_s * 1e6,
        "decoding": engine.decode_request_s * 1e6,
        "byte": 1e6 / engine.prefill_tokens_per_s / site.bytes_per_token,
    }
    command = [str(compiled("mock")), "--port", str(port)]
    for name, us in microseconds.items():
        command += [f"--{name}-us", f"{us:.4f}"]
    return Program(group=ENGINE, command=command)
