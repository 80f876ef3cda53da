"""Which files of a model on a hub an engine reads, and what it means when they do not come."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Sequence
from fnmatch import fnmatch
from pathlib import PurePosixPath
from typing import Final, NamedTuple

NON_WEIGHT_PATTERNS: Final = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py")
"""Configuration, tokenizer, chat template and code of a model; a few megabytes."""
WEIGHTS_INDEX: Final = "model.safetensors.index.json"
_MISTRAL_PATTERN: Final = "consolidated*.safetensors"
_PATTERNS_BY_FORMAT: Final[dict[str, tuple[str, ...]]] = {
    "hf": ("*.safetensors", "*.bin", "*.pt"),
    "mistral": (_MISTRAL_PATTERN,),
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


class FetchFailure(NamedTuple):
    """Why a model does not come from a hub, and what to do."""

    why: str
    remedy: str


class HubModel(NamedTuple):
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
    files: Collection[str], load_format: str, indexed_files: Collection[str]
) -> frozenset[str]:
    """The files with the weights that vLLM reads.

    Args:
        files: of the repository.
        load_format: as vLLM names it.
        indexed_files: what the index of the weights names; empty where there is none.
    """
    if load_format == "auto":
        has_mistral_files = any(
            fnmatch(PurePosixPath(file).name, _MISTRAL_PATTERN) for file in files
        )
        load_format = "mistral" if has_mistral_files else "hf"
    patterns = _PATTERNS_BY_FORMAT.get(load_format, ())
    if indexed_files and "*.safetensors" in patterns:
        return frozenset(indexed_files)
    for pattern in patterns:
        if matching := frozenset(file for file in files if fnmatch(file, pattern)):
            return matching
    return frozenset()


def explain_failure(error: BaseException, hub_model: HubModel) -> FetchFailure:
    """What an exception of huggingface_hub's comes to, for whoever started the deployment."""
    return (
        _disk_failure(error, hub_model)
        or _hub_failure(error, hub_model)
        or _network_failure(error, hub_model)
    )


def _disk_failure(error: BaseException, hub_model: HubModel) -> FetchFailure | None:
    number = error.errno if isinstance(error, OSError) else None
    if number in {errno.ENOSPC, errno.EDQUOT}:
        return disk_full_failure(hub_model, "the disk is full")
    if number in {errno.EACCES, errno.EROFS, errno.EPERM}:
        return FetchFailure(
            f"models cannot be kept in {hub_model.folder}: {os.strerror(number)}",
            "let baton's user write there, or set cluster.model_cache.path to another folder",
        )
    if hub_model.offline:
        return FetchFailure(
            f"model {hub_model.repository} is not in {hub_model.folder}, and HF_HUB_OFFLINE is set",
            "fetch it there with 'hf download', or remove HF_HUB_OFFLINE",
        )
    return None


def _hub_failure(error: BaseException, hub_model: HubModel) -> FetchFailure | None:
    """What the hub has answered; None where it has not."""
    class_names, status = _class_names(error), _status(error)
    if "GatedRepoError" in class_names:
        return _gated_failure(hub_model, status)
    if "RevisionNotFoundError" in class_names:
        return FetchFailure(
            f"model {hub_model.repository} has no revision {hub_model.revision!r} on"
            f" {hub_model.hub}",
            "correct models.*.revision",
        )
    if "RepositoryNotFoundError" in class_names or status in {401, 403, 404}:
        return _not_visible_failure(hub_model, status)
    if status is None:
        return None
    is_rate_limited = status == 429  # noqa: PLR2004 - too many requests
    return FetchFailure(
        f"{hub_model.hub} answered {status} for model {hub_model.repository}",
        "wait some minutes, or set HF_TOKEN: accounts may ask more often"
        if is_rate_limited
        else "try again later, or set HF_ENDPOINT to a mirror",
    )


def _network_failure(error: BaseException, hub_model: HubModel) -> FetchFailure:
    if "TransportError" in _class_names(error):
        return FetchFailure(
            f"{hub_model.hub} cannot be reached for model {hub_model.repository}:"
            f" {_first_line(error)}",
            "check this node's network; set HTTPS_PROXY for a proxy, HF_ENDPOINT for a mirror, or"
            " HF_HUB_OFFLINE=1 where the model is on the node",
        )
    return FetchFailure(
        f"model {hub_model.repository} does not come from {hub_model.hub}: {_first_line(error)}",
        "try again; what has come is kept",
    )


def disk_full_failure(hub_model: HubModel, why: str) -> FetchFailure:
    """What it comes to that a model has no room."""
    return FetchFailure(
        f"no room for model {hub_model.repository} in {hub_model.folder}: {why}",
        "free disk there, or set cluster.model_cache.path to a folder with more",
    )


def _gated_failure(hub_model: HubModel, status: int | None) -> FetchFailure:
    page = f"{hub_model.hub}/{hub_model.repository}"
    account = (
        "with the account of HF_TOKEN, and let the token read gated models"
        if hub_model.has_token
        else "and set HF_TOKEN to a token of that account"
    )
    return FetchFailure(
        f"model {hub_model.repository} is gated: {hub_model.hub} answered {status}",
        f"accept its licence at {page} {account}",
    )


def _not_visible_failure(hub_model: HubModel, status: int | None) -> FetchFailure:
    token = (
        "see whether HF_TOKEN is valid and may read it"
        if hub_model.has_token
        else "set HF_TOKEN where it is private"
    )
    return FetchFailure(
        f"{hub_model.hub} shows no model {hub_model.repository}: it answered {status}",
        f"correct models.*.source, or {token}",
    )


def _class_names(error: BaseException) -> frozenset[str]:
    """The names of an exception's classes, and of those of what it came from.

    By name, for huggingface_hub changed the library of its HTTP client, with all of its errors.
    """
    return frozenset(
        kind.__name__ for exception in _chain(error) for kind in type(exception).__mro__
    )


def _status(error: BaseException) -> int | None:
    for exception in _chain(error):
        status = getattr(getattr(exception, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
    return None


def _chain(error: BaseException) -> Sequence[BaseException]:
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__
    return causes


def _first_line(error: BaseException) -> str:
    """The first line of what it was at first."""
    root_cause = _chain(error)[-1]
    text = str(root_cause).strip().partition("\n")[0]
    return f"{type(root_cause).__name__}: {text}" if text else type(root_cause).__name__
