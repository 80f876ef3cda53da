"""Whether a deployment that is scaled to zero serves the request that comes then, each time.

A balancer stands in front, as one does in production: an HAProxy that asks for `/health` and sends
requests only while the answer is 200. Whenever no replica is left, one request comes through it, in
turn of a class without an SLO, and of one whose TTFT objective is shorter than any cold start. It
must be served, by a replica that is started because of it. A second request comes while that start
is under way, and is to be served, too. The part fails when a request was refused or the balancer
took the deployment out.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from baton.serving.front.data_path import find_haproxy
from benchmarks._program import say
from benchmarks._statistics import round_floats
from benchmarks._systems import ENGINE, BatonDeployment, pick_free_port
from benchmarks.deployed.part import Found

SCENARIO = "from-zero"
CLASSES = ("default", "chat")
_ANSWER_S = 150.0
_EMPTY_S = 120.0
_POLL_S = 0.2
_SECOND_S = 1.0
_BALANCER = """
global
    maxconn 256
    stats socket {folder}/stats mode 600
defaults
    mode http
    timeout connect 5s
    timeout client 300s
    timeout server 300s
frontend clients
    bind 127.0.0.1:{port}
    default_backend fleet
backend fleet
    option httpchk GET /health
    http-check expect status 200
    server baton 127.0.0.1:{backend} check inter 500ms fall 2 rise 1
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wake:
    """One request to a deployment without replicas, and one that came shortly after it."""

    slo_class: str
    statuses: tuple[int, int]
    first_token_s: float
    """Of the first one."""
    reason: str = ""
    """The error of the first that was not served; empty where both were."""

    @property
    def served(self) -> bool:
        """Whether both were."""
        return self.statuses == (200, 200) and not self.reason


def measure(options: argparse.Namespace) -> Found:
    """Start a deployment, wake it up `options.wakes` times, end it."""
    baton = BatonDeployment("baton", SCENARIO)
    wakes: list[Wake] = []
    try:
        baton.start()
        with balancer(int(baton.url.rpartition(":")[2])) as front:
            for number in range(options.wakes):
                await_zero(baton, front.url)
                wakes.append(wake(front.url, CLASSES[number % len(CLASSES)]))
                say(f"{number + 1}: {json.dumps(round_floats(asdict(wakes[-1])))}")
            downs = front.downs()
    finally:
        left = baton.stop()
    figures = summary(wakes, downs, left)
    good = bool(wakes) and figures["served"] == len(wakes) and not downs
    return Found(figures=figures, details={"wakes": [asdict(other) for other in wakes]}, good=good)


def summary(wakes: Sequence[Wake], downs: int, left: Sequence[int]) -> dict[str, Any]:
    """The figures of a run."""
    waits_s = sorted(other.first_token_s for other in wakes)
    return {
        "label": "M, simulated engines on Ray",
        "wakes": len(wakes),
        "served": sum(other.served for other in wakes),
        "first_token_min_s": waits_s[0] if waits_s else None,
        "first_token_max_s": waits_s[-1] if waits_s else None,
        "balancer_downs": downs,
        "problems": [other.reason for other in wakes if other.reason][:5],
        "left_behind": list(left),
    }


# ------------------------------------------------------------------ the balancer


@dataclass(frozen=True, slots=True, kw_only=True)
class Balancer:
    """What stands in front of the deployment."""

    url: str
    stats: Callable[[], int]

    def downs(self) -> int:
        """How often it has taken the deployment out, because a health check failed."""
        return self.stats()


@contextmanager
def balancer(backend: int) -> Iterator[Balancer]:
    """An HAProxy that asks the deployment whether it is healthy."""
    binary = find_haproxy(os.environ)
    if binary is None:
        raise RuntimeError("no executable haproxy was found, expected one as balancer")
    port = pick_free_port()
    with tempfile.TemporaryDirectory(prefix="baton-", dir="/tmp") as folder:
        config = Path(folder) / "balancer.cfg"
        config.write_text(_BALANCER.format(port=port, backend=backend, folder=folder))
        process = subprocess.Popen([binary, "-db", "-f", str(config)])  # noqa: S603 - our own
        try:
            url = f"http://127.0.0.1:{port}"
            _await(lambda: _health(url) == httpx.codes.OK, 20.0, "the balancer admits no client")
            yield Balancer(url=url, stats=lambda: _downs(Path(folder) / "stats"))
        finally:
            process.terminate()
            process.wait(timeout=10)


def _downs(path: Path) -> int:
    with socket.socket(socket.AF_UNIX) as asked:
        asked.connect(str(path))
        asked.sendall(b"show stat\n")
        received = b""
        while chunk := asked.recv(65536):
            received += chunk
    head, *rows = received.decode().lstrip("# ").splitlines()
    names = head.split(",")
    rows_of = (dict(zip(names, row.split(","), strict=False)) for row in rows)
    return sum(int(row["chkdown"] or 0) for row in rows_of if row.get("svname") == "baton")


# ------------------------------------------------------------------ requests


def wake(url: str, slo_class: str) -> Wake:
    """Send one request, and another when the start has begun."""
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, url, slo_class)
        time.sleep(_SECOND_S)
        second = pool.submit(ask, url, slo_class)
        (status, first_token_s, reason), (other, _, why_other) = first.result(), second.result()
    return Wake(
        slo_class=slo_class,
        statuses=(status, other),
        first_token_s=first_token_s,
        reason=reason or why_other,
    )


def ask(url: str, slo_class: str) -> tuple[int, float, str]:
    """One streamed completion: its status, when its first token came, and what went wrong."""
    body = {"model": "tiny", "prompt": "from zero", "max_tokens": 8, "stream": True}
    headers = {} if slo_class == "default" else {"X-SLO-Class": slo_class}
    began_s, first_s, text = time.monotonic(), 0.0, ""
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body, headers=headers, timeout=_ANSWER_S
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data:") and not first_s:
                first_s = time.monotonic() - began_s
            text += line
    whole = answer.status_code == httpx.codes.OK and "[DONE]" in text
    return answer.status_code, first_s, "" if whole else text[:300]


def await_zero(baton: BatonDeployment, url: str) -> None:
    """Wait until no replica's process is left, while the deployment says that it is healthy."""
    _await(lambda: not baton.process_groups()[ENGINE], _EMPTY_S, "replicas are left")
    health = _health(url)
    if health != httpx.codes.OK:
        raise RuntimeError(f"/health of a deployment at zero: got {health}, expected 200")


def _health(url: str) -> int:
    try:
        return httpx.get(f"{url}/health", timeout=5.0).status_code
    except httpx.HTTPError:
        return 0


def _await(holds: Callable[[], bool], within_s: float, what: str) -> None:
    until_s = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > until_s:
            raise RuntimeError(f"{what} after {within_s:.0f} s")
        time.sleep(_POLL_S)
