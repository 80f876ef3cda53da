"""Unauthenticated clients at the ports of a whole deployment, and secrets in its output."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import psutil

from baton.runtime.keys.api_keys import mint
from baton.runtime.keys.key_files import edit_key_file
from baton.serving.cluster.cluster_state import ClusterState, running_clusters, state_folder
from baton.serving.cluster.reaper import marked_processes
from baton.serving.doctor_facts import open_ports
from baton.serving.ray.auth_probe import probe_ray_auth
from tests.chaos.case import Bound, Engines, Outcome, at_least, case, exactly
from tests.e2e.deployments import Deployment, running_deployment
from tests.fakes.certificates import KeyPair, make_key_pair

_CANARY = "the-merger-closes-on-friday"
_WRONG_KEY = "sk-baton-acme-0000_wrong"


@case(
    "S3",
    "a deployment for everybody, with TLS and keys: what others reach of it, what it writes down",
    engines=Engines.SIMULATED,
    minutes=4,
)
def deployment_security(folder: Path) -> Outcome:
    """One port, with TLS only. The rest is for this machine, and secrets are nowhere."""
    pair, token, api_key = make_key_pair(folder, "server"), _token(folder), _api_key(folder)
    sets = {
        "server.host": "0.0.0.0",  # noqa: S104 - what others reach of that is the question
        "security.tls.cert_file": pair.cert,
        "security.tls.key_file": pair.key,
        "tenants.acme.keys_file": folder / "acme.keys",
        "observability.token_file": folder / "token",
    }
    with running_deployment("sim.yaml", folder, **sets) as deployment:
        state = _state(deployment)
        port_bounds = _check_ports(deployment, state)
        clients = _clients(deployment, pair, api_key)
        link_keys = _link_keys(state.address, state.token_file)
        secrets = {
            "prompt": _CANARY,
            "API key": api_key,
            "API key's random part": api_key.rpartition("_")[2],
            "a wrong API key": _WRONG_KEY,
            "console token": token,
            "Ray's token": Path(state.token_file).read_text(),
            "TLS key": pair.key.read_text().splitlines()[1],
            **{f"link key {n}": name for n, name in enumerate(link_keys)},
        }
        texts = _all_texts(deployment, state, token)
    leaks = [
        f"{name} in {where}"
        for where, text in texts.items()
        for name, secret in secrets.items()
        if secret in text
    ]
    bounds = (
        *port_bounds,
        *clients,
        exactly("link keys that were there to be found", len(link_keys), 2),
        at_least("texts that were searched", len(texts), 30),
        exactly("secrets that were found", len(leaks), 0),
    )
    return Outcome(bounds=bounds, figures={"found": str(leaks[:10])}, note="; ".join(leaks[:3]))


def _check_ports(deployment: Deployment, state: ClusterState) -> tuple[Bound, ...]:
    """What others than this machine's owner could come in by."""
    port = int(deployment.url.rpartition(":")[2])
    declared_ports = [other.port for other in open_ports(state)]
    answering = [value for value in _listening(state.pid, state.run_dir) if _is_answering(value)]
    readable_files = _readable_secrets(Path(state.run_dir))
    return (
        exactly("ports on addresses of others", str(declared_ports), str([port])),
        exactly("ports that answer at this machine's own address", str(answering), str([port])),
        exactly(
            "Ray's answer to a client without a token", probe_ray_auth(state.address), "guarded"
        ),
        exactly("sockets and secrets that other users could open", str(readable_files), "[]"),
    )


def _clients(deployment: Deployment, pair: KeyPair, api_key: str) -> tuple[Bound, ...]:
    """What clients get, in clear and over TLS, with keys and without."""
    port = int(deployment.url.rpartition(":")[2])
    url = f"https://127.0.0.1:{port}/v1/completions"
    body = {"model": "tiny", "prompt": _CANARY, "max_tokens": 16, "stream": True}
    statuses, ended = list[int](), ""
    with httpx.Client(verify=pair.client_context(), timeout=60) as client:
        for key in (api_key, _WRONG_KEY, ""):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            with client.stream("POST", url, json=body, headers=headers) as answer:
                lines = [line for line in answer.iter_lines() if line]
            statuses.append(answer.status_code)
            ended = ended or lines[-1]
    return (
        exactly("answers in clear at the public port", _plain_answers(port), 0),
        exactly("answers: with the key, a wrong one, none", str(statuses), "[200, 401, 401]"),
        exactly("how a stream over TLS ended", ended, "data: [DONE]"),
    )


def _state(deployment: Deployment) -> ClusterState:
    (found,) = [
        cluster
        for cluster in running_clusters(state_folder())
        if cluster.pid == deployment.process.pid
    ]
    return found


def _listening(pid: int, run_dir: str) -> list[int]:
    ports: set[int] = set()
    for marked_process in {pid, *marked_processes(run_dir)}:
        with contextlib.suppress(psutil.Error):
            ports |= {
                c.laddr.port
                for c in psutil.Process(marked_process).net_connections(kind="tcp")
                if c.status == psutil.CONN_LISTEN
            }
    return sorted(ports)


def _is_answering(port: int) -> bool:
    """Whether a port answers at an address of this machine that others have, too."""
    with socket.socket() as probe:
        probe.settimeout(2.0)
        return probe.connect_ex((_own_address(), port)) == 0


def _own_address() -> str:
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return address.address
    raise RuntimeError("this machine has no address but its own loopback")


def _plain_answers(port: int) -> int:
    answers = 0
    for host in ("127.0.0.1", _own_address()):
        with contextlib.suppress(httpx.TransportError):
            httpx.get(f"http://{host}:{port}/health", timeout=5)
            answers += 1
    return answers


def _readable_secrets(run_dir: Path) -> list[str]:
    """Sockets, and files with secrets, that another user could reach and open."""
    if stat.S_IMODE(run_dir.stat().st_mode) & 0o077:
        return [str(run_dir)]
    secret = [run_dir / "token", *run_dir.glob("h/**/a.sock"), *run_dir.glob("h/**/haproxy.cfg")]
    return [str(path) for path in secret if stat.S_IMODE(path.stat().st_mode) & 0o077]


def _token(folder: Path) -> str:
    token = f"console-{random.SystemRandom().getrandbits(64):x}"
    (folder / "token").touch(mode=0o600)
    (folder / "token").write_text(token)
    return token


def _api_key(folder: Path) -> str:
    key, token = mint("acme", now=datetime.now(UTC))
    with edit_key_file(folder / "acme.keys", create=True) as document:
        document.add(key)
    return token


def _link_keys(address: str, token_file: str) -> list[str]:
    """As an operator with the cluster's token could read them."""
    program = (
        "import sys, json, ray\n"
        "from baton.serving.cluster.local_cluster import attach\n"
        "attach(sys.argv[1], token_file=sys.argv[2])\n"
        "from baton.serving.store.config_store import HeadStore\n"
        "kept = HeadStore().get('link-keys')\n"
        "print('KEYS', (kept or b'[]').decode())\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", program, address, token_file],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=dict(os.environ),
    )
    (line,) = [other for other in process.stdout.splitlines() if other.startswith("KEYS ")]
    keys: list[str] = json.loads(line.removeprefix("KEYS "))
    return keys


def _all_texts(deployment: Deployment, state: ClusterState, token: str) -> dict[str, str]:
    """The output and files of the deployment, by place."""
    run_dir = Path(state.run_dir)
    texts = dict(_operator_texts(deployment, token)) | dict(_arguments(state.pid, state.run_dir))
    texts |= dict(_files(run_dir, excluded={"token"}))
    return texts | {"up.log": deployment.log.read_text(errors="replace")}


def _operator_texts(deployment: Deployment, token: str) -> Iterator[tuple[str, str]]:
    show_config = ("config", "show", *deployment.options)
    for command in (("status",), ("requests",), show_config):
        answer = deployment._run_command(*command, timeout_s=120)
        yield f"baton {command[0]}", (answer.stdout + answer.stderr).decode(errors="replace")
    url = str(deployment.status()["observability"]["url"])
    bearer = {"authorization": f"Bearer {token}"}
    for path in ("/metrics", "/sd", "/", "/api/config"):
        page = httpx.get(f"{url}{path}", headers=bearer, timeout=20, follow_redirects=True)
        yield f"console {path} {page.status_code}", page.text


def _arguments(pid: int, run_dir: str) -> Iterator[tuple[str, str]]:
    """What every user of the machine sees of each process: its name and arguments."""
    for marked_process in {pid, *marked_processes(run_dir)}:
        with contextlib.suppress(OSError):
            command_line = Path(f"/proc/{marked_process}/cmdline").read_bytes().replace(b"\0", b" ")
            yield f"arguments of {marked_process}", command_line.decode(errors="replace")


def _files(folder: Path, *, excluded: set[str]) -> Iterator[tuple[str, str]]:
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.name not in excluded:
            with contextlib.suppress(OSError):
                yield str(path.relative_to(folder)), path.read_text(errors="replace")
