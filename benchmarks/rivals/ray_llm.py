"""Ray Serve LLM with prefill and decode apart, as Ray's documents have it, over vLLM on the CPU.

    python -m benchmarks.rivals.ray_llm FOLDER MODEL PORT

Direct streaming over HAProxy, tokens sent as they come, and the variables of Ray Serve that baton
sets for itself. Its engines cannot be simulated, so that tokens come more slowly than elsewhere;
their processes are not counted either, so CPU by token compares, and times to the first token do
not.
"""

from __future__ import annotations

import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from baton.serving.cluster.reaper import RUN_DIR_VARIABLE, marked_processes, reap
from baton.serving.front.data_path import (
    DataPath,
    FrontSettings,
    find_haproxy,
    pick_front_ports,
    ray_environment,
    serve_environment,
)
from baton.transfer.nixl_progress import PROGRESS_DELAY_VARIABLE
from benchmarks._systems import API, ENGINE, HAPROXY, OTHER, System, pick_free_port
from benchmarks.rivals.contender import LaunchSite
from benchmarks.rivals.load import MODEL
from benchmarks.rivals.programs import NotAvailableError
from benchmarks.rivals.stacks import Program, ProgramStack

_MAX_LEN_TOKENS = 20_480
_ENGINE_CPUS = 2
_MAX_ONGOING_REQUESTS = 1024


class RayLlm:
    """All of Ray Serve LLM, in a Ray of its own. Satisfies `System`."""

    name = "ray_llm_pd"

    def __init__(self, site: LaunchSite) -> None:
        self._site = site
        self._folder = ""
        self._stack = ProgramStack(self.name, self._programs, health_route="/v1/models")

    @property
    def url(self) -> str:
        """Where HAProxy answers."""
        return self._stack.url

    def start(self) -> None:
        """Start Ray, Serve and both engines, and wait until they are healthy."""
        # Ray's sockets are below, and a socket's path holds 107 bytes.
        self._folder = tempfile.mkdtemp(prefix="baton-", dir="/tmp")
        (Path(self._folder) / "token").write_text(secrets.token_hex(32))
        self._stack.start()

    def process_groups(self) -> dict[str, list[psutil.Process]]:
        """All processes that it started, with any present parent."""
        groups: dict[str, list[psutil.Process]] = {g: [] for g in (API, HAPROXY, ENGINE, OTHER)}
        for pid in marked_processes(self._folder):
            try:
                process = psutil.Process(pid)
                groups[group_of(process.name(), process.cmdline())].append(process)
            except psutil.NoSuchProcess:
                continue
        return groups

    def stop(self) -> list[int]:
        """Let it end in good order, and see that nothing is left."""
        killed = self._stack.stop()
        leftover_pids = reap(self._folder, grace_s=2.0)
        shutil.rmtree(self._folder, ignore_errors=True)
        return [*killed, *leftover_pids]

    def _programs(self, *, folder: Path, port: int) -> Sequence[Program]:
        arguments = (self._folder, str(self._site.model), str(port))
        command = (sys.executable, "-m", "benchmarks.rivals.ray_llm", *arguments)
        return [Program(group=OTHER, command=command, environment=_environment(self._folder))]


def ray_llm_pd(site: LaunchSite) -> System:
    """Ray Serve LLM.

    Raises:
        NotAvailableError: there is no HAProxy, without which it does not stream directly.
    """
    if find_haproxy({}) is None:
        raise NotAvailableError("no HAProxy: install ray[serve]")
    return RayLlm(site)


def group_of(name: str, command: Sequence[str]) -> str:
    """Which group one of its processes belongs to.

    The decode replica is the API server, the prefill replica relays one request to its engine.
    """
    title = command[0] if command else name
    if name == "haproxy":
        return HAPROXY
    if title.startswith("VLLM::"):
        return ENGINE
    # LLMRouter chooses the replica of each request, by HAProxy's asking.
    replica_names = ("Prefill:", "Decode:", "LLMRouter")
    if title.startswith("ray::ServeReplica") and any(word in title for word in replica_names):
        return API
    return OTHER


def _environment(folder: str) -> Mapping[str, str]:
    front_settings = FrontSettings(
        data_path=DataPath.SERVE_HAPROXY, run_dir=Path(folder), ports=pick_front_ports()
    )
    return {
        **ray_environment(Path(folder) / "token"),
        **serve_environment(front_settings),
        RUN_DIR_VARIABLE: folder,
        # Read by the plugin in engine processes: else NIXL takes most of a core for nothing.
        PROGRESS_DELAY_VARIABLE: "1000",
        "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def main(folder: str, model: str, port: str) -> None:
    """Be the process that starts it all; ends on SIGTERM."""
    import ray
    from ray import serve
    from ray.serve.llm import build_pd_openai_app

    stop_signals = {signal.SIGTERM, signal.SIGINT}
    ray.init(
        address="local",
        num_cpus=16,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200_000_000,
        _temp_dir=f"{folder}/r",
        _node_ip_address="127.0.0.1",
    )
    signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals)
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    app = build_pd_openai_app({"prefill_config": _config(model), "decode_config": _config(model)})
    serve.run(app, name="llm", blocking=False)
    signal.sigwait(stop_signals)
    serve.shutdown()
    ray.shutdown()


def _config(model: str) -> dict[str, object]:
    return {
        "model_loading_config": {"model_id": MODEL, "model_source": model},
        "accelerator_config": {"kind": "cpu"},
        "placement_group_config": {"bundles": [{"CPU": _ENGINE_CPUS}]},
        "deployment_config": {"num_replicas": 1, "max_ongoing_requests": _MAX_ONGOING_REQUESTS},
        "experimental_configs": {
            "stream_batching_interval_ms": 0,
            "NIXL_SIDE_CHANNEL_PORT_BASE": pick_free_port(),
        },
        "log_engine_metrics": False,
        "engine_kwargs": {
            "max_model_len": _MAX_LEN_TOKENS,
            "enforce_eager": True,
            "max_num_seqs": 256,
            "distributed_executor_backend": "mp",
            "disable_log_stats": True,
            "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
        },
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
