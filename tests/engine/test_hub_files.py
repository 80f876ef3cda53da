"""Which files of a model an engine reads, and what is said where they do not come."""

from __future__ import annotations

import errno
from dataclasses import dataclass

import pytest

from baton.engine.hub_fetch import HubModel, explain_failure, weight_files

SHARDS = ("model-1.safetensors", "model-2.safetensors")
ASKED = HubModel(
    repository="org/m",
    revision="v2",
    hub="https://hub.example",
    folder="/models/hub",
    has_token=False,
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
    assert found.why == "model org/m is gated: https://hub.example answered 401"
    assert found.remedy == (
        "accept its licence at https://hub.example/org/m and set HF_TOKEN to a token of that"
        " account"
    )
    with_token = explain_failure(GatedRepoError(403), ASKED._replace(has_token=True))
    assert "with the account of HF_TOKEN" in with_token.remedy


def test_what_it_was_at_first_is_said_of_a_hub_that_cannot_be_reached() -> None:
    error = FileNotFoundError("cannot find the snapshot\nGot: ...")
    error.__cause__ = TransportError("no route to host")
    found = explain_failure(error, ASKED)
    assert found.why == (
        "https://hub.example cannot be reached for model org/m: TransportError: no route to host"
    )
    assert "HF_ENDPOINT" in found.remedy
    assert "HTTPS_PROXY" in found.remedy


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_said_with_its_folder(number: int) -> None:
    found = explain_failure(OSError(number, "no space"), ASKED)
    assert found.why == "no room for model org/m in /models/hub: the disk is full"
    assert "cluster.model_cache.path" in found.remedy


def test_a_folder_that_cannot_be_written_is_said() -> None:
    found = explain_failure(PermissionError(errno.EACCES, "Permission denied"), ASKED)
    assert found.why == "models cannot be kept in /models/hub: Permission denied"


def test_whatever_else_there_is_has_one_line() -> None:
    found = explain_failure(ValueError("first\nsecond"), ASKED)
    assert found.why == "model org/m does not come from https://hub.example: ValueError: first"
