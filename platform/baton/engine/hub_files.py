"""Which files of a model on a hub an engine reads, and what it means when they do not come."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Sequence
from fnmatch import fnmatch
from pathlib import PurePosixPath
from typing import Final, NamedTuple

BESIDE_WEIGHTS: Final = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py")
"""Configuration, tokenizer, chat template and code of a model; a few megabytes."""
INDEX: Final = "model.safetensors.index.json"
_MISTRAL: Final = "consolidated*.safetensors"
_BY_FORMAT: Final[dict[str, tuple[str, ...]]] = {
    "hf": ("*.safetensors", "*.bin", "*.pt"),
    "mistral": (_MISTRAL,),
    "safetensors": ("*.safetensors",),
    "fastsafetensors": ("*.safetensors",),
    "instanttensor": ("*.safetensors",),
    "npcache": ("*.bin",),
    "pt": ("*.pt",),
}
"""Patterns by load format, the first that any file has counts.

Source: vLLM 0.32, model_loader/default_loader.py, `_prepare_weights`. What is loaded in any other
way, vLLM fetches alone.
"""


class Trouble(NamedTuple):
    """Why a model does not come from a hub, and what to do."""

    why: str
    remedy: str


class Asked(NamedTuple):
    """What is asked of which hub, and how."""

    repository: str
    revision: str | None
    hub: str
    """Its address."""
    folder: str
    """Where it is kept on this node."""
    has_token: bool
    offline: bool


def weight_files(
    files: Collection[str], load_format: str, indexed: Collection[str]
) -> frozenset[str]:
    """The files with the weights that vLLM reads.

    Args:
        files: of the repository.
        load_format: as vLLM names it.
        indexed: what the index of the weights names; empty where there is none.
    """
    if load_format == "auto":
        has_mistrals = any(fnmatch(PurePosixPath(file).name, _MISTRAL) for file in files)
        load_format = "mistral" if has_mistrals else "hf"
    patterns = _BY_FORMAT.get(load_format, ())
    if indexed and "*.safetensors" in patterns:
        return frozenset(indexed)
    for pattern in patterns:
        if found := frozenset(file for file in files if fnmatch(file, pattern)):
            return found
    return frozenset()


def trouble(error: BaseException, asked: Asked) -> Trouble:
    """What an exception of huggingface_hub's comes to, for whoever started the deployment."""
    return _of_disk(error, asked) or _of_hub(error, asked) or _of_way(error, asked)


def _of_disk(error: BaseException, asked: Asked) -> Trouble | None:
    number = error.errno if isinstance(error, OSError) else None
    if number in {errno.ENOSPC, errno.EDQUOT}:
        return no_room(asked, "the disk is full")
    if number in {errno.EACCES, errno.EROFS, errno.EPERM}:
        return Trouble(
            f"models cannot be kept in {asked.folder}: {os.strerror(number)}",
            "let baton's user write there, or set cluster.model_cache.path to another folder",
        )
    if asked.offline:
        return Trouble(
            f"model {asked.repository} is not in {asked.folder}, and HF_HUB_OFFLINE is set",
            "fetch it there with 'hf download', or remove HF_HUB_OFFLINE",
        )
    return None


def _of_hub(error: BaseException, asked: Asked) -> Trouble | None:
    """What the hub has answered; None where it has not."""
    kinds, status = _kinds(error), _status(error)
    if "GatedRepoError" in kinds:
        return _gated(asked, status)
    if "RevisionNotFoundError" in kinds:
        return Trouble(
            f"model {asked.repository} has no revision {asked.revision!r} on {asked.hub}",
            "correct models.*.revision",
        )
    if "RepositoryNotFoundError" in kinds or status in {401, 403, 404}:
        return _not_shown(asked, status)
    if status is None:
        return None
    many = status == 429  # noqa: PLR2004 - too many requests
    return Trouble(
        f"{asked.hub} answered {status} for model {asked.repository}",
        "wait some minutes, or set HF_TOKEN: accounts may ask more often"
        if many
        else "try again later, or set HF_ENDPOINT to a mirror",
    )


def _of_way(error: BaseException, asked: Asked) -> Trouble:
    if "TransportError" in _kinds(error):
        return Trouble(
            f"{asked.hub} cannot be reached for model {asked.repository}: {_words(error)}",
            "check this node's network; set HTTPS_PROXY for a proxy, HF_ENDPOINT for a mirror, or"
            " HF_HUB_OFFLINE=1 where the model is on the node",
        )
    return Trouble(
        f"model {asked.repository} does not come from {asked.hub}: {_words(error)}",
        "try again; what has come is kept",
    )


def no_room(asked: Asked, why: str) -> Trouble:
    """What it comes to that a model has no room."""
    return Trouble(
        f"no room for model {asked.repository} in {asked.folder}: {why}",
        "free disk there, or set cluster.model_cache.path to a folder with more",
    )


def _gated(asked: Asked, status: int | None) -> Trouble:
    page = f"{asked.hub}/{asked.repository}"
    account = (
        "with the account of HF_TOKEN, and let the token read gated models"
        if asked.has_token
        else "and set HF_TOKEN to a token of that account"
    )
    return Trouble(
        f"model {asked.repository} is gated: {asked.hub} answered {status}",
        f"accept its licence at {page} {account}",
    )


def _not_shown(asked: Asked, status: int | None) -> Trouble:
    token = (
        "see whether HF_TOKEN is valid and may read it"
        if asked.has_token
        else "set HF_TOKEN where it is private"
    )
    return Trouble(
        f"{asked.hub} shows no model {asked.repository}: it answered {status}",
        f"correct models.*.source, or {token}",
    )


def _kinds(error: BaseException) -> frozenset[str]:
    """The names of an exception's classes, and of those of what it came from.

    By name, for huggingface_hub changed the library of its HTTP client, with all of its errors.
    """
    return frozenset(kind.__name__ for one in _chain(error) for kind in type(one).__mro__)


def _status(error: BaseException) -> int | None:
    for one in _chain(error):
        status = getattr(getattr(one, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
    return None


def _chain(error: BaseException) -> Sequence[BaseException]:
    found: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in found:
        found.append(one)
        one = one.__cause__
    return found


def _words(error: BaseException) -> str:
    """The first line of what it was at first."""
    first = _chain(error)[-1]
    said = str(first).strip().partition("\n")[0]
    return f"{type(first).__name__}: {said}" if said else type(first).__name__
