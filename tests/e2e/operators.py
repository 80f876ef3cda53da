"""Who gives baton's commands to a Ray cluster that runs."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Any

import httpx

from tests.e2e.deployments import CONFIGS
from tests.e2e.ray_nodes import Nodes
from tests.fakes.free_ports import free_port
from tests.fakes.scaled_deadline import slowness

VERB_S = 120.0
UP_S = 300.0


class Operator:
    """Who gives commands from a shell in which `RAY_ADDRESS` names the cluster."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.port = free_port()
        sets = (f"server.port={self.port}", "observability.metrics.port=0")
        words = (word for one in sets for word in ("--set", one))
        self.options = ("-c", str(CONFIGS / "sim.yaml"), *words)
        self._environment = {**nodes.environment, "RAY_ADDRESS": nodes.address}

    def says(self, *words: str, within_s: float = VERB_S) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "baton.cli.main", *words],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=within_s * slowness(),
            check=False,
        )

    def asks(self, *words: str, within_s: float = VERB_S) -> Any:  # noqa: ANN401 - as it prints
        done = self.says(*words, "--output", "json", within_s=within_s)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def fails(self, *words: str) -> str:
        done = self.says(*words)
        assert done.returncode in {1, 3, 4}, done.stdout
        assert "Traceback" not in done.stderr
        return done.stderr

    def up(self, *more: str) -> Any:  # noqa: ANN401 - as it prints
        return self.asks("up", *self.options, *more, within_s=UP_S)

    def stream(self, max_tokens: int = 8, began: threading.Event | None = None) -> int:
        """How many tokens came of a stream that had its usual end."""
        body = {"model": "tiny", "prompt": "hello there", "max_tokens": max_tokens, "stream": True}
        url, tokens, last = f"http://127.0.0.1:{self.port}/v1/completions", 0, ""
        with httpx.stream("POST", url, json=body, timeout=120.0 * slowness()) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    tokens += 1
                    if began is not None:
                        began.set()
                last = line or last
        assert last == "data: [DONE]"
        return tokens
