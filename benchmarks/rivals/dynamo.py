"""NVIDIA Dynamo: its frontend and KV router in Rust, over its own mock engine.

Files for discovery and TCP between processes, so that neither etcd nor NATS is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks._systems import API, ENGINE, System, pick_free_port
from benchmarks.rivals.contender import LaunchSite
from benchmarks.rivals.load import MODEL
from benchmarks.rivals.programs import Package, create_environment
from benchmarks.rivals.stacks import MakePrograms, Program, ProgramStack

DYNAMO = Package(
    name="dynamo",
    # Its dependency `aisimulate` is a stub that downloads from elsewhere; frontend, router and
    # mocker do without.
    without_dependencies=("ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1"),
    requirements=(
        "aiohttp>=3.14.3,<4",
        "fastokens==0.3.5",
        "msgspec>=0.19",
        "prometheus-client<1",
        "pydantic<=2.13.5",
        "pyzmq>=26",
        "transformers>=4.56",
        "uvloop>=0.21",
        "zstandard<1",
    ),
)


def dynamo(
    name: str, *, tokenizer: str, disaggregated: bool = False
) -> Callable[[LaunchSite], System]:
    """Frontend with its KV router, and its mock engine."""

    def make(site: LaunchSite) -> System:
        return ProgramStack(name, _programs(site, tokenizer, disaggregated=disaggregated))

    return make


def _programs(site: LaunchSite, tokenizer: str, *, disaggregated: bool) -> MakePrograms:
    python = str(create_environment(DYNAMO) / "python")
    engine = site.engine_settings()

    def mocker(role: str, variables: dict[str, str]) -> Program:
        # Its own model of time: prefill ten times as fast, decode as it is, 5.7 ms a step.
        slower = {"agg": 0.1, "prefill": 1, "decode": 1}[role]
        flags = {
            "model-path": site.model,
            "model-name": MODEL,
            "block-size": engine.block_size_tokens,
            "num-gpu-blocks-override": engine.kv_blocks,
            "max-num-seqs": engine.max_running_requests,
            "max-num-batched-tokens": engine.max_batched_tokens,
            "speedup-ratio": 1 if role == "decode" else 10,
            "decode-speedup-ratio": slower,
            "disaggregation-mode": role,
        }
        if role == "prefill":
            flags["bootstrap-ports"] = pick_free_port()
        words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
        command = (python, "-m", "dynamo.mocker", *words)
        return Program(group=ENGINE, command=command, environment=variables)

    def make(*, folder: Path, port: int) -> Sequence[Program]:
        variables = {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(folder / "discovery"),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_LOG": "warn",
        }
        command = [python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1"]
        command += ["--http-port", str(port), "--router-mode", "kv", "--tokenizer", tokenizer]
        command += ["--no-tokenizer-fallback"]
        roles = ("prefill", "decode") if disaggregated else ("agg",)
        return [
            Program(group=API, command=command, environment=variables),
            *(mocker(role, variables) for role in roles),
        ]

    return make
