"""A whole deployment with keys, tenants and a token, on simulated engines, to be abused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx

from baton.runtime.keys.api_keys import mint
from baton.runtime.keys.key_files import edit_key_file
from tests.abuse.raw import Address
from tests.abuse.routes import Credential
from tests.chaos.deployment_processes import environment
from tests.e2e.deployments import Deployment, running_deployment

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
  prefill: {{role: prefill, replicas: {{initial: 1, max: 1}}, resources: {{cpus: 0.1}}}}
  decode: {{role: decode, replicas: {{initial: 1, max: 1}}, resources: {{cpus: 0.1}}}}
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
class SecuredDeployment:
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
    def credentials(self) -> Mapping[Credential, str | None]:
        """What is shown in each line of the matrix of routes and keys."""
        good = self.keys["acme"]
        return {
            Credential.NONE: None,
            Credential.WRONG: good[:-1] + ("0" if good[-1] != "0" else "1"),
            Credential.REVOKED: self.keys["revoked"],
            Credential.OTHERS: self.keys["beta"],
            Credential.GOOD: good,
        }

    def client(self, tenant: str) -> httpx.Client:
        """A client of a tenant's."""
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=30)


@contextmanager
def secured_deployment(
    folder: Path, *, level: str = "info", **settings: object
) -> Iterator[SecuredDeployment]:
    """Start it; ended in good order."""
    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.now(UTC)
    keys: dict[str, str] = {}
    lines = []
    for tenant, cache in TENANTS.items():
        key, keys[tenant] = mint(tenant, now=now)
        file = folder / f"{tenant}.keys"
        with edit_key_file(file, create=True) as document:
            document.add(key)
            if tenant == "acme":
                revoked_key, keys["revoked"] = mint(tenant, now=now)
                document.add(revoked_key)
                document.revoke(revoked_key.key_id, now)
        lines.append(f"  {tenant}: {{keys_file: {file}, cache: {cache}}}")
    token_file = folder / "token"
    token_file.touch(mode=0o600)
    token = mint("console", now=now)[1].rpartition("_")[2]
    token_file.write_text(token)
    config = folder / "abused.yaml"
    text = _CONFIG.format(tenants="\n".join(lines), token_file=token_file, level=level)
    config.write_text(text)
    # Simulated engines do not mind that the tiny model's own context is shorter; vLLM's API would.
    longer_context = environment(VLLM_ALLOW_LONG_MAX_MODEL_LEN="1")
    with longer_context, running_deployment(str(config), folder, **settings) as deployment:
        yield SecuredDeployment(
            deployment=deployment, keys=keys, console_token=token, folder=folder
        )
