"""Sources of a model: a hub id, a folder, an object store; and texts that are none of them."""

from __future__ import annotations

from typing import Final

TINY: Final = "tiny"
"""A small random model that is made where it is wanted."""
OBJECT_STORES: Final = ("s3://", "gs://", "az://")
"""Source: vLLM 0.32 and 0.33, transformers_utils/runai_utils.py; they want another package."""
_HUB_SCHEME: Final = "hf://"


def is_in_object_store(source: str) -> bool:
    """Whether engines stream the model from a store of objects."""
    return source.lower().startswith(OBJECT_STORES)


def hub_id(source: str) -> str:
    """The source as vLLM takes it: of `hf://org/model`, what stands behind the scheme."""
    return source[len(_HUB_SCHEME) :] if source.lower().startswith(_HUB_SCHEME) else source


def is_path(source: str) -> bool:
    """Whether a folder is meant; ids on a hub have one slash at most."""
    return source.startswith((".", "/", "~")) or ("://" not in source and source.count("/") > 1)


def is_on_hub(source: str) -> bool:
    """Whether a model has to be fetched from a hub, unless a folder here is called so."""
    return source != TINY and not is_in_object_store(source) and not is_path(source)


def source_error(source: str) -> str | None:
    """Why no engine could load a model from there; None where one may."""
    expected = "expected an id on the hub, a folder, or a place in s3://, gs:// or az://"
    if "://" in source and not is_in_object_store(source) and hub_id(source) == source:
        return f"got {source!r}, {expected}"
    if source.lower().endswith(".gguf"):
        return (
            f"got {source!r}, which vLLM 0.32 and 0.33 do not read; give the folder or the id of"
            " the model in safetensors"
        )
    if not hub_id(source).strip("/") or hub_id(source) != hub_id(source).strip():
        return f"got {source!r}, {expected}"
    return None
