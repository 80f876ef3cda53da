"""Inputs that are almost right, for minutes: what reads them does not crash and does not hang."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from tests.abuse.fuzz import FuzzResult, Target, fuzz
from tests.chaos.case import (
    Bound,
    Engines,
    Figure,
    Outcome,
    at_least,
    at_most,
    case,
    exactly,
    requested_minutes,
)

_T = TypeVar("_T")
_MINUTES = 10.0
_SEED = 7


def _run_fuzz(target: Target[_T], *, longest_s: float, min_inputs: int) -> Outcome:
    length = requested_minutes(_MINUTES)
    result = fuzz(target, seconds=length["minutes"] * 60, seed=_SEED)
    longest = at_most("longest for one input, s of processor", result.longest_cpu_s, longest_s)
    return _outcome(result, length, longest, least=min_inputs)


def _outcome(
    found: FuzzResult, length: dict[str, float], longest: Bound, *, least: int, **more: Figure
) -> Outcome:
    return Outcome(
        bounds=(
            exactly("inputs that crashed or hung what reads them", found.failures, 0),
            longest,
            at_least("inputs", found.inputs, least),
            at_least("different outcomes", len(found.outcomes), 2),
        ),
        figures={**length, **more, "outcomes": json.dumps(found.outcomes), "seed": _SEED},
        note="; ".join(found.first_failures[:5]),
    )


@case("B3-link", "fuzzed frames of the fleet link", engines=Engines.NONE, minutes=_MINUTES)
def link(_folder: Path) -> Outcome:
    """Decoded to a frame that can be encoded again, or refused as bad."""
    from tests.abuse import targets

    return _run_fuzz(targets.link(), longest_s=1.0, min_inputs=10_000)


@case("B3-config", "fuzzed configurations", engines=Engines.NONE, minutes=_MINUTES)
def config(_folder: Path) -> Outcome:
    """Loaded, or refused in words; what was loaded can be written and loaded again."""
    from tests.abuse import targets

    return _run_fuzz(targets.config(), longest_s=3.0, min_inputs=500)


@case("B3-events", "fuzzed streams of events", engines=Engines.NONE, minutes=_MINUTES)
def events(_folder: Path) -> Outcome:
    """Read alike however they are cut, or refused."""
    from tests.abuse import targets

    return _run_fuzz(targets.sse(), longest_s=1.0, min_inputs=10_000)


def _fuzz_endpoint(folder: Path, *, stream: bool | None) -> Outcome:
    from tests.abuse.bodies import bodies
    from tests.abuse.deployed import MODEL, secured_deployment

    length = requested_minutes(_MINUTES)
    # Those who do not say how many tokens they want would get 4,096, of 4 ms each.
    settings: dict[str, object] = {"admission.default_max_tokens": 256}
    with secured_deployment(folder, level="info", **settings) as baton:
        before = baton.deployment.pids()
        headers = {"authorization": f"Bearer {baton.keys['acme']}"}
        target = bodies(baton.url, MODEL, stream=stream, headers=headers)
        result = fuzz(target, seconds=length["minutes"] * 60, seed=_SEED)
        baton.deployment.wait_for(lambda s: s["ingresses"][0]["in_flight"] == {}, 60)
        replaced_pids = len(set(baton.deployment.pids().items()) ^ set(before.items()))
        status_after = baton.client("acme").get("/v1/models").status_code
    longest = at_most("longest for one input, s", result.longest_s, 60.0)
    outcome = _outcome(result, length, longest, least=200)
    bounds_after = (
        exactly("replicas that are not those of before", replaced_pids, 0),
        exactly("a good request afterwards", status_after, 200),
    )
    return Outcome(bounds=outcome.bounds + bounds_after, figures=outcome.figures, note=outcome.note)


@case(
    "B3-json",
    "fuzzed bodies of requests to a whole deployment: no 5xx, every refusal in its API's words",
    engines=Engines.SIMULATED,
    minutes=_MINUTES + 1,
)
def json_bodies(folder: Path) -> Outcome:
    """Fields of the APIs and of vLLM with anything in them, and broken JSON."""
    return _fuzz_endpoint(folder, stream=None)


@case(
    "B3-sse",
    "fuzzed requests for streams to a whole deployment: each stream ends as its API says",
    engines=Engines.SIMULATED,
    minutes=_MINUTES + 1,
)
def streams(folder: Path) -> Outcome:
    """The same, all streamed."""
    return _fuzz_endpoint(folder, stream=True)


@case(
    "B9",
    "10,000 names of tenants: the number of series is bounded",
    engines=Engines.NONE,
    minutes=0.2,
)
def tenants(_folder: Path) -> Outcome:
    """Names that a client makes up do not exist; those of a configuration are bounded, too."""
    from tests.abuse.tenants import reject_tenants

    report = reject_tenants(10_000)
    return Outcome(
        bounds=(
            at_most("series of the busiest metric", report.series, report.bound),
            exactly("requests in them", report.requests, 10_000),
            at_most("bytes of a scrape", report.scrape_bytes, 2_000_000),
        ),
        figures={"tenants": 10_000},
    )
