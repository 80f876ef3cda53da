"""An operator of baton on a Ray cluster that runs."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Any

import httpx

from tests.e2e.deployments import CONFIGS
from tests.e2e.ray_nodes import RayCluster
from tests.fakes.free_ports import free_port
from tests.fakes.scaled_deadline import slowdown

COMMAND_TIMEOUT_S = 120.0
UP_TIMEOUT_S = 300.0


class Operator:
    """An operator with a shell in which `RAY_ADDRESS` names the cluster."""

    def __init__(self, nodes: RayCluster) -> None:
        self.nodes = nodes
        self.port = free_port()
        sets = (f"server.port={self.port}", "observability.metrics.port=0")
        words = (word for set_ in sets for word in ("--set", set_))
        self.options = ("-c", str(CONFIGS / "sim.yaml"), *words)
        # As in a pod of an exported file, where every process has it.
        throughput = {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
        self._environment = {**throughput, **nodes.environment, "RAY_ADDRESS": nodes.address}

    def run(
        self, *words: str, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "baton.cli.main", *words],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=timeout_s * slowdown(),
            check=False,
        )

    def run_json(self, *words: str, timeout_s: float = COMMAND_TIMEOUT_S) -> Any:  # noqa: ANN401 - as it prints
        process = self.run(*words, "--output", "json", timeout_s=timeout_s)
        assert process.returncode == 0, process.stderr
        return json.loads(process.stdout)

    def run_failing(self, *words: str) -> str:
        process = self.run(*words)
        assert process.returncode in {1, 3, 4}, process.stdout
        assert "Traceback" not in process.stderr
        return process.stderr

    def up(self, *more: str) -> Any:  # noqa: ANN401 - as it prints
        return self.run_json("up", *self.options, *more, timeout_s=UP_TIMEOUT_S)

    def stream(self, max_tokens: int = 8, started: threading.Event | None = None) -> int:
        """How many tokens came of a stream that had its usual end."""
        body = {"model": "tiny", "prompt": "hello there", "max_tokens": max_tokens, "stream": True}
        # An event may hold two tokens, where the one before it was not sent yet.
        body["stream_options"] = {"include_usage": True}
        url, tokens, last = f"http://127.0.0.1:{self.port}/v1/completions", 0, ""
        with httpx.stream("POST", url, json=body, timeout=120.0 * slowdown()) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    usage = json.loads(line.removeprefix("data: ")).get("usage")
                    tokens = tokens if usage is None else int(usage["completion_tokens"])
                    if started is not None:
                        started.set()
                last = line or last
        assert last == "data: [DONE]"
        return tokens
