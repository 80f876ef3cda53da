"""A tiny mixture of experts for engines, with the tokenizer of the tiny model."""

from __future__ import annotations

import warnings
from pathlib import Path

from baton.engine.tiny_model import MAX_LEN_TOKENS, VOCABULARY_TOKENS
from tests.fakes.tiny_model import tiny_model


def write_tiny_moe(folder: Path) -> Path:
    """Write it into a folder below `folder`; the same each time."""
    import torch
    from transformers import AutoTokenizer, MixtralConfig, MixtralForCausalLM

    path = folder / "moe"
    config = MixtralConfig(
        vocab_size=VOCABULARY_TOKENS,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=MAX_LEN_TOKENS,
        sliding_window=None,
    )
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
        AutoTokenizer.from_pretrained(tiny_model(folder)).save_pretrained(path)
    return path
