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
from tests.abuse.deployed import MODEL, SecuredDeployment, secured_deployment
from tests.fakes.processes import descendants

CANARY = "canaryquokka7f3a9"
PROMPT = f"the merger with {CANARY} closes on friday, tell nobody"
_MESSAGES = [{"role": "user", "content": PROMPT}]
_REQUEST_BODIES = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 48, "ignore_eos": True},
    "/v1/chat/completions": {"messages": _MESSAGES, "max_tokens": 12},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 12},
    "/v1/messages": {"messages": _MESSAGES, "max_tokens": 12},
}
_IDS_IN_A_ROW = 6
_EVENTS_S = 4.0
_MIN_ANSWER_CHARS = 20


@dataclass(slots=True)
class CanarySearch:
    """What was searched, and what was found."""

    spellings_by_canary: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    """What a canary is, and how it may be written."""
    requests: int = 0
    searched: int = 0
    searched_bytes: int = 0
    hits: list[str] = field(default_factory=list)
    """Where a canary is, and which."""
    kinds: dict[str, int] = field(default_factory=dict)
    """How many bytes of each kind of place were searched."""

    @property
    def canaries(self) -> int:
        """How many there are."""
        return len(self.spellings_by_canary)

    @property
    def empty_kinds(self) -> list[str]:
        """Kinds of places that said nothing, so that nothing was searched there."""
        return [f"nothing of {kind}" for kind, size in self.kinds.items() if not size]

    def plant(self, canary: str, secret: str) -> None:
        """Look for a text, as it is and as it is usually written elsewhere."""
        raw = secret.encode()
        self.spellings_by_canary[canary] = (
            raw,
            urllib.parse.quote(secret).encode(),
            json.dumps(secret)[1:-1].encode(),
            base64.b64encode(raw).rstrip(b"="),
        )

    def plant_ids(self, canary: str, ids: list[int]) -> None:
        """Look for a few tokens in a row, however they are separated."""
        row = list(map(str, ids[:_IDS_IN_A_ROW]))
        self.spellings_by_canary[canary] = tuple(
            separator.join(row).encode() for separator in (", ", ",", " ")
        )

    def search(self, kind: str, location: str, data: bytes) -> None:
        """Look into one place."""
        self.searched += 1
        self.searched_bytes += len(data)
        self.kinds[kind] = self.kinds.get(kind, 0) + len(data)
        for canary, spellings in self.spellings_by_canary.items():
            if any(spelling in data for spelling in spellings):
                self.hits.append(f"{canary} in {kind} {location}")


def run_canary_search(folder: Path) -> CanarySearch:
    """Plant them in a deployment of its own, and search."""
    search = CanarySearch()
    with _collector() as (collector, spans):
        sets = {
            "observability.tracing.otlp": collector,
            "observability.tracing.sample": 1,
            "admission.timeouts.total": "60s",
        }
        with secured_deployment(folder, level="debug", **sets) as baton:
            names = _plant(baton, search)
            _search_endpoints(baton, search, names)
            _search_commands(baton, search, names)
            _search_processes(baton, search)
            # Traces leave in batches.
            time.sleep(_EVENTS_S)
            _search_files(baton, search)
        search.search("log", str(baton.deployment.log), baton.deployment.log.read_bytes())
    for number, body in enumerate(spans):
        search.search("traces", f"batch {number}", body)
    search.kinds.setdefault("traces", 0)
    return search


# --------------------------------------------------------------------------------------- planting


def _plant(baton: SecuredDeployment, search: CanarySearch) -> list[str]:
    """Ask well and badly; returns the names of requests that were served."""
    key = baton.keys["acme"]
    search.plant("a good key", key.rpartition("_")[2])
    search.plant("a revoked key", baton.keys["revoked"].rpartition("_")[2])
    wrong_key = f"bt_wrongkey_{CANARY}{'x' * 26}"
    search.plant("a word of a prompt or a wrong key", CANARY)
    search.plant("the console's token", baton.console_token)
    token_file = ray_token_file(baton)
    search.plant("Ray's token", token_file.read_text().strip())
    names = []
    with baton.client("acme") as client:
        ids = client.post("/tokenize", json={"model": MODEL, "prompt": PROMPT}).json()["tokens"]
        search.plant_ids("tokens of a prompt", ids[2:])
        for number, (path, body) in enumerate(_REQUEST_BODIES.items()):
            name = f"served-{number}"
            answer_text = _send_request(client, path, body, name)
            if path == "/v1/completions":
                names.append(name)
                assert len(answer_text) >= _MIN_ANSWER_CHARS, answer_text
                search.plant("an answer", answer_text[:_MIN_ANSWER_CHARS])
                answer = client.post(
                    "/tokenize", json={"model": MODEL, "prompt": answer_text}
                ).json()
                search.plant_ids("tokens of an answer", answer["tokens"][2:])
        search.requests += len(_REQUEST_BODIES) + _send_bad_requests(client, wrong_key)
    return names


def ray_token_file(baton: SecuredDeployment) -> Path:
    """Where the token of this deployment's Ray is; its folder has everything else of Ray's."""
    for process in descendants(baton.deployment.process.pid):
        with suppress(psutil.Error):
            if path := process.environ().get("RAY_AUTH_TOKEN_PATH"):
                return Path(path)
    raise AssertionError("no process of the deployment knows Ray's token file")


def _send_request(client: httpx.Client, path: str, body: Mapping[str, object], name: str) -> str:
    body = {"model": MODEL, **body}
    headers = {"x-request-id": name, "traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
    answer = client.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    client.post(path, json=body | {"stream": True}, headers=headers).raise_for_status()
    choices = answer.json().get("choices") or [{}]
    return str(choices[0].get("text") or "")


def _send_bad_requests(client: httpx.Client, wrong_key: str) -> int:
    """All that goes wrong and might be complained of somewhere; returns how often."""
    sent = 0
    for path, good in _REQUEST_BODIES.items():
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
        for entry in bad:
            client.post(path, json=entry)
        for token in (wrong_key, CANARY):
            client.post(path, json=body, headers={"authorization": f"Bearer {token}"})
            client.post(path, json=body, headers={"x-api-key": token})
            client.post(f"{path}?api_key={token}", json=body)
            client.post(f"{path}/{token}", json=body)
            client.post(path, json=body, headers={"cookie": token, "x-slo-class": token * 9})
        client.post(path, content=f'{{"model": "{CANARY}'.encode())
        with (
            suppress(httpx.HTTPError),
            client.stream(
                "POST", path, json=body | {"stream": True, "max_tokens": 900}
            ) as abandoned,
        ):
            next(abandoned.iter_lines())
        sent += len(bad) + 12
    return sent


# -------------------------------------------------------------------------------------- searching


def _search_endpoints(baton: SecuredDeployment, search: CanarySearch, names: list[str]) -> None:
    """Metrics of every process, the list of them, and the console."""
    url = baton.deployment.status()["observability"]["url"]
    headers = {"authorization": f"Bearer {baton.console_token}"}
    with httpx.Client(headers=headers, timeout=10) as client:
        discovery = client.get(f"{url}/sd")
        search.search("service discovery", url, discovery.content)
        for target in discovery.json():
            address, path = target["targets"][0], target["labels"].get("__metrics_path__", "")
            answer = client.get(f"http://{address}{path or '/metrics'}").raise_for_status()
            search.search("metrics", address, answer.content)
        for path in ("/", "/api/config", *(f"/api/request?id={name}" for name in names)):
            answer = client.get(url + path).raise_for_status()
            search.search("console", path, answer.content)
        topics = ",".join(Topic)
        search.search(
            "console's feed", "/events", _read_events(client, f"{url}/events?topics={topics}")
        )
    with baton.client("beta") as other:
        search.search("front's metrics", "/metrics", other.get("/metrics").content)
        search.search("front's routes", "/-/routes", other.get("/-/routes").content)


def _read_events(client: httpx.Client, url: str) -> bytes:
    data, until_s = b"", time.monotonic() + _EVENTS_S
    with suppress(httpx.ReadTimeout), client.stream("GET", url, timeout=_EVENTS_S) as answer:
        for part in answer.iter_bytes():
            data += part
            if time.monotonic() > until_s:
                break
    return data


def _search_commands(baton: SecuredDeployment, search: CanarySearch, names: list[str]) -> None:
    """What an operator reads."""
    options = baton.deployment.options
    commands = [
        ("status",), ("status", "-o", "json"), ("links",), ("usage",), ("config", "show", *options),
        ("logs", "--all", "-n", "0"), ("explain", "route", names[0]), ("trace", names[0]),
        ("explain", "route", names[0], "-o", "json"),
        ("keys", "list", str(baton.folder / "acme.keys")),
    ]  # fmt: skip
    for command in commands:
        process = subprocess.run(
            [sys.executable, "-m", "baton.cli.main", *command],
            capture_output=True,
            timeout=60,
            check=False,
        )
        search.search("commands", " ".join(command), process.stdout + process.stderr)


def _search_processes(baton: SecuredDeployment, search: CanarySearch) -> None:
    """Arguments, which everybody on the machine can read, and environments."""
    for process in descendants(baton.deployment.process.pid):
        with suppress(psutil.Error):
            arguments = " ".join(process.cmdline())
            search.search("arguments", f"of {process.pid}", arguments.encode())
            variables = json.dumps(process.environ())
            search.search("environments", f"of {process.pid}", variables.encode())


def _search_files(baton: SecuredDeployment, search: CanarySearch) -> None:
    """All that was written; but for the files that are there to keep a secret."""
    token_file = ray_token_file(baton)
    secret_files = {token_file, baton.folder / "token"}
    for root in (token_file.parent, baton.folder):
        for path in sorted(root.rglob("*")):
            if path in secret_files or path.is_symlink() or not path.is_file():
                continue
            kind = "log files" if path.suffix in {".log", ".out", ".err"} else "other files"
            with suppress(OSError):
                search.search(kind, str(path.relative_to(root)), path.read_bytes())


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
