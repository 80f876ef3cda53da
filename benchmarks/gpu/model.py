"""A model of full size without weights: dummies take as long to read and to multiply."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

MODEL_NAME: Final = "llama-8b"
SHAPE: Final = "meta-llama/Llama-3.1-8B"
"""As the performance model knows it."""
VOCABULARY_TOKENS: Final = 128_256
FIRST_TOKEN_ID: Final = 16
"""Ids below it are special tokens."""
_BEGIN, _END, _UNKNOWN = "<s>", "</s>", "<2>"
_CONFIG: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": VOCABULARY_TOKENS,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""Source: the model card's config.json."""


def write_dummy_llama(folder: Path) -> Path:
    """Write the configuration and a tokenizer with a word for each id; returns the folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = folder / MODEL_NAME
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(_CONFIG))
    special = [_BEGIN, _END, *(f"<{number}>" for number in range(2, FIRST_TOKEN_ID))]
    words = special + [f"w{number}" for number in range(FIRST_TOKEN_ID, VOCABULARY_TOKENS)]
    table = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(table, unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=_BEGIN, eos_token=_END, unk_token=_UNKNOWN
    ).save_pretrained(model)
    return model
