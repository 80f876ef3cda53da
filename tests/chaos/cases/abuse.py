"""Hostile clients: messages with two readings, nonsense, slowness, wrong keys, curiosity."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import httpx

from tests.abuse import raw, routes
from tests.abuse import slow_clients as drips
from tests.abuse.canaries import run_canary_search
from tests.abuse.deployed import MODEL, SecuredDeployment, secured_deployment
from tests.abuse.messages import Message, messages
from tests.abuse.oversized_requests import CHAT, EXCESSES, TEXT, check_answer, default_output_tokens
from tests.abuse.timing import probe, time_call
from tests.chaos.case import Bound, Engines, Outcome, at_least, at_most, case, exactly

ROOT = Path(__file__).parents[3]
_ROUNDS = 10
"""Of excesses, so that they last long enough beside a stream whose gaps are measured."""


# ---------------------------------------------------------------------------------------------- B1


@case(
    "B1",
    "ambiguous HTTP messages behind HAProxy: none is served, and no other client is affected",
    engines=Engines.SIMULATED,
    minutes=3,
)
def smuggling(folder: Path) -> Outcome:
    """Each message twenty times beside clients that only want their own answers."""
    with secured_deployment(folder) as deployment, running_bystanders(deployment) as bystanders:
        key = deployment.keys["acme"]
        problems: list[str] = []
        statuses, unanswered = Counter[int](), 0
        for message in messages():
            for _ in range(5):
                data = message.make(key) + raw.closing_request()
                exchange = raw.exchange(
                    deployment.address,
                    data,
                    timeout_s=5.0 if message.is_answered_immediately else 1.0,
                )
                answers = [
                    response
                    for response in exchange.responses
                    if not raw.is_closing_response(response)
                ]
                statuses.update(answer.status for answer in answers)
                unanswered += not exchange.responses
                problems += _message_problems(message, exchange, answers)
        status_after = deployment.client("acme").get("/v1/models").status_code
    return Outcome(
        bounds=(
            exactly("messages answered otherwise than they may be", len(problems), 0),
            exactly("answers of others that were not their own", bystanders.problem_count, 0),
            at_least("answers of others meanwhile", bystanders.answers, 100),
            exactly("a good request afterwards", status_after, 200),
        ),
        figures={
            "messages": sum(1 for _ in messages()),
            "statuses": json.dumps(dict(sorted(statuses.items()))),
            "connections closed without a word": unanswered,
        },
        note="; ".join(problems[:20]),
    )


def _message_problems(
    message: Message, exchange: raw.Exchange, answers: list[raw.Response]
) -> Iterator[str]:
    statuses = {answer.status for answer in answers}
    if not statuses <= message.allowed:
        yield f"{message.name}: {sorted(statuses)}"
    if len(answers) > message.max_answers:
        yield f"{message.name}: {len(answers)} answers"
    if message.is_answered_immediately and not exchange.is_closed:
        yield f"{message.name}: no end within {exchange.took_s:.1f} s"


class _Bystanders:
    """Clients who ask for their own and check that they get it."""

    def __init__(self, baton: SecuredDeployment) -> None:
        self.answers = self.problem_count = 0
        self.latencies_s: list[float] = []
        self.failures: Counter[str] = Counter()
        self._baton = baton
        self._over = threading.Event()
        self._lock = threading.Lock()

    def run(self, name: int) -> None:
        with self._baton.client("beta") as client:
            number = 0
            while not self._over.is_set():
                own, number = f"bystander-{name}-{number}", number + 1
                body = {"model": MODEL, "prompt": f"{own} x", "max_tokens": 2}
                self._send_one(client, own, body)

    def _send_one(self, client: httpx.Client, request_id: str, body: dict[str, object]) -> None:
        began_s = time.monotonic()
        try:
            answer = client.post(TEXT, json=body, headers={"x-request-id": request_id})
            is_right = answer.status_code == 200 and answer.json()["id"] == f"cmpl-{request_id}"
            reason = "" if is_right else f"{answer.status_code} {answer.text[:100]}"
        except httpx.HTTPError as error:
            is_right, reason = False, type(error).__name__
        with self._lock:
            self.answers += 1
            self.problem_count += not is_right
            self.latencies_s.append(time.monotonic() - began_s)
            if reason:
                self.failures[reason] += 1

    def stop(self) -> None:
        self._over.set()


@contextmanager
def running_bystanders(baton: SecuredDeployment, count: int = 3) -> Iterator[_Bystanders]:
    others = _Bystanders(baton)
    threads = [threading.Thread(target=others.run, args=(name,)) for name in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield others
    finally:
        others.stop()
        for thread in threads:
            thread.join(60)


# ---------------------------------------------------------------------------------------------- B2


@case(
    "B2",
    "schemathesis over the OpenAPI schema: no 5xx in 1,500 cases",
    engines=Engines.SIMULATED,
    minutes=6,
)
def schema(folder: Path) -> Outcome:
    """The schema is vLLM's own, of the routes that are open; the tool is in a place of its own."""
    from tests.abuse.schema import run_schemathesis, write_schema

    subprocess.run([ROOT / "scripts" / "tools", "schemathesis"], check=True, timeout=600)
    document = write_schema(folder / "schema.json")
    # Those who do not say how many tokens they want would get 4,096, and a case take 16 s.
    settings: dict[str, object] = {"admission.default_max_tokens": 32}
    with secured_deployment(folder, level="info", **settings) as baton:
        report = run_schemathesis(document, baton.url, key=baton.keys["acme"], folder=folder)
        status_after = baton.client("acme").get("/v1/models").status_code
    return Outcome(
        bounds=(
            at_least("cases", report.cases, 1500),
            exactly("cases answered 5xx", report.server_errors, 0),
            exactly("a good request afterwards", status_after, 200),
        ),
        figures={"operations": report.operations, "seed": report.seed},
        note="; ".join(report.examples[:5]),
    )


# ---------------------------------------------------------------------------------------------- B4


@case(
    "B4",
    "more than one request may ask for: refused with a status, while streams go on",
    engines=Engines.SIMULATED,
    minutes=3,
)
def limits(folder: Path) -> Outcome:
    """Each beyond a limit by default settings, beside a stream whose tokens are timed."""
    with secured_deployment(folder) as baton, baton.client("acme") as client:
        default_tokens = default_output_tokens(client)
        with drips.stream_gaps(baton.url, baton.keys["beta"], MODEL) as gaps:
            problems = [
                reason
                for name, ask, wanted in EXCESSES * _ROUNDS
                for reason in check_answer(client, name, ask, wanted)
            ]
        status_after = client.get("/v1/models").status_code
    return Outcome(
        bounds=(
            exactly("excesses answered otherwise than with their status", len(problems), 0),
            exactly(
                "tokens of a chat that asks for no number, of 16,384", default_tokens[CHAT], 4096
            ),
            exactly("of a response", default_tokens["/v1/responses"], 4096),
            at_most("longest gap in another's stream meanwhile, s", max(gaps.gaps_s), 0.5),
            at_least("gaps measured", len(gaps.gaps_s), 200),
            exactly("a good request afterwards", status_after, 200),
        ),
        figures={
            "excesses": len(EXCESSES),
            "its gaps' median, s": sorted(gaps.gaps_s)[len(gaps.gaps_s) // 2],
        },
        note="; ".join(problems[:10]),
    )


# ---------------------------------------------------------------------------------------------- B5


@case(
    "B5",
    "500 connections that say almost nothing: others are served, and they are sent away",
    engines=Engines.SIMULATED,
    minutes=4,
)
def slow_senders(folder: Path) -> Outcome:
    """Heads and bodies a byte a second, and connections that say nothing."""
    with secured_deployment(folder) as baton, running_bystanders(baton, 2) as bystanders:
        began = len(bystanders.latencies_s)
        totals = drips.run_slow_clients(
            baton.address, key=baton.keys["acme"], per_kind=170, duration_s=100.0
        )
        latencies_s = sorted(bystanders.latencies_s[began:])
        problem_count, reason = bystanders.problem_count, dict(bystanders.failures)
    return Outcome(
        bounds=(
            at_least("connections at a time", totals.opened, 500),
            exactly("others' requests that failed", problem_count, 0),
            at_least("others' requests", len(latencies_s), 200),
            at_most(
                "their slowest of a hundred, s", latencies_s[int(len(latencies_s) * 0.99)], 1.0
            ),
            at_most(
                "until the last slow head was sent away, s",
                totals.longest_connection_s["head"],
                30.0,
            ),
            at_most("until the last slow body was, s", totals.longest_connection_s["body"], 75.0),
        ),
        figures={
            "until the last idle connection was, s": totals.longest_connection_s["silent"],
            "why": str(reason),
        },
        note="a connection that was still there at the end counts as 100 s",
    )


# ---------------------------------------------------------------------------------------------- B6


@case(
    "B6",
    "every route of the front and of the console with each kind of key: as the table says",
    engines=Engines.SIMULATED,
    minutes=2,
)
def keys(folder: Path) -> Outcome:
    """The table is made of the routes that vLLM's app, Serve and the console have."""
    from tests.abuse.schema import routes_of_vllm

    all_routes = routes_of_vllm() | {("GET", path) for path in routes.RULES}
    all_routes |= {("GET", path) for path in routes.RAY_SERVE_PATHS}
    with secured_deployment(folder) as baton:
        credentials = [
            *baton.credentials.items(),
            (routes.Credential.CONSOLES, baton.console_token),
        ]
        console = baton.deployment.status()["observability"]["url"]
        with (
            httpx.Client(base_url=baton.url, timeout=20) as front,
            httpx.Client(base_url=console, timeout=20) as inside,
        ):
            results = [
                routes.check_route(front, route, key) for route in all_routes for key in credentials
            ]
            problems = sorted(reason for reason in results if reason is not None)
            for path in routes.CONSOLE:
                for credential in credentials:
                    problems += routes.check_console(inside, path, credential)
    return Outcome(
        bounds=(
            exactly("routes that are not as their rule says", len(problems), 0),
            at_least("routes", len(all_routes) + len(routes.CONSOLE), 40),
        ),
        figures={"asked": (len(all_routes) + len(routes.CONSOLE)) * len(credentials)},
        note="; ".join(problems[:10]),
    )


# ---------------------------------------------------------------------------------------------- B7


@case(
    "B7",
    "a key, a prompt, an answer and a token are in no log, record, trace, metric or page",
    engines=Engines.SIMULATED,
    minutes=3,
)
def canaries(folder: Path) -> Outcome:
    """Good and bad requests that carry them; then everything is searched that anybody can read."""
    search = run_canary_search(folder)
    return Outcome(
        bounds=(
            exactly("places where one is", len(search.hits), 0),
            at_least("places searched", search.searched, 40),
            at_least("bytes searched", search.searched_bytes, 100_000),
            at_least("canaries", search.canaries, 8),
            exactly("kinds of places without output", len(search.empty_kinds), 0),
        ),
        figures={"requests": search.requests},
        note="; ".join([*search.hits[:10], *search.empty_kinds]),
    )


# ---------------------------------------------------------------------------------------------- B8


@case(
    "B8",
    "the time of an answer does not tell what another tenant has asked",
    engines=Engines.SIMULATED,
    minutes=5,
)
def timing_side_channel(folder: Path) -> Outcome:
    """Tenants apart, against tenants that share a cache: that is what it is like without salts."""
    with secured_deployment(folder) as baton:
        send = {
            tenant: time_call(_sender(baton.client(tenant)))
            for tenant in ("acme", "beta", "one", "other")
        }
        rng = Random(8)
        shared = probe(send["one"], send["other"], pairs=60, rng=rng)
        isolated = probe(send["acme"], send["beta"], pairs=200, rng=rng)
        same_tenant = probe(send["beta"], send["beta"], pairs=40, rng=rng)
    bounds: tuple[Bound, ...] = (
        at_most("least difference that could be true, s", max(0.0, isolated.low_s), 0.0),
        at_most("greatest, of what a shared cache saves", isolated.high_s / shared.saved_s, 0.1),
        at_most("found in 99 of 100 runs, likewise", isolated.detectable_s / shared.saved_s, 0.1),
        at_least("found where tenants share, of a new prompt's time", shared.saved_fraction, 0.2),
        at_least("found of a tenant's own, likewise", same_tenant.saved_fraction, 0.2),
    )
    return Outcome(
        bounds=bounds,
        figures={
            "pairs": isolated.pairs,
            "a new prompt, s": isolated.cold_s,
            "difference, s": isolated.saved_s,
            "its standard error, s": isolated.error_s,
            "difference where tenants share, s": shared.saved_s,
        },
    )


def _sender(client: httpx.Client) -> Callable[[str], None]:
    def ask(prompt: str) -> None:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
        client.post(TEXT, json=body).raise_for_status()

    return ask
