"""Strangers at the ports of a whole deployment, and in whatever it writes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import httpx
import psutil

from baton.runtime.key_files import editing
from baton.runtime.keys import mint
from baton.serving.cluster_state import ClusterState, running_clusters, state_folder
from baton.serving.doctor_security import open_ports
from baton.serving.ray_door import ray_door
from baton.serving.reaper import marked_processes
from tests.chaos.case import Bound, Engines, Figure, Outcome, at_least, case, exactly
from tests.e2e.deployments import Deployment, running
from tests.fakes.certificates import make_pair

_CANARY = "the-merger-closes-on-friday"


# -------------------------------------------------------------------- S3: at the ports


@case(
    "S3",
    "a deployment for everybody, with TLS: what others reach of it, and what they get there",
    engines=Engines.SIMULATED,
    minutes=2,
)
def ports_of_a_deployment(folder: Path) -> Outcome:
    """One port, that speaks TLS only; the rest is for this machine, and files for their owner."""

    cert, key = _certificate(folder)
    sets = {
        "server.host": "0.0.0.0",  # noqa: S104 - what others reach of that is the question
        "security.tls.cert_file": cert,
        "security.tls.key_file": key,
    }
    with running("sim.yaml", folder, **sets) as deployment:
        state = _state(deployment)
        port = int(deployment.url.rpartition(":")[2])
        ports = open_ports(state)
        there = [one for one in _listening(state.pid, state.run_dir) if _reached(one)]
        plain = _plain_answers(port)
        ended = _streamed(f"https://127.0.0.1:{port}", cert)
        door = ray_door(state.address)
        loose = _loose_files(Path(state.run_dir))
    bounds = (
        exactly("ports on addresses of others", str([one.port for one in ports]), str([port])),
        exactly("ports that answer at this machine's own address", len(there), 1),
        exactly("answers in clear at the public port", plain, 0),
        exactly("how a stream over TLS ended", ended, "data: [DONE]"),
        exactly("how Ray meets somebody without a token", door, "guarded"),
        exactly("sockets and secrets that other users could open", len(loose), 0),
    )
    figures: Mapping[str, Figure] = {
        "open": str([f"{one.address}:{one.port} {one.program}" for one in ports]),
        "answered": str(there),
        "loose": str(loose),
    }
    return Outcome(bounds=bounds, figures=figures)


def _certificate(folder: Path) -> tuple[str, str]:
    pair = make_pair(folder, "server")
    return str(pair.cert), str(pair.key)


def _state(deployment: Deployment) -> ClusterState:
    (found,) = [
        one for one in running_clusters(state_folder()) if one.pid == deployment.process.pid
    ]
    return found


def _listening(pid: int, run_dir: str) -> list[int]:
    ports: set[int] = set()
    for one in {pid, *marked_processes(run_dir)}:
        with contextlib.suppress(psutil.Error):
            ports |= {
                c.laddr.port
                for c in psutil.Process(one).net_connections(kind="tcp")
                if c.status == psutil.CONN_LISTEN
            }
    return sorted(ports)


def _reached(port: int) -> bool:
    """Whether a port answers at an address of this machine that others have, too."""
    with socket.socket() as probe:
        probe.settimeout(2.0)
        return probe.connect_ex((_own_address(), port)) == 0


def _own_address() -> str:
    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            if one.family == socket.AF_INET and not one.address.startswith("127."):
                return one.address
    raise RuntimeError("this machine has no address but its own loopback")


def _plain_answers(port: int) -> int:
    answers = 0
    for host in ("127.0.0.1", _own_address()):
        with contextlib.suppress(httpx.TransportError):
            httpx.get(f"http://{host}:{port}/health", timeout=5)
            answers += 1
    return answers


def _streamed(url: str, cert: str) -> str:
    body = {"model": "tiny", "prompt": _CANARY, "max_tokens": 16, "stream": True}
    context = ssl.create_default_context(cafile=cert)
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body, verify=context, timeout=60
    ) as answer:
        lines = [line for line in answer.iter_lines() if line]
    return lines[-1]


def _loose_files(run_dir: Path) -> list[str]:
    """Sockets, and files with secrets, that another user could reach and open."""
    if stat.S_IMODE(run_dir.stat().st_mode) & 0o077:
        return [str(run_dir)]
    secret = [run_dir / "token", *run_dir.glob("h/**/a.sock"), *run_dir.glob("h/**/haproxy.cfg")]
    return [str(path) for path in secret if stat.S_IMODE(path.stat().st_mode) & 0o077]


# -------------------------------------------------------------------- S4: in what is written


@case(
    "S4",
    "secrets planted in a deployment: keys, tokens, prompts; who writes them down",
    engines=Engines.SIMULATED,
    minutes=2,
)
def planted_secrets(folder: Path) -> Outcome:
    """In no log, no answer of a command, no argument of a process, no metrics and no console."""
    token = f"console-{random.SystemRandom().getrandbits(64):x}"
    token_file = folder / "token"
    token_file.write_text(token)
    token_file.chmod(0o600)
    api_key = _api_key(folder)
    sets = {
        "tenants.acme.keys_file": folder / "acme.keys",
        "observability.token_file": token_file,
    }
    with running("sim.yaml", folder, **sets) as deployment:
        state = _state(deployment)
        ray_token = Path(state.token_file).read_text()
        link_keys = _link_keys(state.address, state.token_file)
        secrets = {
            "prompt": _CANARY,
            "API key": api_key,
            "API key's random part": api_key.rpartition("_")[2],
            "a wrong API key": "sk-baton-acme-0000_wrong",
            "console token": token,
            "Ray's token": ray_token,
            **{f"link key {n}": one for n, one in enumerate(link_keys)},
        }
        statuses = _ask_with(deployment.url, api_key, secrets["a wrong API key"])
        said = dict(_told(deployment, token)) | dict(_arguments(state.pid, state.run_dir))
        said |= dict(_files(Path(state.run_dir), but={"token"}))
        said |= {"up.log": deployment.log.read_text(errors="replace")}
        found = [
            f"{name} in {where}"
            for where, text in said.items()
            for name, secret in secrets.items()
            if secret in text
        ]
    bounds: tuple[Bound, ...] = (
        exactly(
            "answers: with the key, with a wrong one, without", str(statuses), "[200, 401, 401]"
        ),
        exactly("link keys that were there to be found", len(link_keys), 2),
        at_least("texts that were searched", len(said), 30),
        exactly("secrets that were found", len(found), 0),
    )
    return Outcome(bounds=bounds, figures={"found": str(found[:10])}, note="; ".join(found[:3]))


def _api_key(folder: Path) -> str:
    key, shown = mint("acme", now=datetime.now(UTC))
    with editing(folder / "acme.keys", create=True) as document:
        document.add(key)
    return shown


def _link_keys(address: str, token_file: str) -> list[str]:
    """As an operator with the cluster's token could read them."""
    program = (
        "import sys, json, ray\n"
        "from baton.serving.cluster import attach\n"
        "attach(sys.argv[1], token_file=sys.argv[2])\n"
        "from baton.serving.live_config import HeadStore\n"
        "kept = HeadStore().get('link-keys')\n"
        "print('KEYS', (kept or b'[]').decode())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, address, token_file],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=dict(os.environ),
    )
    (line,) = [one for one in done.stdout.splitlines() if one.startswith("KEYS ")]
    found: list[str] = json.loads(line.removeprefix("KEYS "))
    return found


def _ask_with(url: str, good: str, wrong: str) -> list[int]:
    body = {"model": "tiny", "prompt": _CANARY, "max_tokens": 8}
    statuses = []
    for key in (good, wrong, ""):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
        statuses.append(answer.status_code)
    return statuses


def _told(deployment: Deployment, token: str) -> Iterator[tuple[str, str]]:
    shown = ("config", "show", *deployment.options)
    for command in (("status",), ("requests",), ("links",), ("usage",), ("doctor",), shown):
        answer = deployment._answer(*command, within_s=240)
        yield f"baton {command[0]}", (answer.stdout + answer.stderr).decode(errors="replace")
    url = str(deployment.status()["observability"]["url"])
    bearer = {"authorization": f"Bearer {token}"}
    for path in ("/metrics", "/sd", "/", "/api/config"):
        page = httpx.get(f"{url}{path}", headers=bearer, timeout=20, follow_redirects=True)
        yield f"console {path} {page.status_code}", page.text


def _arguments(pid: int, run_dir: str) -> Iterator[tuple[str, str]]:
    """What every user of the machine sees of each process: its name and arguments."""
    for one in {pid, *marked_processes(run_dir)}:
        with contextlib.suppress(OSError):
            said = Path(f"/proc/{one}/cmdline").read_bytes().replace(b"\0", b" ")
            yield f"arguments of {one}", said.decode(errors="replace")


def _files(folder: Path, *, but: set[str]) -> Iterator[tuple[str, str]]:
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.name not in but:
            with contextlib.suppress(OSError):
                yield str(path.relative_to(folder)), path.read_text(errors="replace")
