"""In what order an ingress comes up."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.config import load_config
from baton.runtime.link.options import LinkOptions
from baton.serving import ingress_body
from baton.serving.ingress_body import IngressBody

CONFIGS = Path(__file__).parents[2] / "configs"


class Stopped(Exception):
    """The replicas were asked for."""


@pytest.mark.parametrize("frontend", ["python", "rust"])
async def test_imports_are_over_before_replicas_wait_for_beats(
    frontend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They keep the loop waiting for seconds, and a replica leaves an ingress that is silent."""
    sets = [f"server.frontend={frontend}", "observability.metrics.enabled=false"]
    config = load_config([CONFIGS / "sim.yaml"], env={}, sets=sets).config
    body = IngressBody(config, app="app", coordinator_id="c", link=LinkOptions())
    done: list[str] = []

    async def ask_for_replicas() -> None:
        raise Stopped

    monkeypatch.setattr(
        ingress_body, f"import_{frontend}_frontend", lambda: done.append("imported")
    )
    monkeypatch.setattr(body._membership, "start", ask_for_replicas)
    try:
        with pytest.raises(Stopped):
            await body.start("127.0.0.1")
    finally:
        await body.close()
    assert done == ["imported"]
