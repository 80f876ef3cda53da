"""What must be known before a benchmark begins: who is asked, and prompts out of files or words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from baton.bench.client.client import Api, ClientOptions, CompletionClient, Message, ServedModel
from baton.bench.findings.campaign import LoadUnusable
from baton.bench.prompts.datasets import Row, lengths_wanted, read_rows
from baton.bench.prompts.word_prompts import Counter, WordCosts, word_costs
from baton.cli.measure.bench_args import ENDPOINT, Asked, Order
from baton.cli.traces import TraceUnusable
from baton.domain.errors import BadTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What had to be found out first."""

    model: ServedModel
    words: WordCosts | None
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


async def look(order: Order) -> Known:
    """Ask the endpoint what it serves and, where prompts are words, what they cost.

    Raises:
        OperatorError: nothing answers, or a file cannot be read.
    """
    endpoint, asked = order.endpoint, order.asked
    options = ClientOptions(url=endpoint.url, headers=endpoint.headers)
    async with CompletionClient(options) as client:
        model = await client.model(endpoint.model)
        count = _counter(order, client, model)
        rows, skipped = await _rows(asked, count)
        words = await word_costs(count) if asked.words and not rows else None
    notes = []
    if words is not None and not words.counted:
        notes.append("Nobody could count tokens: prompts have as many words as they should tokens.")
    if skipped:
        notes.append(f"{skipped} entries of the data set were bad and left out.")
    return Known(model=model, words=words, rows=rows, notes=tuple(notes))


def _counter(order: Order, client: CompletionClient, model: ServedModel) -> Counter:
    """Who counts tokens: the endpoint, a tokenizer's file, or nobody."""
    tokenizer, chat = order.asked.tokenizer, order.endpoint.api is Api.CHAT
    if tokenizer == ENDPOINT:

        async def ask(text: str) -> int | None:
            said = [Message(role="user", content=text)] if chat else text
            return await client.count_tokens(model.name, said)

        return ask
    count_here = _local(Path(tokenizer))

    async def count(text: str) -> int | None:
        return count_here(text)

    return count


def _local(path: Path) -> Callable[[str], int]:
    """Counts by a `tokenizer.json`, or one in a folder."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        from tokenizers import Tokenizer

        found = Tokenizer.from_file(str(file))
    except ImportError as error:
        raise LoadUnusable(
            "the package 'tokenizers' is not installed", "install it, or give --tokenizer endpoint"
        ) from error
    except Exception as error:  # the package raises no narrower one
        raise LoadUnusable(
            f"{file}: no tokenizer: {error}", "name a tokenizer.json or its folder"
        ) from error
    return lambda text: len(found.encode(text).ids)


async def _rows(asked: Asked, count: Counter) -> tuple[tuple[Row, ...], int]:
    """The prompts of a file, each with the length of its answer."""
    if asked.dataset is None:
        return (), 0
    try:
        text = asked.dataset.read_text(encoding="utf-8")
        rows, skipped = read_rows(text, str(asked.dataset), skip_bad=asked.skip_bad)
    except BadTrace as error:
        raise TraceUnusable(
            str(error), "correct it, or leave bad entries out with --skip-bad"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise TraceUnusable(
            f"{asked.dataset}: cannot be read: {error}", "name a file of JSON or JSON lines"
        ) from error
    if asked.output is not None:
        rng = Random(0)  # noqa: S311 - lengths, no secrets
        return tuple(one._replace(output_tokens=asked.output.draw(rng)) for one in rows), skipped
    if lengths_wanted(rows):
        rows = [await _with_length(one, count) for one in rows]
    if lengths_wanted(rows):
        raise LoadUnusable(
            f"{asked.dataset} does not say how long answers shall be, and nobody can count its own",
            "give --output-tokens, or a --tokenizer",
        )
    return tuple(rows), skipped


async def _with_length(row: Row, count: Counter) -> Row:
    """A row with the length of its recorded answer, if that can be counted."""
    if row.output_tokens is not None or row.answer is None:
        return row
    tokens, around = await count(row.answer), await count(" ")
    if tokens is None or around is None:
        return row
    return row._replace(output_tokens=max(1, tokens - around + 1))
