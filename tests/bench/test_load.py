"""Loads: the same for the same seed, shared by several senders, and as they were asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.client.client import Api
from baton.bench.load import (
    ArrivalProcess,
    DatasetRequests,
    MeasuredLength,
    RecordedRequests,
    RequestFactory,
    RequestSource,
    SyntheticRequests,
    TokenPromptFactory,
    TokenRange,
    WarmUp,
    start_times,
)
from baton.bench.prompts.datasets import DatasetRow, read_rows, shuffled
from baton.bench.prompts.word_prompts import WORDS, WordCosts, WordPromptFactory, measure_word_costs
from baton.domain.errors import TraceInvalid
from baton.domain.hashed_prompt import HashedPrompt
from baton.simulator.workloads.trace import TraceRequest, to_request
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


def test_a_request_depends_on_its_number_and_not_on_other_requests() -> None:
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


def test_text_around_a_prompt_is_counted_once_in_a_conversation() -> None:
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


def test_a_warm_up_is_sent_before_the_measured_requests() -> None:
    def times(warm_up: WarmUp, length: MeasuredLength) -> tuple[float, ...]:
        return start_times(
            ArrivalProcess.CONSTANT, 10.0, 1.0, warm_up=warm_up, length=length, seed=""
        )

    assert len(times(WarmUp(requests=5), MeasuredLength(requests=20))) == 25
    assert times(WarmUp(duration_s=1.05), MeasuredLength(duration_s=2))[-1] == pytest.approx(3.0)
    assert len(times(WarmUp(duration_s=1.05), MeasuredLength(requests=20))) == 31
    assert len(times(WarmUp(requests=5), MeasuredLength(duration_s=1.05))) == 5 + 10


# ---------- token ids that are made up for the prompts of a trace
IDS = st.lists(st.integers(0, 3), max_size=5).map(tuple)
REQUESTS = st.builds(TraceRequest, st.just(0.0), st.integers(1, 40), st.just(1), IDS)


@given(REQUESTS, REQUESTS, st.integers(1, 9))
def test_prompts_share_their_beginning_exactly_as_far_as_the_trace_says(
    one: TraceRequest, other: TraceRequest, size: int
) -> None:
    maker = TokenPromptFactory(block_tokens=size, vocabulary=1 << 31)
    made = [maker.build_prompt(one, 0), maker.build_prompt(other, 1)]
    assert [len(prompt) for prompt in made] == [one.prompt_tokens, other.prompt_tokens]
    outlines = [
        to_request(request, number, block_tokens=size).prompt_token_ids
        for number, request in enumerate((one, other))
    ]
    shared = 0
    for left, right in zip(*outlines, strict=False):
        if left != right:
            break
        shared += 1
    # Two outlines' made-up tokens may be equal by chance, once in 32,768.
    assert all(isinstance(outline, HashedPrompt) for outline in outlines)
    assert made[0][:shared] == made[1][:shared]
    assert made[0][shared : shared + 1] != made[1][shared : shared + 1] or shared == min(
        map(len, made)
    )


def test_prompts_are_the_same_again_and_others_with_another_seed() -> None:
    one = TraceRequest(0, 50, 1, (1, 2))
    makers = [TokenPromptFactory(block_tokens=16, vocabulary=500, seed=seed) for seed in (0, 0, 1)]
    first, again, other = (maker.build_prompt(one, 3) for maker in makers)
    assert first == again != other
    assert 0 <= min(first) <= max(first) < 500
    assert len(set(first)) > 30


def test_tokens_without_a_block_id_differ_between_requests() -> None:
    maker = TokenPromptFactory(block_tokens=16, vocabulary=10_000)
    one = TraceRequest(0, 40, 1, (1,))
    assert maker.build_prompt(one, 0)[:16] == maker.build_prompt(one, 1)[:16]
    assert not set(maker.build_prompt(one, 0)[16:]) & set(maker.build_prompt(one, 1)[16:])


def test_a_vocabulary_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary of 0"):
        TokenPromptFactory(block_tokens=16, vocabulary=0)


# ---------- texts have the number of tokens that they should, by tokenizers of several kinds
Count = Callable[[str], int]


def plain(text: str) -> int:
    """A token a word."""
    return len(text.split())


def with_template(text: str) -> int:
    """Seven tokens around each prompt."""
    return 7 + plain(text)


def by_letters(text: str) -> int:
    """Long words are several tokens."""
    return 1 + sum(-(-len(word) // 3) for word in text.split())


def dear(text: str) -> int:
    """No word is one token."""
    return sum(len(word) + 1 for word in text.split())


@pytest.mark.parametrize("count", [plain, with_template, by_letters])
@pytest.mark.parametrize("tokens", [9, 10, 57, 1024])
async def test_a_text_has_just_as_many_tokens(count: Count, tokens: int) -> None:
    async def asked(text: str) -> int:
        return count(text)

    costs = await measure_word_costs(asked)
    assert costs.is_exact
    maker = WordPromptFactory(costs)
    for name in ("a", "b"):
        assert count(maker.build_text(tokens, name)) == tokens


async def test_where_no_word_fits_a_text_is_up_to_a_word_shorter() -> None:
    async def asked(text: str) -> int:
        return dear(text)

    maker = WordPromptFactory(await measure_word_costs(asked))
    for tokens in range(20, 40):
        assert tokens - 1 <= dear(maker.build_text(tokens, "a")) <= tokens


async def test_a_word_that_costs_more_beside_others_is_left_out() -> None:
    async def moody(text: str) -> int:
        return plain(text) + ("the of" in text)

    costs = (await measure_word_costs(moody)).costs
    assert "of" not in costs
    assert "and" in costs


async def test_a_word_counts_as_a_token_without_a_tokenizer() -> None:
    async def nobody(_: str) -> None:
        return None

    costs = await measure_word_costs(nobody)
    assert not costs.is_exact
    assert plain(WordPromptFactory(costs).build_text(33, "a")) == 33


def test_texts_are_the_same_for_the_same_name_and_others_for_another() -> None:
    maker = WordPromptFactory(WordCosts())
    assert maker.build_text(50, "a") == maker.build_text(50, "a")
    assert maker.build_text(50, "a") != maker.build_text(50, "b")
    assert maker.build_text(80, "a").startswith(maker.build_text(50, "a"))


def test_a_prompt_that_has_no_room_for_a_word_has_one() -> None:
    assert plain(WordPromptFactory(WordCosts(overhead_tokens=9)).build_text(3, "a")) == 1
    assert len(set(WORDS)) == len(WORDS)


# ---------- prompts out of files as others write them
SHAREGPT = [
    {
        "id": "x",
        "conversations": [
            {"from": "human", "value": "What is KV?"},
            {"from": "gpt", "value": "A cache."},
            {"from": "human", "value": "Of what?"},
        ],
    },
    {"id": "y", "conversations": [{"from": "human", "value": "Alone"}]},
]


def user(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": text},)


def test_of_a_conversation_the_first_prompt_and_its_answer_are_taken() -> None:
    rows, skipped = read_rows(json.dumps(SHAREGPT), "s.json")
    assert skipped == 0
    assert [(row.messages, row.answer) for row in rows] == [
        (user("What is KV?"), "A cache."),
        (user("Alone"), None),
    ]
    assert rows[0].text == "What is KV?"


def test_lines_with_prompts_say_how_long_their_answers_shall_be() -> None:
    text = '\ufeff{"prompt": "a b", "output_tokens": 7}\n\n{"prompt": "c", "max_tokens": 2}\n'
    rows, _ = read_rows(text, "p.jsonl")
    assert [(row.text, row.output_tokens) for row in rows] == [("a b", 7), ("c", 2)]


@pytest.mark.parametrize("inside", ["\u2028", "\u2029", "\x85"])
def test_only_newlines_end_a_line(inside: str) -> None:
    prompts = [f"two{inside}lines", "one"]
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts]
    rows, skipped = read_rows("\r\n".join(lines), "p.jsonl")
    assert ([row.text for row in rows], skipped) == (prompts, 0)


def test_messages_keep_what_stands_before_the_first_prompt() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "So."},
    ]
    rows, _ = read_rows(json.dumps({"messages": messages}), "m.jsonl")
    assert [message["role"] for message in rows[0].messages] == ["system", "user"]
    assert rows[0].answer == "So."
    assert rows[0].text == "Be brief.\nWhy?"


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("{nonsense", "not JSON"),
        ("3", "got int, expected an object"),
        ('{"prompt": ""}', "no prompt, messages or conversations"),
        ('{"prompt": "a", "output_tokens": 0}', "output_tokens is 0"),
        ('{"conversations": [{"from": "gpt", "value": "hi"}]}', "it has no question"),
        ('{"messages": [{"role": "user", "content": 4}]}', "a message of 'user' without text"),
        ('{"messages": ["hi"]}', "not as expected"),
    ],
)
def test_a_bad_entry_is_named_or_left_out(entry: str, why: str) -> None:
    text = f'{{"prompt": "good"}}\n{entry}\n'
    with pytest.raises(TraceInvalid, match=why) as raised:
        read_rows(text, "d.jsonl")
    assert raised.value.line == 2
    rows, skipped = read_rows(text, "d.jsonl", ignore_invalid=True)
    assert ([row.text for row in rows], skipped) == (["good"], 1)


@pytest.mark.parametrize("text", ["", "[]", "\n\n"])
def test_a_file_without_prompts_is_refused(text: str) -> None:
    with pytest.raises(TraceInvalid, match="holds no prompts"):
        read_rows(text, "d.jsonl")


def test_a_broken_array_is_refused_also_where_bad_entries_are_left_out() -> None:
    with pytest.raises(TraceInvalid, match="not JSON"):
        read_rows('[{"prompt": "a"},', "d.json", ignore_invalid=True)


def test_an_order_depends_on_the_seed_alone() -> None:
    rows = [DatasetRow(user(str(number)), 1) for number in range(30)]  # type: ignore[arg-type]  # messages
    assert shuffled(rows, "1") == shuffled(rows, "1")
    assert shuffled(rows, "1") != shuffled(rows, "2")
    assert sorted(row.text for row in shuffled(rows, "1")) == sorted(row.text for row in rows)
