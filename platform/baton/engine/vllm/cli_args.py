"""vLLM's parser of server arguments, whose module depends on the version."""

from __future__ import annotations

try:
    from vllm.entrypoints.common.cli_args import (
        FrontendArgs,
        make_arg_parser,
        validate_parsed_serve_args,
    )
except ModuleNotFoundError as error:  # vLLM 0.32
    if not (error.name or "").startswith("vllm.entrypoints.common"):
        raise
    from vllm.entrypoints.launchers.cli_args import (
        FrontendArgs,
        make_arg_parser,
        validate_parsed_serve_args,
    )

__all__ = ["FrontendArgs", "make_arg_parser", "validate_parsed_serve_args"]
