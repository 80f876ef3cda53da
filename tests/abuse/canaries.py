"""Words that must be nowhere, planted in a deployment; then everywhere is looked."""

from __future__ import annotations

import base64
import gzip
import json
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import psutil

from baton.console.topics import Topic
from tests.abuse.deployed import MODEL, Abused, abused
from tests.e2e.deployments import descendants

CANARY = "canaryquokka7f3a9"
PROMPT = f"the merger with {CANARY} closes on friday, tell nobody"
_SAID = [{"role": "user", "content": PROMPT}]
_ASKED = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 48, "ignore_eos": True},
    "/v1/chat/completions": {"messages": _SAID, "max_tokens": 12},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 12},
    "/v1/messages": {"messages": _SAID, "max_tokens": 12},
}
_IDS_IN_A_ROW = 6
_EVENTS_S = 4.0
_LEAST_ANSWER = 20


@dataclass(slots=True)
class Haunted:
    """What was searched, and what was found."""

    needles: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    """What a canary is, and how it may be written."""
    requests: int = 0
    searched: int = 0
    searched_bytes: int = 0
    places: list[str] = field(default_factory=list)
    """Where a canary is, and which."""
    kinds: dict[str, int] = field(default_factory=dict)
    """How many bytes of each kind of place were searched."""

    @property
    def canaries(self) -> int:
        """How many there are."""
        return len(self.needles)

    @property
    def silent(self) -> list[str]:
        """Kinds of places that said nothing, so that nothing was searched there."""
        return [f"nothing of {kind}" for kind, size in self.kinds.items() if not size]

    def plant(self, what: str, secret: str) -> None:
        """Look for a text, as it is and as it is usually written elsewhere."""
        raw = secret.encode()
        self.needles[what] = (
            raw,
            urllib.parse.quote(secret).encode(),
            json.dumps(secret)[1:-1].encode(),
            base64.b64encode(raw).rstrip(b"="),
        )

    def plant_ids(self, what: str, ids: list[int]) -> None:
        """Look for a few tokens in a row, however they are separated."""
        row = list(map(str, ids[:_IDS_IN_A_ROW]))
        self.needles[what] = tuple(between.join(row).encode() for between in (", ", ",", " "))

    def search(self, kind: str, where: str, data: bytes) -> None:
        """Look into one place."""
        self.searched += 1
        self.searched_bytes += len(data)
        self.kinds[kind] = self.kinds.get(kind, 0) + len(data)
        for what, spellings in self.needles.items():
            if any(spelling in data for spelling in spellings):
                self.places.append(f"{what} in {kind} {where}")


def haunted(folder: Path) -> Haunted:
    """Plant them in a deployment of its own, and search."""
    found = Haunted()
    with _collector() as (collector, spans):
        sets = {
            "observability.tracing.otlp": collector,
            "observability.tracing.sample": 1,
            "admission.timeouts.total": "60s",
        }
        with abused(folder, level="debug", **sets) as baton:
            names = _plant(baton, found)
            _search_endpoints(baton, found, names)
            _search_commands(baton, found, names)
            _search_processes(baton, found)
            # Traces leave in batches.
            time.sleep(_EVENTS_S)
            _search_files(baton, found)
        found.search("log", str(baton.deployment.log), baton.deployment.log.read_bytes())
    for number, body in enumerate(spans):
        found.search("traces", f"batch {number}", body)
    found.kinds.setdefault("traces", 0)
    return found


# --------------------------------------------------------------------------------------- planting


def _plant(baton: Abused, found: Haunted) -> list[str]:
    """Ask well and badly; returns the names of requests that were served."""
    key = baton.keys["acme"]
    found.plant("a good key", key.rpartition("_")[2])
    found.plant("a revoked key", baton.keys["revoked"].rpartition("_")[2])
    wrong = f"bt_wrongkey_{CANARY}{'x' * 26}"
    found.plant("a word of a prompt or a wrong key", CANARY)
    found.plant("the console's token", baton.console_token)
    token_file = ray_token_file(baton)
    found.plant("Ray's token", token_file.read_text().strip())
    names = []
    with baton.client("acme") as client:
        ids = client.post("/tokenize", json={"model": MODEL, "prompt": PROMPT}).json()["tokens"]
        found.plant_ids("tokens of a prompt", ids[2:])
        for number, (path, body) in enumerate(_ASKED.items()):
            name = f"served-{number}"
            said = _ask(client, path, body, name)
            if path == "/v1/completions":
                names.append(name)
                assert len(said) >= _LEAST_ANSWER, said
                found.plant("an answer", said[:_LEAST_ANSWER])
                answer = client.post("/tokenize", json={"model": MODEL, "prompt": said}).json()
                found.plant_ids("tokens of an answer", answer["tokens"][2:])
        found.requests += len(_ASKED) + _misbehave(client, wrong)
    return names


def ray_token_file(baton: Abused) -> Path:
    """Where the token of this deployment's Ray is; its folder has everything else of Ray's."""
    for process in descendants(baton.deployment.process.pid):
        with suppress(psutil.Error):
            if path := process.environ().get("RAY_AUTH_TOKEN_PATH"):
                return Path(path)
    raise AssertionError("no process of the deployment knows Ray's token file")


def _ask(client: httpx.Client, path: str, body: Mapping[str, object], name: str) -> str:
    body = {"model": MODEL, **body}
    headers = {"x-request-id": name, "traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
    answer = client.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    client.post(path, json=body | {"stream": True}, headers=headers).raise_for_status()
    choices = answer.json().get("choices") or [{}]
    return str(choices[0].get("text") or "")


def _misbehave(client: httpx.Client, wrong: str) -> int:
    """All that goes wrong and might be complained of somewhere; returns how often."""
    asked = 0
    for path, good in _ASKED.items():
        field_name = next(name for name in good if "max" not in name)
        body = {"model": MODEL, **good}
        bad: list[dict[str, object]] = [
            body | {"temperature": CANARY},
            body | {"model": CANARY},
            body | {field_name: {"x": CANARY}},
            body | {field_name: [{"role": CANARY, "content": [{"type": CANARY}]}]},
            body | {field_name: f"{CANARY} " * 20_000},
            body | {"tools": [{"type": "function", "function": {"name": CANARY}}]},
            body | {"user": CANARY, "metadata": {"a": CANARY}, "cache_salt": CANARY},
            body | {"vllm_xargs": {"a": CANARY}, "kv_transfer_params": {"a": CANARY}},
            body | {"response_format": {"type": CANARY}, "stop": [CANARY] * 9},
        ]
        for one in bad:
            client.post(path, json=one)
        for token in (wrong, CANARY):
            client.post(path, json=body, headers={"authorization": f"Bearer {token}"})
            client.post(path, json=body, headers={"x-api-key": token})
            client.post(f"{path}?api_key={token}", json=body)
            client.post(f"{path}/{token}", json=body)
            client.post(path, json=body, headers={"cookie": token, "x-slo-class": token * 9})
        client.post(path, content=f'{{"model": "{CANARY}'.encode())
        with (
            suppress(httpx.HTTPError),
            client.stream("POST", path, json=body | {"stream": True, "max_tokens": 900}) as left,
        ):
            next(left.iter_lines())
        asked += len(bad) + 12
    return asked


# -------------------------------------------------------------------------------------- searching


def _search_endpoints(baton: Abused, found: Haunted, names: list[str]) -> None:
    """Metrics of every process, the list of them, and the console."""
    url = baton.deployment.status()["observability"]["url"]
    headers = {"authorization": f"Bearer {baton.console_token}"}
    with httpx.Client(headers=headers, timeout=10) as client:
        listed = client.get(f"{url}/sd")
        found.search("service discovery", url, listed.content)
        for target in listed.json():
            address, path = target["targets"][0], target["labels"].get("__metrics_path__", "")
            answer = client.get(f"http://{address}{path or '/metrics'}").raise_for_status()
            found.search("metrics", address, answer.content)
        for path in ("/", "/api/config", *(f"/api/request?id={name}" for name in names)):
            answer = client.get(url + path).raise_for_status()
            found.search("console", path, answer.content)
        topics = ",".join(Topic)
        found.search("console's feed", "/events", _events(client, f"{url}/events?topics={topics}"))
    with baton.client("beta") as other:
        found.search("front's metrics", "/metrics", other.get("/metrics").content)
        found.search("front's routes", "/-/routes", other.get("/-/routes").content)


def _events(client: httpx.Client, url: str) -> bytes:
    data, until_s = b"", time.monotonic() + _EVENTS_S
    with suppress(httpx.ReadTimeout), client.stream("GET", url, timeout=_EVENTS_S) as answer:
        for part in answer.iter_bytes():
            data += part
            if time.monotonic() > until_s:
                break
    return data


def _search_commands(baton: Abused, found: Haunted, names: list[str]) -> None:
    """What an operator reads."""
    options = baton.deployment.options
    commands = [
        ("status",), ("status", "-o", "json"), ("links",), ("usage",), ("config", "show", *options),
        ("logs", "--all", "-n", "0"), ("explain", "route", names[0]), ("trace", names[0]),
        ("explain", "route", names[0], "-o", "json"),
        ("keys", "list", str(baton.folder / "acme.keys")),
    ]  # fmt: skip
    for command in commands:
        done = subprocess.run(
            [sys.executable, "-m", "baton.cli.main", *command],
            capture_output=True,
            timeout=60,
            check=False,
        )
        found.search("commands", " ".join(command), done.stdout + done.stderr)


def _search_processes(baton: Abused, found: Haunted) -> None:
    """Arguments, which everybody on the machine can read, and environments."""
    for process in descendants(baton.deployment.process.pid):
        with suppress(psutil.Error):
            arguments = " ".join(process.cmdline())
            found.search("arguments", f"of {process.pid}", arguments.encode())
            variables = json.dumps(process.environ())
            found.search("environments", f"of {process.pid}", variables.encode())


def _search_files(baton: Abused, found: Haunted) -> None:
    """All that was written; but for the files that are there to keep a secret."""
    token_file = ray_token_file(baton)
    keepers = {token_file, baton.folder / "token"}
    for root in (token_file.parent, baton.folder):
        for path in sorted(root.rglob("*")):
            if path in keepers or path.is_symlink() or not path.is_file():
                continue
            kind = "log files" if path.suffix in {".log", ".out", ".err"} else "other files"
            with suppress(OSError):
                found.search(kind, str(path.relative_to(root)), path.read_bytes())


@contextmanager
def _collector() -> Iterator[tuple[str, list[bytes]]]:
    """A collector of traces that keeps what it is sent."""
    bodies: list[bytes] = []

    class Take(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            zipped = self.headers.get("content-encoding") == "gzip"
            bodies.append(gzip.decompress(body) if zipped else body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_args: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Take) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", bodies
        finally:
            server.shutdown()
            thread.join()
