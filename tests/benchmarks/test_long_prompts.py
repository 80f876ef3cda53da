"""What the benchmark of long prompts sends, and what it makes of what it sees."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from benchmarks.rivals.long_prompts import FOLLOW_UP, compared, follow_ups, new_prompts


def test_a_follow_up_is_all_that_was_said_before_and_two_messages_more() -> None:
    prompts = list(follow_ups(Random(0)))
    assert not prompts[0][0], "the first one is nobody's follow-up"
    for (_, before), (counts, said) in pairwise(prompts):
        if counts:
            assert said[: len(before)] == before
            assert len(said) == len(before) + 2
    assert len(said) % 2 == 1, "the user speaks last"


def test_new_prompts_are_400_kb_and_begin_differently() -> None:
    prompts = [said for _, said in new_prompts(Random(0))]
    assert {len(text) for (text,) in prompts} == {400_000}
    assert len({text[:10] for (text,) in prompts}) == len(prompts)


def test_overhead_is_batons_time_less_the_others_in_the_same_repeat() -> None:
    def run(ttft_ms: float, cpu_ms: float) -> dict[str, dict[str, float]]:
        seen = {"ttft_p50_ms": ttft_ms, "cpu_ms": cpu_ms, "prompt_tokens": 9.0}
        return {FOLLOW_UP: seen}

    runs = {"bare": [run(10, 5), run(20, 6)], "baton_local": [run(7, 2), run(25, 3)]}
    told = compared(runs, FOLLOW_UP)
    assert told["added_ttft_ms"] == [-3, 5]
    assert told["cpu_ms_per_request"] == [2, 3]
    assert told["bare_cpu_ms_per_request"] == [5, 6]
