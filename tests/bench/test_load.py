"""Loads: the same for the same seed, shared by several senders, and as they were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, stdev

import pytest

from baton.bench.client.client import Api
from baton.bench.load import (
    Length,
    MadeUp,
    Maker,
    Pace,
    Recorded,
    Rows,
    Source,
    Span,
    WarmUp,
    starts,
)
from baton.bench.prompts.datasets import Row
from baton.bench.prompts.word_prompts import WordCosts
from baton.simulator.workloads.trace import TraceRequest
from tests.bench.samples import source

MIXED = MadeUp(prompt=Span(20, 90), output=Span(1, 9), classes=(("a", 3.0), ("b", 1.0)))


Made = tuple[TraceRequest, Sequence[object]]


def asked(what: Source, count: int) -> list[Made]:
    maker = Maker(what)
    requests = [maker.request(number) for number in range(count)]
    return [(one, maker.question(number, one).prompt) for number, one in enumerate(requests)]


def test_the_same_seed_makes_the_very_same_requests() -> None:
    def made(seed: str, texts: str) -> list[Made]:
        return asked(source(what=MIXED, seed=seed, texts=texts, classes=("a", "b")), 50)

    assert made("1", "1") == made("1", "1")
    assert made("1", "1") != made("2", "1")


def test_other_texts_have_the_same_lengths_and_share_nothing() -> None:
    one, other = (asked(source(what=MIXED, texts=name), 20) for name in ("1", "2"))
    for (first, prompt), (second, text) in zip(one, other, strict=True):
        assert first == second
        assert len(prompt) == len(text) == first.prompt_tokens
        assert prompt[:8] != text[:8]


def test_a_request_depends_on_its_number_and_not_on_who_else_was_made() -> None:
    whole = asked(source(what=MIXED), 20)
    maker = Maker(source(what=MIXED))
    one = maker.request(17)
    assert (one, maker.question(17, one).prompt) == whole[17]


def test_classes_come_in_their_shares_and_only_those_that_are_known() -> None:
    maker = Maker(source(what=MIXED, classes=("a", "b")))
    drawn = [maker.request(number).slo_class for number in range(2000)]
    assert 0.72 < drawn.count("a") / 2000 < 0.78
    recorded = Recorded((TraceRequest(0, 5, 5, slo_class="code"),))
    assert Maker(source(what=recorded, classes=("a",))).request(0).slo_class is None
    assert Maker(source(what=recorded, classes=("code",))).request(0).slo_class == "code"


@pytest.mark.parametrize("words", [None, WordCosts()])
def test_prompts_begin_with_one_of_the_shared_prefixes(words: WordCosts | None) -> None:
    what = MadeUp(prompt=Span(48, 64), output=Span(1, 1), shared_tokens=32, shared_prompts=3)
    maker = Maker(source(what=what, block_tokens=32, words=words))
    fronts, wholes = set(), set()
    for number in range(60):
        prompt = maker.question(number, maker.request(number)).prompt
        tokens = prompt.split() if isinstance(prompt, str) else prompt
        assert 48 <= len(tokens) <= 64
        fronts.add(tuple(map(str, tokens[:32])))
        wholes.add(tuple(map(str, tokens)))
    assert (len(fronts), len(wholes)) == (3, 60)


def test_what_stands_around_a_prompt_is_counted_in_once_in_a_conversation() -> None:
    maker = Maker(source(api=Api.CHAT, words=WordCosts(around=7)))
    one = TraceRequest(0, 40, 5)
    first = maker.question(0, one)
    (message,) = first.messages
    assert len(message["content"].split()) == 33
    after = maker.question(1, one, first.messages)
    assert after.messages[0] == message
    assert len(after.messages[1]["content"].split()) == 40


def test_rows_are_asked_in_order_and_again_from_the_start() -> None:
    rows = tuple(Row(({"role": "user", "content": text},), 4) for text in "ab")
    chat = Maker(source(what=Rows(rows), api=Api.CHAT))
    plain = Maker(source(what=Rows(rows)))
    assert [plain.question(n, plain.request(n)).prompt for n in range(3)] == ["a", "b", "a"]
    assert chat.question(1, chat.request(1)).messages == rows[1].messages
    assert plain.request(0).output_tokens == 4


def drawn(pace: Pace, *, burstiness: float = 1.0, count: int = 4000) -> tuple[float, ...]:
    return starts(pace, 20.0, burstiness, warm_up=WarmUp(), length=Length(requests=count), seed="3")


@pytest.mark.parametrize(
    ("pace", "burstiness", "cv"),
    [
        (Pace.CONSTANT, 1.0, 0.0),
        (Pace.POISSON, 1.0, 1.0),
        (Pace.GAMMA, 0.25, 2.0),
        (Pace.GAMMA, 4.0, 0.5),
    ],
)
def test_arrivals_have_their_rate_and_their_burstiness(
    pace: Pace, burstiness: float, cv: float
) -> None:
    gaps = [later - earlier for earlier, later in pairwise(drawn(pace, burstiness=burstiness))]
    assert fmean(gaps) == pytest.approx(1 / 20, rel=0.08)
    assert stdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.1, abs=1e-6)


def test_the_arrivals_of_another_rate_are_the_same_on_another_scale() -> None:
    def at(rate: float) -> tuple[float, ...]:
        length = Length(requests=50)
        return starts(Pace.POISSON, rate, 1.0, warm_up=WarmUp(), length=length, seed="3")

    assert at(4.0) == pytest.approx([4 * time_s for time_s in at(16.0)])


def test_a_warm_up_is_sent_before_what_is_measured() -> None:
    def times(warm_up: WarmUp, length: Length) -> tuple[float, ...]:
        return starts(Pace.CONSTANT, 10.0, 1.0, warm_up=warm_up, length=length, seed="")

    assert len(times(WarmUp(requests=5), Length(requests=20))) == 25
    assert times(WarmUp(duration_s=1.05), Length(duration_s=2))[-1] == pytest.approx(3.0)
    assert len(times(WarmUp(duration_s=1.05), Length(requests=20))) == 31
    assert len(times(WarmUp(requests=5), Length(duration_s=1.05))) == 5 + 10
