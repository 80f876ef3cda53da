"""The files of an adapter, looked at before anybody is told that it is served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.engine.adapter_files import adapter_refusal


def write(folder: Path, config: object, weights: str | None = "adapter_model.safetensors") -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(
        config if isinstance(config, str) else json.dumps(config)
    )
    if weights is not None:
        (folder / weights).write_bytes(b"")
    return folder


@pytest.mark.parametrize("weights", ["adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter_that_fits_is_taken(tmp_path: Path, weights: str) -> None:
    config = {"r": 8, "bias": "none", "rank_pattern": {"q_proj": 16}, "use_dora": False}
    folder = write(tmp_path / "a", config, weights)
    assert adapter_refusal(str(folder), max_rank=16, allowed_roots=[str(tmp_path)]) is None


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"r": 64}, "rank is 64"),
        ({"r": 8, "rank_pattern": {"q_proj": 32}}, "rank is 32"),
        ({}, "'r' is None"),
        ({"r": "8"}, "'r' is '8'"),
        ({"r": 0}, "'r' is 0"),
        ({"r": 8, "bias": "all"}, "bias is 'all'"),
        ({"r": 8, "use_dora": True}, "use_dora"),
        ({"r": 8, "modules_to_save": ["embed_tokens"]}, "modules_to_save"),
        ("{", "cannot be read"),
        ([], "no JSON object"),
    ],
)
def test_what_an_engine_could_not_load_is_refused(tmp_path: Path, config: object, why: str) -> None:
    refused = adapter_refusal(str(write(tmp_path / "a", config)), max_rank=16)
    assert refused is not None
    assert (refused.status, why in refused.why) == (400, True), refused.why


def test_a_folder_that_is_missing_or_has_nothing_in_it_is_refused(tmp_path: Path) -> None:
    missing = adapter_refusal(str(tmp_path / "none"), max_rank=16)
    assert missing is not None
    assert missing.status == 404
    empty = adapter_refusal(str(tmp_path), max_rank=16)
    assert empty is not None
    assert "adapter_config.json" in empty.why
    bare = adapter_refusal(str(write(tmp_path / "bare", {"r": 8}, None)), max_rank=16)
    assert bare is not None
    assert "no weights" in bare.why


def test_a_link_leads_nowhere_else_than_is_allowed(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside", {"r": 8})
    (tmp_path / "allowed").mkdir()
    link = tmp_path / "allowed" / "link"
    link.symlink_to(outside)
    refused = adapter_refusal(str(link), max_rank=16, allowed_roots=[str(tmp_path / "allowed")])
    assert refused is not None
    assert refused.status == 403
