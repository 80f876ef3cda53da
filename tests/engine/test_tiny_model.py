"""The tiny model: complete, the same every time, decided, and dependent on its context."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from baton.engine.tiny_model import MARKER, MAX_LEN_TOKENS, VOCABULARY_TOKENS, write_tiny_model

if TYPE_CHECKING:
    import torch
    import transformers
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
else:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

NEW_TOKENS = 24
PROMPTS = 24
PROMPT_TOKENS = 48


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Products this small only lose by being shared among threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> LlamaForCausalLM:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


@pytest.fixture(scope="module")
def prompts() -> torch.Tensor:
    random = torch.Generator().manual_seed(7)
    return torch.randint(8, VOCABULARY_TOKENS, (PROMPTS, PROMPT_TOKENS), generator=random)


def digest(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def greedy(model: LlamaForCausalLM, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode token by token with a KV cache: the new ids, and the logits they were chosen by."""
    with torch.no_grad():
        out = model(prompts, use_cache=True)
        ids, logits = [], []
        for _ in range(NEW_TOKENS):
            logits.append(out.logits[:, -1])
            ids.append(logits[-1].argmax(-1, keepdim=True))
            out = model(ids[-1], past_key_values=out.past_key_values, use_cache=True)
    return torch.cat(ids, dim=1), torch.stack(logits, dim=1)


@pytest.fixture(scope="module")
def decoded(model: LlamaForCausalLM, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return greedy(model, prompts)


def predicted(model: LlamaForCausalLM, prompts: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """In one pass: the best next token at every position where `ids` holds one."""
    with torch.no_grad():
        logits = model(torch.cat([prompts, ids], dim=1)).logits
    best: torch.Tensor = logits[:, PROMPT_TOKENS - 1 : -1].argmax(-1)
    return best


def test_the_same_seed_writes_the_same_files_and_another_seed_does_not(
    folder: Path, tmp_path: Path
) -> None:
    again = write_tiny_model(tmp_path / "again")
    other = write_tiny_model(tmp_path / "other", seed=1)

    assert digest(again) == digest(folder)
    assert digest(other)["tokenizer.json"] == digest(folder)["tokenizer.json"]
    assert digest(other)["model.safetensors"] != digest(folder)["model.safetensors"]


def test_a_complete_folder_is_left_alone(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny")
    (path / "note").write_text("kept")

    write_tiny_model(path)

    assert (path / "note").read_text() == "kept"


def test_a_folder_of_an_older_format_is_replaced_and_nothing_is_left_beside_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tiny"
    path.mkdir()
    (path / MARKER).write_text(json.dumps({"format": 0, "seed": 0}))

    write_tiny_model(path)

    assert (path / "model.safetensors").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny"]


def test_a_folder_with_something_else_in_it_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")

    with pytest.raises(FileExistsError, match="something other than a tiny model"):
        write_tiny_model(tmp_path)

    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_the_vocabulary_the_special_tokens_and_the_length_are_as_announced(
    folder: Path, tokenizer: PreTrainedTokenizerFast, model: LlamaForCausalLM
) -> None:
    assert len(tokenizer) == model.config.vocab_size == VOCABULARY_TOKENS
    assert tokenizer.model_max_length == model.config.max_position_embeddings == MAX_LEN_TOKENS
    for name in ("bos", "eos", "pad"):
        assert getattr(tokenizer, f"{name}_token_id") == getattr(model.config, f"{name}_token_id")
    generation = json.loads((folder / "generation_config.json").read_text())
    assert not generation.keys() & {"temperature", "top_p", "top_k", "do_sample", "max_length"}


@pytest.mark.parametrize("text", ["def f(x):\n\treturn x", "naïve café 🙂", "  two  spaces ", ""])
def test_any_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_chat_template_takes_strings_and_parts_and_ends_where_the_answer_begins(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    ]

    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    assert rendered == "<s><|system|>Be brief.<|end|><|user|>Hello<|end|><|assistant|>"


def close_calls(logits: torch.Tensor) -> float:
    """The share of greedy tokens that won by less than two roundings of bfloat16."""
    best, second = logits.float().topk(2, dim=-1).values.unbind(-1)
    rounding = torch.finfo(torch.bfloat16).eps * best.abs()
    return float((best - second < 2 * rounding).float().mean())


def test_the_best_token_is_nearly_always_clear_of_the_second_beyond_rounding(
    model: LlamaForCausalLM, prompts: torch.Tensor, decoded: tuple[torch.Tensor, torch.Tensor]
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = transformers.LlamaForCausalLM(model.config).to(torch.bfloat16).eval()

    ours, usual = close_calls(decoded[1]), close_calls(greedy(plain, prompts)[1])

    assert ours <= 0.05
    assert ours <= usual / 4


def test_decoding_step_by_step_agrees_with_one_pass_over_the_same_tokens(
    model: LlamaForCausalLM, prompts: torch.Tensor, decoded: tuple[torch.Tensor, torch.Tensor]
) -> None:
    ids, _ = decoded

    disagreements = int((predicted(model, prompts, ids) != ids).sum())

    assert disagreements <= 3  # of 576


def test_in_float32_rounding_decides_nothing(
    model: LlamaForCausalLM, prompts: torch.Tensor, folder: Path
) -> None:
    exact = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids, _ = greedy(exact, prompts)

    assert torch.equal(predicted(exact, prompts, ids), ids)


def test_a_wrong_first_block_of_the_prompt_shows_in_the_output(
    model: LlamaForCausalLM, prompts: torch.Tensor, decoded: tuple[torch.Tensor, torch.Tensor]
) -> None:
    ids, _ = decoded
    wrong = prompts.clone()
    wrong[:, :16] = wrong[:, :16].roll(1, dims=0)

    changed = (predicted(model, wrong, ids) != ids).any(dim=1)

    assert int(changed.sum()) >= 0.8 * PROMPTS


def test_importing_the_module_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, baton.engine.tiny_model\n"
        "print(sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )

    assert done.stdout.strip() == "[]"
