"""A whole deployment with keys, tenants and a token, on simulated engines, to be abused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx

from baton.runtime.keys.api_keys import mint
from baton.runtime.keys.key_files import editing
from tests.abuse.raw import Address
from tests.abuse.routes import Shown
from tests.chaos.deployment_processes import environment
from tests.e2e.deployments import Deployment, running

MODEL = "tiny"
_CONFIG = """\
version: 1
model:
  source: tiny
  max_len: 16384
  engine:
    kind: sim
    block_size: 16
    max_num_seqs: 256
    max_num_batched_tokens: 2048
    sim: {{prefill_rate: 20k/s, decode_step: 4ms, kv_blocks: 16384}}
pools:
  prefill: {{role: prefill, replicas: {{start: 1, max: 1}}, resources: {{cpus: 0.1}}}}
  decode: {{role: decode, replicas: {{start: 1, max: 1}}, resources: {{cpus: 0.1}}}}
router: {{disaggregate: always}}
tenants:
  default: {{anonymous: false}}
{tenants}
observability:
  token_file: {token_file}
  logs: {{level: {level}}}
"""
TENANTS = {"acme": "isolated", "beta": "isolated", "one": "shared", "other": "shared"}
"""Each with keys; and whose cached prefixes it finds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abused:
    """The deployment, and what opens it."""

    deployment: Deployment
    keys: Mapping[str, str]
    """By tenant, and `revoked`."""
    console_token: str
    folder: Path

    @property
    def url(self) -> str:
        """Where clients ask."""
        return self.deployment.url

    @property
    def address(self) -> Address:
        """The same, for a socket."""
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)

    @property
    def tokens(self) -> Mapping[Shown, str | None]:
        """What is shown in each line of the matrix of routes and keys."""
        good = self.keys["acme"]
        return {
            Shown.NONE: None,
            Shown.WRONG: good[:-1] + ("0" if good[-1] != "0" else "1"),
            Shown.REVOKED: self.keys["revoked"],
            Shown.OTHERS: self.keys["beta"],
            Shown.GOOD: good,
        }

    def client(self, tenant: str) -> httpx.Client:
        """A client of a tenant's."""
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=30)


@contextmanager
def abused(folder: Path, *, level: str = "info", **settings: object) -> Iterator[Abused]:
    """Start it; ended in good order."""
    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.now(UTC)
    keys: dict[str, str] = {}
    lines = []
    for tenant, cache in TENANTS.items():
        key, keys[tenant] = mint(tenant, now=now)
        file = folder / f"{tenant}.keys"
        with editing(file, create=True) as document:
            document.add(key)
            if tenant == "acme":
                old, keys["revoked"] = mint(tenant, now=now)
                document.add(old)
                document.revoke(old.key_id, now)
        lines.append(f"  {tenant}: {{keys_file: {file}, cache: {cache}}}")
    token_file = folder / "token"
    token_file.touch(mode=0o600)
    token = mint("console", now=now)[1].rpartition("_")[2]
    token_file.write_text(token)
    config = folder / "abused.yaml"
    text = _CONFIG.format(tenants="\n".join(lines), token_file=token_file, level=level)
    config.write_text(text)
    # Simulated engines do not mind that the tiny model's own context is shorter; vLLM's API would.
    longer = environment(VLLM_ALLOW_LONG_MAX_MODEL_LEN="1")
    with longer, running(str(config), folder, **settings) as deployment:
        yield Abused(deployment=deployment, keys=keys, console_token=token, folder=folder)
