"""The smaller budget of steps that streams wait for, around vLLM's scheduler."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import pytest

from baton.engine.vllm.patches import table
from baton.engine.vllm.patches.step_budget import (
    find_incompatibility,
    is_streaming,
    limits_problem,
    scheduler_problem,
    with_decode_budget,
)

pytest.importorskip("vllm")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch and vLLM deprecate each other's parts on import
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


@dataclass
class Leg:
    max_tokens: int = 9
    is_prefill_chunk: bool = False


@dataclass
class Choosing:
    """A scheduler that tells what budget it found."""

    running: list[Leg] = field(default_factory=list)
    max_num_scheduled_tokens: int = 100

    def schedule(self, *, fails: bool = False) -> int:
        if fails:
            raise KeyError("a defect")
        return self.max_num_scheduled_tokens


def test_a_step_has_the_smaller_budget_while_a_stream_decodes() -> None:
    schedule = with_decode_budget(Choosing.schedule, 10)
    assert schedule(Choosing()) == 100
    assert schedule(Choosing([Leg(is_prefill_chunk=True), Leg(max_tokens=1)])) == 100
    assert schedule(Choosing([Leg(is_prefill_chunk=True), Leg()])) == 10


def test_the_smaller_budget_is_never_the_larger_one() -> None:
    assert with_decode_budget(Choosing.schedule, 200)(Choosing([Leg()])) == 100


def test_the_whole_budget_is_back_after_a_step_also_after_one_that_failed() -> None:
    schedule, scheduler = with_decode_budget(Choosing.schedule, 10), Choosing([Leg()])
    schedule(scheduler)
    assert scheduler.max_num_scheduled_tokens == 100
    with pytest.raises(KeyError):
        schedule(scheduler, fails=True)
    assert scheduler.max_num_scheduled_tokens == 100


def test_prefills_and_single_token_legs_are_not_streaming() -> None:
    assert is_streaming(Leg())
    assert not is_streaming(Leg(is_prefill_chunk=True))
    assert not is_streaming(Leg(max_tokens=1))


def test_the_installed_vllm_can_have_two_budgets_and_gets_them_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert find_incompatibility(Scheduler, Request) is None
    monkeypatch.setattr(Scheduler, "schedule", Scheduler.schedule)
    own = Scheduler.schedule
    assert table.STEP_BUDGET.install(64)
    replaced = Scheduler.schedule
    assert replaced is not own
    assert table.STEP_BUDGET.install(64)
    assert Scheduler.schedule is replaced


class Elsewhere:
    """Has a budget, and asks another than the attribute for it."""

    def __init__(self) -> None:
        self.running: list[Leg] = []
        self.max_num_scheduled_tokens = 100

    def schedule(self) -> int:
        return 100 - len(self.running)


class Renamed:
    """Chooses its steps in a method of another name."""

    __init__ = Elsewhere.__init__


def test_a_scheduler_that_has_its_budget_from_elsewhere_is_refused() -> None:
    assert find_incompatibility(Elsewhere, Request) == (
        "Elsewhere.schedule does not use max_num_scheduled_tokens"
    )
    assert find_incompatibility(Renamed, Request) == "Renamed has no schedule"
    assert find_incompatibility(Scheduler, Choosing) == (
        "Choosing.__init__ does not use max_tokens, is_prefill_chunk"
    )


@dataclass
class Limits:
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0


def test_a_budget_has_room_for_a_step_of_every_stream_and_is_not_the_larger_one() -> None:
    assert limits_problem(32, Limits()) is None
    assert limits_problem(512, Limits()) is None
    assert limits_problem(32, Limits(), tokens_per_stream=4) == (
        "max_num_batched_tokens_while_decoding is 32, expected at least 128, 4 for each of"
        " max_num_seqs=32 streams:"
        " raise it or lower max_num_seqs"
    )
    assert limits_problem(513, Limits()) == (
        "max_num_batched_tokens_while_decoding is 513, expected at most max_num_batched_tokens,"
        " 512: lower it or raise"
        " that"
    )


def test_prompts_that_may_not_be_cut_or_leave_a_step_unfilled_are_not_beside_two_budgets() -> None:
    # The former would wait for the last stream; behind the latter streams would get nothing.
    assert limits_problem(64, Limits(enable_chunked_prefill=False)) == (
        "max_num_batched_tokens_while_decoding is 64, and enable_chunked_prefill is false:"
        " remove one of them from"
        " the engine"
    )
    assert limits_problem(64, Limits(long_prefill_token_threshold=256)) == (
        "max_num_batched_tokens_while_decoding is 64, and long_prefill_token_threshold 256:"
        " remove one of them"
    )


def test_an_engine_whose_scheduler_would_not_keep_to_it_is_refused_before_it_starts() -> None:
    def own(_scheduler: object) -> None:
        """Chooses in a way of its own."""

    assert scheduler_problem(64, type("Derived", (Scheduler,), {})) is None
    assert scheduler_problem(64, type("Own", (Scheduler,), {"schedule": own})) == (
        "max_num_batched_tokens_while_decoding=64 cannot be kept with this vLLM: Own chooses"
        " steps in its own way;"
        " remove it from the engine, or install the vLLM that this release names"
    )
