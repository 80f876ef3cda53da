"""What reads bytes that others have made, each with inputs that are almost right."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

import msgspec
from hypothesis import Phase, given, settings

from baton.bench.client.client import DECODE_ERRORS, Chunk, EventReader, StreamInvalid
from baton.config.load import load_config, load_text
from baton.config.write.render import render
from baton.domain.errors import ConfigInvalid
from baton.runtime.link import codec, frames
from baton.runtime.link.codec import BadFrame
from tests.abuse.fuzz import Target, mutate
from tests.runtime.test_link_frames import from_coordinator, from_replica

ROOT = Path(__file__).parents[2]
_DECODERS = (codec.decode_from_coordinator, codec.decode_from_replica)


# ------------------------------------------------------------------------------------ fleet link


def link(frames_of_each: int = 150) -> Target[list[bytes]]:
    """Frames of the fleet link: decoded to one that can be encoded again, or refused as bad."""
    corpus = tuple(tuple(map(bytes, codec.encode(frame))) for frame in _frames(frames_of_each))
    bodies = tuple(part for parts in corpus for part in parts)

    def make(rng: Random) -> list[bytes]:
        parts = list(rng.choice(corpus))
        for _ in range(rng.choice((0, 1, 1, 2))):
            index = rng.randrange(len(parts))
            match rng.randrange(8):
                case 0:
                    parts.insert(index, rng.choice(bodies))
                case 1 if len(parts) > 1:
                    del parts[index]
                case 2:
                    parts[index] = _lying_length(rng)
                case 3:
                    parts[0] = bytes([rng.randrange(256)])
                case _:
                    parts[index] = mutate(parts[index], rng, bodies)
        return parts

    return Target(make=make, check=_check_frame)


def _check_frame(parts: list[bytes]) -> str:
    outcome = "refused"
    for decode in _DECODERS:
        try:
            frame = decode(parts)
        except BadFrame as error:
            if len(str(error)) > 10_000:
                raise AssertionError("the refusal is as long as a frame") from error
            continue
        decoded_again = decode([bytes(part) for part in codec.encode(frame)])
        if repr(decoded_again) != repr(frame):
            raise AssertionError(
                f"decoded to {frame!r}, and after another round to {decoded_again!r}"
            )
        outcome = "decoded"
    return outcome


def _frames(count: int) -> list[frames.Frame]:
    """Frames of every kind, the same each time."""
    examples: list[frames.Frame] = []
    generate = settings(
        max_examples=count, derandomize=True, database=None, phases=[Phase.generate], deadline=None
    )

    @generate
    @given(from_coordinator)
    def of_coordinators(frame: frames.FromCoordinator) -> None:
        examples.append(frame)

    @generate
    @given(from_replica)
    def of_replicas(frame: frames.FromReplica) -> None:
        examples.append(frame)

    of_coordinators()
    of_replicas()
    return examples


def _lying_length(rng: Random) -> bytes:
    """MessagePack that announces more than there is, or nests without end."""
    size = rng.choice((2**31 - 1, 2**32 - 1, 2**24, 0))
    opening = rng.choice((b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"))
    return rng.choice((opening + size.to_bytes(4, "big"), b"\x91" * rng.choice((10, 100_000))))


# ---------------------------------------------------------------------------------- configuration

_SCALARS = (
    "", "~", "null", "true", "-1", "0", "1e999", "nan", ".inf", "9" * 400, "0x10", "1_000", "a: b",
    "[", "{", "]", "*a", "&a x", "!!python/object/apply:os.system [id]", "!!binary aGk=", "<<",
    "'", '"', "\t", "\x00", "\ud7ff", "\u2028", "2026-11-22", "10s", "-5s", "1e400s", "5parsecs",
    "4GiB", "%TAG", "---", "...", "? x", "| \n  text", "> \n  text", "@x", "`x", "${HOME}",
)  # fmt: skip


def config() -> Target[tuple[str, tuple[str, ...]]]:
    """A configuration and `--set`s: loaded, written and loaded again alike, or refused in words."""
    texts = tuple(path.read_text() for path in sorted((ROOT / "configs").glob("*.yaml")))
    keys = _keys(texts)

    def make(rng: Random) -> tuple[str, tuple[str, ...]]:
        text = rng.choice(texts)
        for _ in range(rng.choice((1, 1, 2, 4))):
            text = _mutate_yaml(text, rng, texts)
        sets = tuple(
            f"{'.'.join(rng.choices(keys, k=rng.randint(1, 4)))}={rng.choice(_SCALARS)}"
            for _ in range(rng.choice((0, 0, 1, 3)))
        )
        return text, sets

    def check_input(request: tuple[str, tuple[str, ...]]) -> str:
        text, sets = request
        try:
            config = load_text(text)
        except ConfigInvalid as error:
            if not error.problems or len(error.problems) > 101:
                raise AssertionError(f"{len(error.problems)} findings") from error
            outcome = "refused"
        else:
            if load_text(render(config)) != config:
                raise AssertionError("written and loaded again it is another one")
            outcome = "loaded"
        if sets:
            try:
                load_config([ROOT / "configs" / "sim.yaml"], sets=sets)
                outcome += ", set"
            except ConfigInvalid:
                outcome += ", not set"
        return outcome

    return Target(make=make, check=check_input)


def _keys(texts: Sequence[str]) -> tuple[str, ...]:
    words = {word.rstrip(":") for text in texts for word in text.split() if word.endswith(":")}
    return (*sorted(words), "", "0", "-1", "x" * 300, "é", "..", "a b")


def _mutate_yaml(text: str, rng: Random, texts: Sequence[str]) -> str:
    lines = text.splitlines()
    index = rng.randrange(len(lines) or 1)
    match rng.randrange(8):
        case 0:
            return mutate(text.encode(), rng, tuple(map(str.encode, texts))).decode(
                errors=rng.choice(("replace", "ignore"))
            )
        case 1:
            key, colon, _ = lines[index].partition(":") if lines else ("a", ":", "")
            lines[index : index + 1] = [f"{key}{colon} {rng.choice(_SCALARS)}"]
        case 2:
            lines.insert(index, rng.choice(lines) if lines else "a: 1")
        case 3:
            lines[index : index + 1] = [
                " " * rng.randint(0, 40) + (lines[index].strip() if lines else "a")
            ]
        case 4:
            return text + _yaml_bomb(rng)
        case 5:
            lines[index : index + rng.randint(1, 5)] = []
        case 6:
            lines[index:index] = rng.choice(texts).splitlines()[: rng.randint(1, 40)]
        case _:
            return text.replace(rng.choice(text or "a"), rng.choice(string.printable), 3)
    return "\n".join(lines)


def _yaml_bomb(rng: Random) -> str:
    """Small to write, large to read."""
    match rng.randrange(4):
        case 0:
            fans = (f"b{n}: &b{n} [{', '.join([f'*b{n - 1}'] * 10)}]" for n in range(1, 12))
            return "\nb0: &b0 [x]\n" + "\n".join(fans)
        case 1:
            return "\nz: " + "[" * 5000
        case 2:
            return "\nz: " + "{a: " * 5000
        case _:
            return "\n" + "\n".join(f"k{n}: 1" for n in range(20_000))


# ------------------------------------------------------------------------------------ event stream

_EVENT = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"a"},"text":"b"}]}\n\n'
_EVENTS = (
    _EVENT, b"data: [DONE]\n\n", b": comment\n\n", b"event: error\ndata: {}\n\n", b"\r\n\r\n",
    b"data:\n\n", b"data: a\ndata: b\n\n", b"id: 1\nretry: 5\n\n", _EVENT.replace(b"\n", b"\r\n"),
    b'data: {"usage":{"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":1}}}\n\n',
)  # fmt: skip


def sse() -> Target[tuple[bytes, int]]:
    """A stream of events: the same events however it is cut, read as chunks or refused."""

    def make(rng: Random) -> tuple[bytes, int]:
        data = b"".join(rng.choices(_EVENTS, k=rng.randint(1, 8)))
        return mutate(data, rng, _EVENTS), rng.getrandbits(32)

    def check_input(stream: tuple[bytes, int]) -> str:
        data, seed = stream
        whole, in_pieces = _read([data]), _read(_pieces(data, Random(seed)))
        if whole != in_pieces:
            raise AssertionError(f"{whole} in one piece, {in_pieces} in several")
        read_events = 0
        for event in whole:
            try:
                msgspec.json.decode(event, type=Chunk)
                read_events += 1
            except DECODE_ERRORS:  # as the client of `bench` does
                pass
        return "read" if read_events else "not read"

    return Target(make=make, check=check_input)


def _read(pieces: Sequence[bytes]) -> list[bytes]:
    reader = EventReader()
    events: list[bytes] = []
    try:
        for piece in pieces:
            events += reader.feed(piece)
        return events + reader.close()
    except StreamInvalid:
        return [b"bad"]


def _pieces(data: bytes, rng: Random) -> list[bytes]:
    return list(_cut(data, lambda: rng.choice((1, 2, 3, 7, 100))))


def _cut(data: bytes, size: Callable[[], int]) -> Iterator[bytes]:
    while data:
        length = size()
        yield data[:length]
        data = data[length:]
