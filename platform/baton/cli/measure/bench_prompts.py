"""What must be known before a benchmark begins: who is asked, and prompts out of files or words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from baton.bench.client.client import Api, ClientOptions, CompletionClient, Message, ServedModel
from baton.bench.findings.campaign import LoadUnusable
from baton.bench.prompts.datasets import DatasetRow, lacks_output_lengths, read_rows
from baton.bench.prompts.word_prompts import TokenCounter, WordCosts, measure_word_costs
from baton.cli.measure.bench_args import ENDPOINT, BenchArgs, PromptArgs
from baton.cli.traces import TraceUnusable
from baton.domain.errors import TraceInvalid


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchInputs:
    """What had to be found out first."""

    model: ServedModel
    words: WordCosts | None
    rows: tuple[DatasetRow, ...]
    notes: tuple[str, ...]


async def gather_inputs(args: BenchArgs) -> BenchInputs:
    """Ask the endpoint what it serves and, where prompts are words, what they cost.

    Raises:
        OperatorError: nothing answers, or a file cannot be read.
    """
    endpoint, prompts = args.endpoint, args.prompts
    options = ClientOptions(url=endpoint.url, headers=endpoint.headers)
    async with CompletionClient(options) as client:
        model = await client.get_model(endpoint.model)
        count = _token_counter(args, client, model)
        rows, skipped = await _read_rows(prompts, count)
        words = await measure_word_costs(count) if prompts.as_words and not rows else None
    notes = []
    if words is not None and not words.is_exact:
        notes.append("Nobody could count tokens: prompts have as many words as they should tokens.")
    if skipped:
        notes.append(f"{skipped} entries of the data set were bad and left out.")
    return BenchInputs(model=model, words=words, rows=rows, notes=tuple(notes))


def _token_counter(args: BenchArgs, client: CompletionClient, model: ServedModel) -> TokenCounter:
    """Who counts tokens: the endpoint, a tokenizer's file, or nobody."""
    tokenizer, is_chat = args.prompts.tokenizer, args.endpoint.api is Api.CHAT
    if tokenizer == ENDPOINT:

        async def count_remotely(text: str) -> int | None:
            prompt = [Message(role="user", content=text)] if is_chat else text
            return await client.count_tokens(model.name, prompt)

        return count_remotely
    count_here = _local_counter(Path(tokenizer))

    async def count(text: str) -> int | None:
        return count_here(text)

    return count


def _local_counter(path: Path) -> Callable[[str], int]:
    """Counts by a `tokenizer.json`, or one in a folder."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
    except ImportError as error:
        raise LoadUnusable(
            "the package 'tokenizers' is not installed", "install it, or give --tokenizer endpoint"
        ) from error
    except Exception as error:  # the package raises no narrower one
        raise LoadUnusable(
            f"{file}: no tokenizer: {error}", "name a tokenizer.json or its folder"
        ) from error
    return lambda text: len(tokenizer.encode(text).ids)


async def _read_rows(
    prompts: PromptArgs, count: TokenCounter
) -> tuple[tuple[DatasetRow, ...], int]:
    """The prompts of a file, each with the length of its answer."""
    if prompts.dataset is None:
        return (), 0
    try:
        text = prompts.dataset.read_text(encoding="utf-8")
        rows, skipped = read_rows(text, str(prompts.dataset), ignore_invalid=prompts.ignore_invalid)
    except TraceInvalid as error:
        raise TraceUnusable(
            str(error), "correct it, or leave bad entries out with --skip-bad"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise TraceUnusable(
            f"{prompts.dataset}: cannot be read: {error}", "name a file of JSON or JSON lines"
        ) from error
    if prompts.output is not None:
        rng = Random(0)  # noqa: S311 - lengths, no secrets
        return tuple(row._replace(output_tokens=prompts.output.draw(rng)) for row in rows), skipped
    if lacks_output_lengths(rows):
        rows = [await _with_length(row, count) for row in rows]
    if lacks_output_lengths(rows):
        raise LoadUnusable(
            f"{prompts.dataset} does not say how long answers shall be, and nobody can count"
            " its own",
            "give --output-tokens, or a --tokenizer",
        )
    return tuple(rows), skipped


async def _with_length(row: DatasetRow, count: TokenCounter) -> DatasetRow:
    """A row with the length of its recorded answer, if that can be counted."""
    if row.output_tokens is not None or row.answer is None:
        return row
    tokens, overhead_tokens = await count(row.answer), await count(" ")
    if tokens is None or overhead_tokens is None:
        return row
    return row._replace(output_tokens=max(1, tokens - overhead_tokens + 1))
