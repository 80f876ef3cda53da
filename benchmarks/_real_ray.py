"""Ray Serve LLM with prefill and decode apart, over engines with settings that are given.

    python -m benchmarks._real_ray FOLDER ENGINE_JSON PORT

As `benchmarks/rivals/ray_llm.py`, whose surroundings it has, but for the engines' settings.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from baton.serving.front.data_path import find_haproxy
from benchmarks._systems import pick_free_port
from benchmarks.rivals.contender import LaunchSite
from benchmarks.rivals.load import MODEL
from benchmarks.rivals.programs import NotAvailableError
from benchmarks.rivals.ray_llm import RayLlm
from benchmarks.rivals.stacks import Program

_KV_SPACE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
"""Where it is set, vLLM's CPU engine does not heed the size among its arguments."""
_SEPARATE_ARGUMENTS = frozenset({"model", "served_model_name"})
_MAX_ONGOING_REQUESTS = 1024


class RealRayLlm(RayLlm):
    """All of Ray Serve LLM, in a Ray of its own. Satisfies `System`."""

    def __init__(
        self, model: Path, engine: Mapping[str, Any], variables: Mapping[str, str]
    ) -> None:
        """`engine` holds vLLM's arguments, `variables` the environment of the engines.

        Raises:
            NotAvailableError: there is no HAProxy, without which it does not stream directly.
        """
        if find_haproxy({}) is None:
            raise NotAvailableError("no HAProxy: install ray[serve]")
        super().__init__(LaunchSite(model=model, bytes_per_token=0.0))
        self._engine = json.dumps({**engine, "model": str(model)})
        self._variables = variables

    def _programs(self, *, folder: Path, port: int) -> Sequence[Program]:
        (program,) = super()._programs(folder=folder, port=port)
        arguments = (self._folder, self._engine, str(port))
        base_environment = {k: v for k, v in program.environment.items() if k != _KV_SPACE_VARIABLE}
        return [
            replace(
                program,
                command=(sys.executable, "-m", "benchmarks._real_ray", *arguments),
                environment={**base_environment, **self._variables},
            )
        ]


def main(folder: str, engine: str, port: str) -> None:
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
    pools = (f"{pool}_config" for pool in ("prefill", "decode"))
    app = build_pd_openai_app({pool: llm_config(json.loads(engine)) for pool in pools})
    serve.run(app, name="llm", blocking=False)
    signal.sigwait(stop_signals)
    serve.shutdown()
    ray.shutdown()


def llm_config(engine: Mapping[str, Any]) -> dict[str, Any]:
    """One pool's configuration, for engines with these arguments of vLLM's."""
    engine_kwargs = {
        name: value for name, value in engine.items() if name not in _SEPARATE_ARGUMENTS
    }
    return {
        "model_loading_config": {"model_id": MODEL, "model_source": engine["model"]},
        "accelerator_config": {"kind": "cpu"},
        "placement_group_config": {"bundles": [{"CPU": 2}]},
        "deployment_config": {"num_replicas": 1, "max_ongoing_requests": _MAX_ONGOING_REQUESTS},
        "experimental_configs": {
            "stream_batching_interval_ms": 0,
            "NIXL_SIDE_CHANNEL_PORT_BASE": pick_free_port(),
        },
        "log_engine_metrics": False,
        "engine_kwargs": {
            **engine_kwargs,
            "distributed_executor_backend": "mp",
            "disable_log_stats": True,
            "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
        },
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
