"""Write a small random Llama with its own tokenizer: a real model for engines, without a download.

Theory of operation: in a plain random model the two best next tokens are often so close that
bfloat16 rounding decides, and two correct engines disagree. Here every token votes for a successor:
the output layer holds the embeddings in shuffled order, and attention carries the votes of earlier
tokens along. The winner is nearly always clear, and still depends on the context, so that wrong KV
blocks show in the text. Weights are stored as bfloat16; in float32 rounding has no influence.
"""

from __future__ import annotations

import json
import math
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY_TOKENS: Final = 8192
MAX_LEN_TOKENS: Final = 4096
MARKER: Final = "baton-tiny-model.json"
"""Written last; a folder that has it is complete."""

_FORMAT: Final = 1
_BOS, _EOS, _PAD, _END = "<s>", "</s>", "<pad>", "<|end|>"
_ROLES: Final = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
_SPECIAL: Final = (_BOS, _EOS, _PAD, _END, *_ROLES)
_CHAT_TEMPLATE: Final = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] or [] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_HIDDEN: Final = 256
_LAYERS: Final = 4
_HEADS: Final = 4
_KV_HEADS: Final = 2
_HEAD_SIZE: Final = _HIDDEN // _HEADS

# Found by trial: with less attention a token's successor hardly depends on the context, with more,
# close calls return. Tests check both bounds.
_ATTENTION_GAIN: Final = 1.25
_ATTENTION_SHARPNESS: Final = 2.0
_MLP_GAIN: Final = 0.3
_LOGIT_GAIN: Final = 0.1


def write_tiny_model(path: Path, *, seed: int = 0) -> Path:
    """Write the model into the folder `path`, unless it is there already.

    The folder appears complete or not at all. The same seed and the same Python release give the
    same model; the tokenizer is trained on Python's own standard library.

    Returns:
        `path`, for an engine to load.

    Raises:
        FileExistsError: `path` holds something else.
        ModuleNotFoundError: torch or transformers is not installed.
    """
    marker = {"format": _FORMAT, "seed": seed}
    if _is_complete(path, marker):
        return path
    if path.exists() and not (path / MARKER).exists() and any(path.iterdir()):
        raise FileExistsError(
            f"{path} holds something other than a tiny model; name another folder or empty it"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        new_folder = scratch / "new"
        _write(new_folder, seed=seed)
        (new_folder / MARKER).write_text(json.dumps(marker))
        _move_into_place(new_folder, path, old_folder=scratch / "old", marker=marker)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path


def _is_complete(path: Path, marker: dict[str, int]) -> bool:
    try:
        return bool(json.loads((path / MARKER).read_text()) == marker)
    except (OSError, ValueError):
        return False


def _move_into_place(
    new_folder: Path, path: Path, *, old_folder: Path, marker: dict[str, int]
) -> None:
    if path.exists():
        path.rename(old_folder)
    try:
        new_folder.rename(path)
    except OSError:
        # Another process was faster; its result is as good, if it is the same.
        if not _is_complete(path, marker):
            raise


def _write(folder: Path, *, seed: int) -> None:
    import torch

    tokenizer = _train_tokenizer()
    tokenizer.save_pretrained(folder)
    model = _random_model(seed)
    model.to(torch.bfloat16).save_pretrained(folder)


def _train_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_TOKENS,
        special_tokens=list(_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    bpe.train([str(source) for source in sources], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=_BOS,
        eos_token=_EOS,
        pad_token=_PAD,
        model_max_length=MAX_LEN_TOKENS,
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def _config() -> LlamaConfig:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY_TOKENS,
        hidden_size=_HIDDEN,
        intermediate_size=688,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        max_position_embeddings=MAX_LEN_TOKENS,
        bos_token_id=_SPECIAL.index(_BOS),
        eos_token_id=_SPECIAL.index(_EOS),
        pad_token_id=_SPECIAL.index(_PAD),
    )


def _random_model(seed: int) -> LlamaForCausalLM:
    import torch
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = LlamaForCausalLM(_config())
        random = torch.Generator().manual_seed(seed)
        _fill_votes(model, random)
        for layer in model.model.layers:
            _fill_attention(layer.self_attn, random)
            _fill_mlp(layer.mlp, random)
    return model.eval()


def _fill_votes(model: LlamaForCausalLM, random: torch.Generator) -> None:
    """Let each token vote for another, but never for a special token.

    So greedy output ends by length, never by chance.
    """
    import torch

    embeddings = torch.randn(VOCABULARY_TOKENS, _HIDDEN, generator=random)
    ordinary = VOCABULARY_TOKENS - len(_SPECIAL)
    successor = torch.randperm(ordinary, generator=random) + len(_SPECIAL)
    votes = torch.zeros(VOCABULARY_TOKENS, _HIDDEN)
    votes[successor] = embeddings[len(_SPECIAL) :]
    model.model.embed_tokens.weight.copy_(embeddings)
    model.lm_head.weight.copy_(votes * _LOGIT_GAIN)


def _fill_attention(attention: torch.nn.Module, random: torch.Generator) -> None:
    """Attend to tokens by random queries and keys; carry their votes along, undistorted."""
    import torch

    for projection in (attention.q_proj, attention.k_proj):
        noise = torch.randn(projection.weight.shape, generator=random)
        projection.weight.copy_(noise * _ATTENTION_SHARPNESS / math.sqrt(_HIDDEN))
    basis, _ = torch.linalg.qr(torch.randn(_HIDDEN, _HIDDEN, generator=random))
    values = basis[: _KV_HEADS * _HEAD_SIZE]
    attention.v_proj.weight.copy_(values)
    # Each query head returns its KV head's part of the embedding to its place.
    per_kv_head = values.split(_HEAD_SIZE)
    output_blocks = [per_kv_head[head * _KV_HEADS // _HEADS].T for head in range(_HEADS)]
    attention.o_proj.weight.copy_(torch.cat(output_blocks, dim=1) * _ATTENTION_GAIN)


def _fill_mlp(mlp: torch.nn.Module, random: torch.Generator) -> None:
    import torch

    for projection, gain in ((mlp.gate_proj, 1.0), (mlp.up_proj, 1.0), (mlp.down_proj, _MLP_GAIN)):
        noise = torch.randn(projection.weight.shape, generator=random)
        projection.weight.copy_(noise * gain / math.sqrt(projection.in_features))
