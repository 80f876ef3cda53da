"""A Ray cluster of its own that is given baton by Serve's REST API, as KubeRay gives it; says what
came of it as one JSON object. Arguments: a configuration, and a folder with a short path.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import httpx

from baton.config.load import load_config
from baton.manifests.cluster_deployment import adapt_to_cluster
from baton.manifests.environment import RUN_DIR, ray_variables
from baton.manifests.serve_config import serve_config

_READY_S = 150.0


def main() -> None:
    """Deploy, ask, change the configuration, ask again."""
    path, folder = Path(sys.argv[1]), Path(sys.argv[2])
    deployment = adapt_to_cluster(load_config([path]))
    token = "0" * 32
    (folder / "token").write_text(token)
    (folder / "token").chmod(0o600)
    variables = ray_variables(deployment.config).items()
    environment = {name: value.replace(str(RUN_DIR), str(folder)) for name, value in variables}
    auth_variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
    os.environ.update(environment | auth_variables | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"})
    import ray

    context = ray.init(
        address="local",
        num_cpus=4,
        resources={"baton_front": 1, "baton_head": 1},
        include_dashboard=True,
        object_store_memory=128 * 1024 * 1024,
        log_to_driver=False,
        _temp_dir=str(folder / "r"),
        _node_ip_address="127.0.0.1",
    )
    rest = httpx.Client(
        base_url=f"http://{context.dashboard_url}",
        headers={"Authorization": f"Bearer {token}"},
        timeout=30.0,
    )
    api = f"http://127.0.0.1:{deployment.config.server.port}"
    try:
        config = serve_config(deployment)
        first = _deploy(rest, config)
        answer = _ask_until_answered(api)
        _change(config)
        second = _deploy(rest, config)
        report = {
            "first": first,
            "answer": answer,
            "second": second,
            "again": _ask_until_answered(api),
        }
        sys.stdout.write(json.dumps(report | {"generation": _generation()}) + "\n")
    finally:
        ray.shutdown()


def _change(config: dict[str, object]) -> None:
    (application,) = config["applications"]  # type: ignore[misc]  # there is one
    application["args"]["config"]["slo"] = {"default": {"ttft": "3s"}}  # type: ignore[has-type]


def _deploy(rest: httpx.Client, config: dict[str, object]) -> dict[str, str]:
    put = rest.put("/api/serve/applications/", json=config)
    put.raise_for_status()
    until_s = time.monotonic() + _READY_S
    application: dict[str, object] = {}
    while time.monotonic() < until_s:
        time.sleep(1.0)
        answer = rest.get("/api/serve/applications/")
        if answer.is_success:
            application = answer.json()["applications"].get("baton", {})
            if application.get("status") in {"RUNNING", "DEPLOY_FAILED", "UNHEALTHY"}:
                break
    deployments = application.get("deployments", {})
    assert isinstance(deployments, dict)
    states = {name: str(value["status"]) for name, value in deployments.items()}
    return {
        "application": f"{application.get('status')} {application.get('message')}".strip(),
        **states,
    }


def _ask_until_answered(api: str) -> str:
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}
    until_s = time.monotonic() + 60.0
    last_error = "nobody answered"
    while time.monotonic() < until_s:
        try:
            answer = httpx.post(f"{api}/v1/chat/completions", json=body, timeout=30.0)
            if answer.is_success:
                return str(answer.json()["choices"][0]["finish_reason"])
            last_error = answer.text
        except httpx.TransportError as error:
            last_error = str(error)
        time.sleep(0.5)
    return last_error


def _generation() -> int:
    from baton.serving.store.config_store import Generations

    return Generations().newest_number()


if __name__ == "__main__":
    main()
