"""Loads: the same for the same seed, shared by several senders, and as they were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, stdev

import pytest

from baton.bench.client.client import Api
from baton.bench.load import (
    ArrivalProcess,
    DatasetRequests,
    MeasuredLength,
    RecordedRequests,
    RequestFactory,
    RequestSource,
    SyntheticRequests,
    TokenRange,
    WarmUp,
    start_times,
)
from baton.bench.prompts.datasets import DatasetRow
from baton.bench.prompts.word_prompts import WordCosts
from baton.simulator.workloads.trace import TraceRequest
from tests.bench.samples import source

MIXED = SyntheticRequests(
    prompt=TokenRange(20, 90), output=TokenRange(1, 9), classes=(("a", 3.0), ("b", 1.0))
)


Made = tuple[TraceRequest, Sequence[object]]


def asked(what: RequestSource, count: int) -> list[Made]:
    maker = RequestFactory(what)
    requests = [maker.request(number) for number in range(count)]
    return [
        (request, maker.build_completion_request(number, request).prompt)
        for number, request in enumerate(requests)
    ]


def test_the_same_seed_makes_the_very_same_requests() -> None:
    def made(seed: str, texts: str) -> list[Made]:
        return asked(source(requests=MIXED, seed=seed, text_seed=texts, slo_classes=("a", "b")), 50)

    assert made("1", "1") == made("1", "1")
    assert made("1", "1") != made("2", "1")


def test_other_texts_have_the_same_lengths_and_share_nothing() -> None:
    one, other = (asked(source(requests=MIXED, text_seed=name), 20) for name in ("1", "2"))
    for (first, prompt), (second, text) in zip(one, other, strict=True):
        assert first == second
        assert len(prompt) == len(text) == first.prompt_tokens
        assert prompt[:8] != text[:8]


def test_a_request_depends_on_its_number_and_not_on_who_else_was_made() -> None:
    whole = asked(source(requests=MIXED), 20)
    maker = RequestFactory(source(requests=MIXED))
    one = maker.request(17)
    assert (one, maker.build_completion_request(17, one).prompt) == whole[17]


def test_classes_come_in_their_shares_and_only_those_that_are_known() -> None:
    maker = RequestFactory(source(requests=MIXED, slo_classes=("a", "b")))
    drawn = [maker.request(number).slo_class for number in range(2000)]
    assert 0.72 < drawn.count("a") / 2000 < 0.78
    recorded = RecordedRequests((TraceRequest(0, 5, 5, slo_class="code"),))
    assert (
        RequestFactory(source(requests=recorded, slo_classes=("a",))).request(0).slo_class is None
    )
    assert (
        RequestFactory(source(requests=recorded, slo_classes=("code",))).request(0).slo_class
        == "code"
    )


@pytest.mark.parametrize("words", [None, WordCosts()])
def test_prompts_begin_with_one_of_the_shared_prefixes(words: WordCosts | None) -> None:
    what = SyntheticRequests(
        prompt=TokenRange(48, 64), output=TokenRange(1, 1), shared_tokens=32, shared_prompts=3
    )
    maker = RequestFactory(source(requests=what, block_tokens=32, word_costs=words))
    fronts, wholes = set(), set()
    for number in range(60):
        prompt = maker.build_completion_request(number, maker.request(number)).prompt
        tokens = prompt.split() if isinstance(prompt, str) else prompt
        assert 48 <= len(tokens) <= 64
        fronts.add(tuple(map(str, tokens[:32])))
        wholes.add(tuple(map(str, tokens)))
    assert (len(fronts), len(wholes)) == (3, 60)


def test_what_stands_around_a_prompt_is_counted_in_once_in_a_conversation() -> None:
    maker = RequestFactory(source(api=Api.CHAT, word_costs=WordCosts(overhead_tokens=7)))
    one = TraceRequest(0, 40, 5)
    first = maker.build_completion_request(0, one)
    (message,) = first.messages
    assert len(message["content"].split()) == 33
    after = maker.build_completion_request(1, one, first.messages)
    assert after.messages[0] == message
    assert len(after.messages[1]["content"].split()) == 40


def test_rows_are_asked_in_order_and_again_from_the_start() -> None:
    rows = tuple(DatasetRow(({"role": "user", "content": text},), 4) for text in "ab")
    chat = RequestFactory(source(requests=DatasetRequests(rows), api=Api.CHAT))
    plain = RequestFactory(source(requests=DatasetRequests(rows)))
    assert [plain.build_completion_request(n, plain.request(n)).prompt for n in range(3)] == [
        "a",
        "b",
        "a",
    ]
    assert chat.build_completion_request(1, chat.request(1)).messages == rows[1].messages
    assert plain.request(0).output_tokens == 4


def drawn(pace: ArrivalProcess, *, burstiness: float = 1.0, count: int = 4000) -> tuple[float, ...]:
    return start_times(
        pace, 20.0, burstiness, warm_up=WarmUp(), length=MeasuredLength(requests=count), seed="3"
    )


@pytest.mark.parametrize(
    ("pace", "burstiness", "cv"),
    [
        (ArrivalProcess.CONSTANT, 1.0, 0.0),
        (ArrivalProcess.POISSON, 1.0, 1.0),
        (ArrivalProcess.GAMMA, 0.25, 2.0),
        (ArrivalProcess.GAMMA, 4.0, 0.5),
    ],
)
def test_arrivals_have_their_rate_and_their_burstiness(
    pace: ArrivalProcess, burstiness: float, cv: float
) -> None:
    gaps = [later - earlier for earlier, later in pairwise(drawn(pace, burstiness=burstiness))]
    assert fmean(gaps) == pytest.approx(1 / 20, rel=0.08)
    assert stdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.1, abs=1e-6)


def test_the_arrivals_of_another_rate_are_the_same_on_another_scale() -> None:
    def at(rate: float) -> tuple[float, ...]:
        length = MeasuredLength(requests=50)
        return start_times(
            ArrivalProcess.POISSON, rate, 1.0, warm_up=WarmUp(), length=length, seed="3"
        )

    assert at(4.0) == pytest.approx([4 * time_s for time_s in at(16.0)])


def test_a_warm_up_is_sent_before_what_is_measured() -> None:
    def times(warm_up: WarmUp, length: MeasuredLength) -> tuple[float, ...]:
        return start_times(
            ArrivalProcess.CONSTANT, 10.0, 1.0, warm_up=warm_up, length=length, seed=""
        )

    assert len(times(WarmUp(requests=5), MeasuredLength(requests=20))) == 25
    assert times(WarmUp(duration_s=1.05), MeasuredLength(duration_s=2))[-1] == pytest.approx(3.0)
    assert len(times(WarmUp(duration_s=1.05), MeasuredLength(requests=20))) == 31
    assert len(times(WarmUp(requests=5), MeasuredLength(duration_s=1.05))) == 5 + 10
