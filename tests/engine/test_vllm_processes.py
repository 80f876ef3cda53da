"""An engine's processes: started only when that can work, and never left behind."""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from baton.domain.errors import EngineStartFailed
from baton.domain.fleet import Role
from baton.domain.names.process_names import OWNER_ENV_VAR, process_name
from baton.engine.vllm.core import engine
from baton.engine.vllm.core.settings import (
    NixlSettings,
    VllmEngineSettings,
    engine_arguments,
    engine_environment,
    kv_role,
)
from baton.engine.vllm.patches import plugin, table

HOST = "127.0.0.1"

PARENT = """
    import os, signal, subprocess, sys, threading
    from baton.engine.vllm.patches.plugin import die_with_parent
    child = subprocess.Popen([sys.executable, "-c", '''if True:
        import os, signal, sys
        from baton.engine.vllm.patches.plugin import die_with_parent
        die_with_parent(%d)
        print(os.getpid(), flush=True)
        signal.pause()
    ''' % (os.getpid() + {wrong_by})])
    child.wait()
    print("child ended", child.returncode, flush=True)
    signal.pause()
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def settings(model: Path | str, *, nixl: NixlSettings | None = None) -> VllmEngineSettings:
    return VllmEngineSettings(
        replica_id="p0",
        pool="prefill",
        model_source=str(model),
        model_name="tiny",
        role=Role.PREFILL,
        nixl=nixl,
    )


def start_parent(*, wrong_by: int) -> subprocess.Popen[str]:
    code = textwrap.dedent(PARENT).replace("{wrong_by}", str(wrong_by))
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def first_line(parent: subprocess.Popen[str]) -> str:
    assert parent.stdout is not None
    return parent.stdout.readline().strip()


# ------------------------------------------------------------------ before a start
def test_a_model_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineStartFailed, match=r"nowhere' does not exist; give"):
        engine.check_startable(settings(tmp_path / "nowhere"), on_cpu=True)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineStartFailed, match=r"has no config\.json"):
        engine.check_startable(settings(tmp_path), on_cpu=True)


def test_a_hub_id_is_not_taken_for_a_folder() -> None:
    engine.check_startable(settings("someone/some-model"), on_cpu=True)


def test_a_side_channel_port_in_use_is_named(model: Path) -> None:
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        wanted = settings(model, nixl=NixlSettings(host=HOST, port=port))
        with pytest.raises(EngineStartFailed, match=f"cannot listen on {HOST}:{port}"):
            engine.check_startable(wanted, on_cpu=True)
    engine.check_startable(wanted, on_cpu=True)


def test_a_kv_cache_beyond_the_memory_is_refused_on_a_cpu_only(model: Path) -> None:
    wanted = replace(settings(model), kv_cache_bytes=1 << 50)
    with pytest.raises(EngineStartFailed, match="not enough memory"):
        engine.check_startable(wanted, on_cpu=True)
    engine.check_startable(wanted, on_cpu=False)


def test_a_block_size_that_a_cpu_cannot_serve_is_refused_there(model: Path) -> None:
    wanted = replace(settings(model), block_size_tokens=16)
    with pytest.raises(EngineStartFailed, match="multiples of 32"):
        engine.check_startable(wanted, on_cpu=True)
    engine.check_startable(wanted, on_cpu=False)


# ------------------------------------------------------------------ arguments and environment
@pytest.mark.parametrize(
    ("role", "told"),
    [
        (Role.PREFILL, "kv_producer"),
        (Role.DECODE, "kv_consumer"),
        (Role.MIXED, "kv_both"),
    ],
)
def test_each_role_is_told_to_the_connector(role: Role, told: str) -> None:
    assert kv_role(role) == told
    wanted = replace(settings("m", nixl=NixlSettings(host=HOST, port=1)), role=role)
    assert engine_arguments(wanted, None)["kv_transfer_config"]["kv_role"] == told


def test_without_nixl_an_engine_gets_no_connector() -> None:
    assert "kv_transfer_config" not in engine_arguments(settings("m"), None)


def test_raw_arguments_win() -> None:
    wanted = replace(settings("m"), dtype="bfloat16", extra={"dtype": "float32", "seed": 3})
    arguments = engine_arguments(wanted, None)
    assert (arguments["dtype"], arguments["seed"]) == ("float32", 3)


def test_an_engines_environment_lasts_for_its_start_only() -> None:
    wanted = replace(settings("m", nixl=NixlSettings(host=HOST, port=7001)), env={"MINE": "1"})
    environment = engine_environment(wanted, Path("/run/engine"))
    before = dict(os.environ)
    with engine.patched_environment(environment):
        assert os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "7001"
        assert os.environ["VLLM_RPC_BASE_PATH"] == "/run/engine"
        assert os.environ["MINE"] == "1"
        assert os.environ[OWNER_ENV_VAR] == process_name()
    assert dict(os.environ) == before


# ------------------------------------------------------------------ the end of a parent
def test_a_child_dies_when_its_parent_is_killed() -> None:
    parent = start_parent(wrong_by=0)
    child = psutil.Process(int(first_line(parent)))
    parent.kill()
    parent.communicate()
    gone, alive = psutil.wait_procs([child], timeout=3)
    assert (len(gone), len(alive)) == (1, 0)


def test_a_child_whose_parent_died_before_it_could_ask_ends_itself() -> None:
    parent = start_parent(wrong_by=1)
    try:
        assert first_line(parent) == f"child ended {-signal.SIGKILL}"
    finally:
        parent.kill()
        parent.communicate()


def test_the_plugin_leaves_processes_alone_that_are_not_our_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(plugin, "die_with_parent", asked.append)
    for name in ("RANK_REPORTS", "RESUME", "REFUSALS", "CACHE_REPORT"):
        patch = replace(
            getattr(table, name),
            guard=lambda: None,
            apply=functools.partial(asked.append, name),
        )
        monkeypatch.setattr(table, name, patch)
    monkeypatch.delenv(OWNER_ENV_VAR, raising=False)
    plugin.install()
    monkeypatch.setenv(OWNER_ENV_VAR, process_name())
    plugin.install()
    assert asked == []
    # A worker that Ray started: ours, but with no parent of multiprocessing's; on another node,
    # where it may have the number that the asking process has on its own.
    with monkeypatch.context() as there:
        there.setattr(os, "uname", lambda: SimpleNamespace(nodename="elsewhere"))
        asker = process_name()
    monkeypatch.setenv(OWNER_ENV_VAR, asker)
    plugin.install()
    assert asked == ["RANK_REPORTS", "RESUME", "REFUSALS", "CACHE_REPORT"]
