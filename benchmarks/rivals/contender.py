"""One of those that are compared, and what every one of them is started with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baton.simulator.engine.settings import SimSettings
from benchmarks._systems import ENGINE, System, engine_settings, load_scenario
from benchmarks.rivals.programs import compile_program
from benchmarks.rivals.stacks import Program

SIMULATED, MOCK = "simulated engine", "mock of vLLM's HTTP API"
OWN_MOCK, CPU_VLLM = "its own mock engine", "vLLM on the CPU"
LOCAL_SCENARIO, PD_SCENARIO = "rivals-local", "rivals-pd"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSite:
    """What every contender is started with."""

    model: Path
    bytes_per_token: float

    def config_overrides(self, *extra: str) -> tuple[str, ...]:
        """For baton's scenarios."""
        return (f"model.source={self.model}", *extra)

    def engine_settings(self) -> SimSettings:
        """The simulated engine, which mocks step like."""
        return engine_settings(load_scenario(LOCAL_SCENARIO))


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One of those that are compared."""

    name: str
    description: str
    engine: str
    make: Callable[[LaunchSite], System]
    """Builds it; raises NotAvailableError where it cannot be had."""
    quickack: bool = True
    """Whether clients acknowledge at once; an ordinary client does not."""


def mock_program(site: LaunchSite, port: int) -> Program:
    """The mock of vLLM's HTTP API, with an engine that steps like baton's simulated one."""
    engine = site.engine_settings()
    microseconds = {
        "step": engine.step_overhead_s * 1e6,
        "decode": engine.decode_step_s * 1e6,
        "decoding": engine.decode_request_s * 1e6,
        "byte": 1e6 / engine.prefill_tokens_per_s / site.bytes_per_token,
    }
    command = [str(compile_program("mock")), "--port", str(port)]
    for name, us in microseconds.items():
        command += [f"--{name}-us", f"{us:.4f}"]
    return Program(group=ENGINE, command=command)
