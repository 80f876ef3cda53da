"""A killed replica process takes its whole engine with it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from tests.fakes.free_ports import HOST, free_port
from tests.fakes.tiny_model import tiny_model

pytestmark = [pytest.mark.real, pytest.mark.thorough, pytest.mark.timeout(300)]

REPLICA = """
    import asyncio, json, os, sys
    from dataclasses import replace

    async def main():
        from pathlib import Path
        from baton.domain.fleet import Role
        from baton.engine.vllm.core.engine import VllmEngine
        from tests.engine.vllm_engines import engine_settings

        settings = engine_settings(Path(sys.argv[1]), Role.PREFILL, port=int(sys.argv[2]))
        if (workers := int(sys.argv[3])) > 1:
            mp = {"distributed_executor_backend": "mp"}
            settings = replace(settings, tensor_parallel=workers, extra=mp)
        engine = VllmEngine(settings)
        await engine.start()
        print(json.dumps(engine.processes()), flush=True)
        async for _ in engine.steps():
            pass

    if __name__ == "__main__":
        asyncio.run(main())
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_killing_a_replica_leaves_no_engine_process_and_a_free_port(
    tmp_path: Path, workers: int
) -> None:
    model, port = tiny_model(tmp_path), free_port()
    script = tmp_path / "replica.py"
    script.write_text(textwrap.dedent(REPLICA))
    command = [sys.executable, str(script), str(model), str(port), str(workers)]
    root = Path(__file__).parents[2]
    replica = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=root, env=_environment(root)
    )
    try:
        engine = [psutil.Process(pid) for pid in json.loads(_json_line(replica))]
        family = psutil.Process(replica.pid).children(recursive=True)
        assert len(engine) >= 2
        assert _is_listening(port)
    finally:
        replica.kill()
        replica.wait()
    _, alive = psutil.wait_procs({*engine, *family}, timeout=3)
    for process in alive:
        process.kill()
    if replica.stdout is not None:
        replica.stdout.close()
    assert alive == []
    assert not _is_listening(port)
    with socket.create_server((HOST, port)):
        pass


def _environment(root: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(root)}


def _json_line(replica: subprocess.Popen[str]) -> str:
    assert replica.stdout is not None
    for line in replica.stdout:
        if line.startswith("["):
            return line
    raise AssertionError(f"the replica ended with {replica.wait()} before its engine was up")


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0
