"""The files of an adapter, looked at before anybody is told that it is served."""

from __future__ import annotations

import errno
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.engine.adapter_files import adapter_refusal
from baton.engine.hub_fetch import HubModel, explain_failure, weight_files


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
def test_an_unloadable_adapter_is_refused(tmp_path: Path, config: object, why: str) -> None:
    refused = adapter_refusal(str(write(tmp_path / "a", config)), max_rank=16)
    assert refused is not None
    assert (refused.status, why in refused.reason) == (400, True), refused.reason


def test_a_folder_that_is_missing_or_has_nothing_in_it_is_refused(tmp_path: Path) -> None:
    missing = adapter_refusal(str(tmp_path / "none"), max_rank=16)
    assert missing is not None
    assert missing.status == 404
    empty = adapter_refusal(str(tmp_path), max_rank=16)
    assert empty is not None
    assert "adapter_config.json" in empty.reason
    bare = adapter_refusal(str(write(tmp_path / "bare", {"r": 8}, None)), max_rank=16)
    assert bare is not None
    assert "no weights" in bare.reason


def test_a_link_leads_nowhere_else_than_is_allowed(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside", {"r": 8})
    (tmp_path / "allowed").mkdir()
    link = tmp_path / "allowed" / "link"
    link.symlink_to(outside)
    refused = adapter_refusal(str(link), max_rank=16, allowed_roots=[str(tmp_path / "allowed")])
    assert refused is not None
    assert refused.status == 403


# -------------------------------------------------------------------- files of a hub


SHARDS = ("model-1.safetensors", "model-2.safetensors")
ASKED = HubModel(
    repository="org/m",
    revision="v2",
    hub="https://hub.example",
    folder="/models/hub",
    token="",
    offline=False,
)


@pytest.mark.parametrize(
    ("files", "load_format", "indexed", "read"),
    [
        (("a.safetensors", "a.bin", "a.pt"), "auto", (), {"a.safetensors"}),
        (("a.bin", "a.pt"), "auto", (), {"a.bin"}),
        (("a.pt",), "auto", (), {"a.pt"}),
        ((*SHARDS, "extra.safetensors"), "auto", SHARDS, set(SHARDS)),
        ((*SHARDS, "consolidated.safetensors"), "auto", SHARDS, {"consolidated.safetensors"}),
        ((*SHARDS, "consolidated.safetensors"), "hf", SHARDS, set(SHARDS)),
        (("a.safetensors", "a.bin"), "npcache", (), {"a.bin"}),
        (("a.safetensors",), "dummy", (), set()),
        (("config.json",), "auto", (), set()),
    ],
)
def test_the_files_are_fetched_that_vllm_reads(
    files: tuple[str, ...], load_format: str, indexed: tuple[str, ...], read: set[str]
) -> None:
    assert weight_files(files, load_format, indexed) == read


@dataclass
class _Response:
    status_code: int


class _HttpError(OSError):
    def __init__(self, status: int) -> None:
        super().__init__("said by the hub")
        self.response = _Response(status)


class GatedRepoError(_HttpError):
    pass


class TransportError(Exception):
    pass


def test_a_gated_model_wants_its_licence_accepted_and_a_token() -> None:
    found = explain_failure(GatedRepoError(401), ASKED)
    assert found.reason == "model org/m is gated: https://hub.example answered 401"
    assert found.remedy == (
        "accept its licence at https://hub.example/org/m and set HF_TOKEN to a token of that"
        " account"
    )
    named = ASKED._replace(token="HF_TOKEN")  # noqa: S106 - its name
    with_token = explain_failure(GatedRepoError(403), named)
    assert "with the account of HF_TOKEN" in with_token.remedy


def test_the_first_error_of_an_unreachable_hub_is_reported() -> None:
    error = FileNotFoundError("cannot find the snapshot\nGot: ...")
    error.__cause__ = TransportError("no route to host")
    found = explain_failure(error, ASKED)
    assert found.reason == (
        "https://hub.example cannot be reached for model org/m: TransportError: no route to host"
    )
    assert "HF_ENDPOINT" in found.remedy
    assert "HTTPS_PROXY" in found.remedy


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_said_with_its_folder(number: int) -> None:
    found = explain_failure(OSError(number, "no space"), ASKED)
    assert found.reason == "no room for model org/m in /models/hub: the disk is full"
    assert "cluster.model_cache.path" in found.remedy


def test_a_folder_that_cannot_be_written_is_said() -> None:
    found = explain_failure(PermissionError(errno.EACCES, "Permission denied"), ASKED)
    assert found.reason == "models cannot be kept in /models/hub: Permission denied"


def test_every_other_file_has_a_one_line_error() -> None:
    found = explain_failure(ValueError("first\nsecond"), ASKED)
    assert found.reason == "model org/m does not come from https://hub.example: ValueError: first"
