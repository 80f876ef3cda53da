"""Named workloads without a file: recorded traffic in summary, and common assumptions."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType

from baton.simulator.workloads import arrivals
from baton.simulator.workloads.generators import (
    Conversations,
    ToolAgents,
    TrafficPhase,
    independent_requests,
    phased_traffic,
    session_rate_per_s,
)
from baton.simulator.workloads.lengths import LengthModel, Lognormal, fixed, lognormal
from baton.simulator.workloads.trace import Trace

_AZURE_CONV = lognormal(Lognormal(1155, 0.96, 14050), Lognormal(211, 0.77, 1000))
"""Source: AzureLLMInferenceTrace_conv of 2023: means, coefficients of variation and maxima."""

_AZURE_CODE = lognormal(Lognormal(2048, 0.96, 7437), Lognormal(28, 2.15, 1899))
"""Source: AzureLLMInferenceTrace_code of 2023, likewise."""

_LONG_CONTEXT = lognormal(Lognormal(12035, 1.31, 126195), Lognormal(343, 0.73, 2000))
"""Source: Mooncake's conversation trace (FAST'25), likewise; without shared blocks."""

_SHAREGPT = lognormal(Lognormal(246, 2.23, 3973), Lognormal(326, 0.74, 1734))
"""Source: 10,000 conversations of ShareGPT, tokenized for Llama 2, likewise."""

_SUMMARIES = lognormal(Lognormal(2588, 0.37, 4054), Lognormal(291, 1.82, 4056))
"""Source: arXiv summarization, tokenized for Llama 2, as in Vidur's traces, likewise."""

_REASONING = fixed(1024, 8192)
"""Source: InferenceX's reasoning scenario, 1,024 tokens in and 8,192 out."""

_CHAT = Conversations(
    turns=4.0,
    system_tokens=512,
    message=Lognormal(200, 1.5, 8192),
    output=Lognormal(300, 0.8, 2048),
    think_s_mean=30.0,
)
"""Assumed: ShareGPT's turns and lengths in round numbers, half a minute to read and type."""

_AGENTS = ToolAgents(
    shared_prompt=Lognormal(6000, 0.5, 32768),
    own_prompt=Lognormal(1500, 1.0, 32768),
    output=Lognormal(150, 1.0, 2048),
)
"""Assumed: near Mooncake's tool-agent trace, whose prompts have 8,600 tokens and outputs 182."""

_AZURE_CONV_BURSTINESS = 1 / 1.09**2
_AZURE_CODE_BURSTINESS = 1 / 13.2**2
"""Source: the coefficients of variation of the gaps in the recorded traces."""

_TraceFactory = Callable[[str, float, float, random.Random], Trace]


def synthetic(name: str, *, rate_per_s: float, duration_s: float, seed: int = 0) -> Trace:
    """The workload of that name: `duration_s` of it, at `rate_per_s` requests per second.

    Raises:
        ValueError: an unknown workload; a rate or duration not above 0.
    """
    factory = WORKLOADS.get(name)
    if factory is None:
        raise ValueError(f"workload {name!r} is not known, expected one of {', '.join(WORKLOADS)}")
    if not 0 < duration_s < float("inf"):
        raise ValueError(f"duration_s is {duration_s}, expected a number above 0")
    rng = random.Random(f"{name} {seed}")  # noqa: S311 - seeded, not secret
    return factory(name, rate_per_s, duration_s, rng)


def _gamma_arrivals(lengths: LengthModel, burstiness: float) -> _TraceFactory:
    def make(name: str, rate: float, end_s: float, rng: random.Random) -> Trace:
        times_s = arrivals.take_until(end_s, arrivals.gamma(rate, burstiness, rng))
        return independent_requests(name, times_s, lengths, rng)

    return make


def _chat(name: str, rate: float, end_s: float, rng: random.Random) -> Trace:
    starts_s = arrivals.take_until(end_s, arrivals.poisson(session_rate_per_s(rate, _CHAT), rng))
    return _CHAT.generate(name, starts_s, rng, until_s=end_s)


def _agents(name: str, rate: float, end_s: float, rng: random.Random) -> Trace:
    return _AGENTS.generate(name, arrivals.take_until(end_s, arrivals.poisson(rate, rng)), rng)


def _shifting(name: str, rate: float, end_s: float, rng: random.Random) -> Trace:
    kinds = {"code": _AZURE_CODE, "conv": _AZURE_CONV, "reasoning": _REASONING}
    phase_weights = ((8.0, 2.0, 0.0), (2.0, 8.0, 0.0), (1.0, 5.0, 4.0))
    phases = [
        TrafficPhase(
            duration_s=end_s / len(phase_weights),
            rate_per_s=rate,
            shares=tuple(zip(kinds, mix, strict=True)),
        )
        for mix in phase_weights
    ]
    return phased_traffic(name, phases, kinds, rng)


WORKLOADS: Mapping[str, _TraceFactory] = MappingProxyType(
    {
        "conv": _gamma_arrivals(_AZURE_CONV, _AZURE_CONV_BURSTINESS),
        "code": _gamma_arrivals(_AZURE_CODE, 1.0),
        "code-bursty": _gamma_arrivals(_AZURE_CODE, _AZURE_CODE_BURSTINESS),
        "long-context": _gamma_arrivals(_LONG_CONTEXT, 1.0),
        "sharegpt": _gamma_arrivals(_SHAREGPT, 1.0),
        "summaries": _gamma_arrivals(_SUMMARIES, 1.0),
        "reasoning": _gamma_arrivals(_REASONING, 1.0),
        "chat": _chat,
        "agents": _agents,
        "shifting": _shifting,
    }
)
