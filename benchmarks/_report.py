"""From what the client and the meter saw to the figures that are quoted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from baton.simulator.engine.settings import SimSettings
from benchmarks._figures import (
    BadStreamError,
    Spread,
    Stream,
    differences,
    percentiles,
    quantile,
    ratios,
    read_stream,
    us_per_token,
)
from benchmarks._load import Exchange
from benchmarks._systems import API, ENGINE, HAPROXY, OTHER

BARE, LOCAL, PD = "bare", "baton_local", "baton_pd"
SINGLE, FEW, MANY = "single", "streams_16", "streams_64"
Phase = dict[str, object]

_MAX_FAILED_FRACTION = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one phase gave, unread."""

    exchanges: list[Exchange]
    wall_s: float
    cpu_s: dict[str, float]
    late_connections: int


def describe(measured: Measured) -> Phase:
    """The figures of one phase: times of the requests that succeeded, and how many did not.

    Raises:
        BadStreamError: too many failed; a benchmark of failures compares nothing.
    """
    streams: list[Stream] = []
    problems: list[str] = []
    for exchange in measured.exchanges:
        try:
            streams.append(read(exchange))
        except BadStreamError as error:
            problems.append(str(error))
    if len(problems) > _MAX_FAILED_FRACTION * len(measured.exchanges):
        total = len(measured.exchanges)
        raise BadStreamError(f"{len(problems)} of {total} requests failed: {problems[0]}")
    tokens = sum(stream.tokens for stream in streams)
    cpu_s = measured.cpu_s
    ours_s = sum(seconds for group, seconds in cpu_s.items() if group not in {"machine", "steal"})
    return {
        "requests": len(streams),
        "failed": len(problems),
        "problems": problems[:3],
        "tokens": tokens,
        "prompt_tokens_mean": sum(s.prompt_tokens for s in streams) / len(streams),
        "chunks_per_token": sum(s.chunks for s in streams) / tokens,
        "wall_s": measured.wall_s,
        "requests_per_s": len(streams) / measured.wall_s,
        "tokens_per_s": tokens / measured.wall_s,
        "ttft_s": percentiles([s.ttft_s for s in streams]),
        "tpot_s": percentiles([s.tpot_s for s in streams]),
        "gap_max_s": percentiles([s.gap_max_s for s in streams]),
        "send_lag_s": percentiles([e.lag_s for e in measured.exchanges]),
        "late_connections": measured.late_connections,
        "cpu_s": cpu_s,
        "cpu_us_per_token": {
            group: us_per_token(seconds, tokens)
            for group, seconds in cpu_s.items()
            if group in {API, HAPROXY, ENGINE, OTHER}
        },
        "strangers_cores": (cpu_s["machine"] - ours_s) / measured.wall_s,
        "stolen_cores": cpu_s["steal"] / measured.wall_s,
    }


def read(exchange: Exchange) -> Stream:
    """The stream of one exchange.

    Raises:
        BadStreamError: it failed, or is not complete.
    """
    if exchange.problem:
        received = sum(len(part) for _, part in exchange.segments)
        raise BadStreamError(f"{exchange.problem} (after {received} bytes of the response)")
    return read_stream(exchange.sent_at_s, exchange.body())


def figure(phases: Sequence[Mapping[str, Phase]], phase: str, *path: str) -> list[float]:
    """One figure of every repeat."""
    values = []
    for repeat in phases:
        value: object = repeat[phase]
        for key in path:
            assert isinstance(value, dict), f"{path} leads nowhere"
            value = value[key]
        assert isinstance(value, float | int), f"{path} is no figure"
        values.append(float(value))
    return values


def front_us_per_token(phases: Sequence[Mapping[str, Phase]], phase: str) -> list[float]:
    """CPU of everything between client and engine process, by repeat."""
    api = figure(phases, phase, "cpu_us_per_token", API)
    if not all(HAPROXY in _cpu(repeat[phase]) for repeat in phases):
        return api
    haproxy = figure(phases, phase, "cpu_us_per_token", HAPROXY)
    return [a + b for a, b in zip(api, haproxy, strict=True)]


def _cpu(phase: Phase) -> Mapping[str, float]:
    cpu = phase["cpu_us_per_token"]
    assert isinstance(cpu, dict), "made by `describe`"
    return cpu


def handoff_s(settings: SimSettings, *, prompt_tokens: float) -> dict[str, float]:
    """What a handoff costs inside the simulated engines, beyond what one engine would need.

    The prefill engine computes the prompt just as a single engine does, so prefill itself cancels
    out. What comes on top is the transfer of the prompt's blocks, and a decode step for the first
    token, which a single engine gets with the prompt.
    """
    blocks = -(-round(prompt_tokens) // settings.block_size_tokens)
    return {
        "prefill_s": settings.step_s(prefill_tokens=round(prompt_tokens), decode_requests=0),
        "transfer_s": settings.transfer_s(blocks * settings.kv_block_bytes),
        "first_decode_step_s": settings.step_s(prefill_tokens=0, decode_requests=1),
    }


def summarize(
    runs: Mapping[str, Sequence[Mapping[str, Phase]]], settings: SimSettings
) -> dict[str, object]:
    """The figures that are quoted, with their spread over the repeats."""
    bare, local, pd = runs[BARE], runs[LOCAL], runs[PD]
    prompt_tokens = quantile(figure(bare, SINGLE, "prompt_tokens_mean"), 0.5)
    handoff = handoff_s(settings, prompt_tokens=prompt_tokens)
    excluded_s = handoff["transfer_s"] + handoff["first_decode_step_s"]

    def added(theirs: Sequence[Mapping[str, Phase]], phase: str, q: str) -> list[float]:
        return differences(figure(theirs, phase, "ttft_s", q), figure(bare, phase, "ttft_s", q))

    spreads: dict[str, list[float]] = {
        "added_ttft_local_p50_s": added(local, SINGLE, "p50"),
        "added_ttft_local_p99_s": added(local, SINGLE, "p99"),
        "added_ttft_local_16_p50_s": added(local, FEW, "p50"),
        "added_ttft_local_64_p50_s": added(local, MANY, "p50"),
        "added_ttft_local_64_p99_s": added(local, MANY, "p99"),
        "added_ttft_pd_p50_s": [value - excluded_s for value in added(pd, SINGLE, "p50")],
        "added_ttft_pd_raw_p50_s": added(pd, SINGLE, "p50"),
        "cpu_per_token_us_bare": front_us_per_token(bare, MANY),
        "cpu_per_token_us_baton": front_us_per_token(local, MANY),
        "cpu_per_token_ratio": ratios(
            front_us_per_token(local, MANY), front_us_per_token(bare, MANY)
        ),
        "cpu_per_token_us_baton_ingress": figure(local, MANY, "cpu_us_per_token", API),
        "cpu_per_token_us_baton_haproxy": figure(local, MANY, "cpu_us_per_token", HAPROXY),
        "cpu_per_token_us_baton_pd": front_us_per_token(pd, MANY),
        "cpu_per_token_us_engine_bare": figure(bare, MANY, "cpu_us_per_token", ENGINE),
        "cpu_per_token_us_engine_baton": figure(local, MANY, "cpu_us_per_token", ENGINE),
        "ray_other_cores": [
            cpu / wall
            for cpu, wall in zip(
                figure(local, MANY, "cpu_s", OTHER), figure(local, MANY, "wall_s"), strict=True
            )
        ],
    }
    for system, phases in runs.items():
        spreads[f"ttft_{system}_p50_s"] = figure(phases, SINGLE, "ttft_s", "p50")
        spreads[f"ttft_{system}_p99_s"] = figure(phases, SINGLE, "ttft_s", "p99")
        spreads[f"tpot_{system}_p50_s"] = figure(phases, MANY, "tpot_s", "p50")
        spreads[f"gap_max_{system}_p99_s"] = figure(phases, MANY, "gap_max_s", "p99")
        spreads[f"tokens_per_s_{system}"] = figure(phases, MANY, "tokens_per_s")
        spreads[f"requests_per_s_{system}"] = figure(phases, MANY, "requests_per_s")
        spreads[f"failed_requests_{system}"] = [
            sum(figure([repeat], name, "failed")[0] for name in (SINGLE, FEW, MANY))
            for repeat in phases
        ]
    spreads["strangers_cores"] = [
        value
        for phases in runs.values()
        for phase in (SINGLE, FEW, MANY)
        for value in figure(phases, phase, "strangers_cores")
    ]
    found = {name: Spread.of(values) for name, values in spreads.items()}
    return {name: spread.median for name, spread in found.items()} | {
        "spread": {name: asdict(spread) for name, spread in found.items()},
        "pd_excluded": handoff | {"excluded_s": excluded_s},
        "prompt_tokens": prompt_tokens,
    }


def in_one_line(phase: Phase) -> str:
    """A phase for the progress display."""
    ttft, cpu = phase["ttft_s"], phase["cpu_us_per_token"]
    assert isinstance(ttft, dict), "made by `describe`"
    assert isinstance(cpu, dict), "made by `describe`"
    times = ", ".join(f"{name} {value * 1000:.2f}" for name, value in ttft.items())
    costs = ", ".join(f"{group} {value:.0f}" for group, value in cpu.items())
    return (
        f"{phase['requests']} requests, TTFT ms {times}; CPU us/token {costs}; "
        f"{phase['tokens_per_s']:.0f} tokens/s; failed {phase['failed']}; "
        f"strangers {phase['strangers_cores']:.2f} cores"
    )
