"""The transfer benchmark: its arithmetic, who takes part, and one real transfer."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.transfer.nixl_progress import PROGRESS_DELAY_VARIABLE
from baton.transfer.peers import UCX_SETTINGS, transport_environment
from benchmarks import transfer
from benchmarks._transfer_contenders import (
    MIB,
    SIZES_MIB,
    SWEEPS,
    Contender,
    contenders,
    engine_environment_variables,
    make_block_pull,
    make_contiguous_pull,
    sweep,
)
from benchmarks._transfer_metrics import (
    Seconds,
    gbps,
    medians_by_size,
    speed_ratio,
    summarize,
    worst_median,
)
from benchmarks._transfer_pair import AgentOptions, Copy, Pull, TransferPair

NAMES = ("memcpy", "bare", "baton", "calm", "bare_blocks", "bare_tcp", "baton_tcp")


def seconds(**by_name: float) -> Seconds:
    """Three transfers of each size; the second is disturbed."""
    return {
        name: {size: [size * value, size * value * 9, size * value] for size in (1, 16, 64)}
        for name, value in by_name.items()
    }


def test_a_gigabyte_per_second_has_nine_zeros() -> None:
    assert gbps(1000, 1.048576) == pytest.approx(1.0)


def test_a_ratio_above_one_means_that_ours_was_faster() -> None:
    found = speed_ratio(seconds(baton=0.5, bare=1.0), "baton", "bare")
    assert {size: spread.median for size, spread in found.items()} == {1: 2.0, 16: 2.0, 64: 2.0}


def test_a_disturbance_of_both_does_not_show_in_the_ratio() -> None:
    spread = speed_ratio(seconds(baton=0.5, bare=1.0), "baton", "bare")[16]
    assert spread.min == spread.max == 2.0


def test_the_worst_size_is_quoted_but_not_the_small_ones() -> None:
    measured = seconds(baton=1.0, bare=1.0)
    measured["baton"][64] = [80.0] * 3
    measured["baton"][1] = [1000.0] * 3
    assert worst_median(speed_ratio(measured, "baton", "bare")) == pytest.approx(0.8)


def test_the_summary_has_what_is_quoted() -> None:
    measured = seconds(**dict.fromkeys(NAMES, 1.0)) | {"baton": seconds(baton=0.5)["baton"]}
    found = summarize(measured)
    assert found["ratio_to_bare_nixl"] == found["ratio_to_memcpy"] == 2.0
    assert found["ratio_to_bare_nixl_tcp"] == 1.0
    by_size = found["gbps_by_size"]
    assert isinstance(by_size, dict)
    assert by_size["16"]["baton"] == pytest.approx(2 * MIB / 1e9)


def test_a_stack_that_skipped_a_size_is_not_in_its_row() -> None:
    measured = {"bare": {16: [1.0], 256: [1.0]}, "bare_tcp": {16: [1.0]}}
    assert set(medians_by_size(measured)["256"]) == {"bare"}


def test_baton_takes_part_with_the_settings_of_its_engines(tmp_path: Path) -> None:
    field = {contender.name: contender for contender in contenders(transport_environment(tmp_path))}
    assert tuple(field) == NAMES
    baton = field["baton"].agents
    assert engine_environment_variables().items() <= baton.environment.items()
    assert UCX_SETTINGS.items() <= baton.environment.items()
    assert transport_environment(tmp_path).items() <= baton.environment.items()
    assert (baton.threads, baton.telemetry) == (4, True)
    assert not field["bare"].agents.environment


@pytest.mark.parametrize("size_mib", SIZES_MIB)
def test_every_transport_moves_as_many_bytes(size_mib: int, tmp_path: Path) -> None:
    size_bytes = size_mib * MIB
    for contender in contenders(transport_environment(tmp_path)):
        assert contender.make_operation(size_bytes).size_bytes == size_bytes


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_sets_others_against_what_engines_are_given(name: str) -> None:
    chosen, *others = sweep(name)
    assert chosen.name == "chosen"
    assert engine_environment_variables().items() <= chosen.agents.environment.items()
    assert len({other.name for other in others}) == len(others) > 1


def test_a_pair_moves_blocks_to_their_places_after_a_pause() -> None:
    pytest.importorskip("nixl")
    agents = AgentOptions(environment={PROGRESS_DELAY_VARIABLE: "1000"})
    with TransferPair(agents, MIB) as pair:
        pair.pause()
        pair.resume()
        for order in (
            make_block_pull(MIB, piece_bytes=65536),
            make_contiguous_pull(MIB),
            Copy(size_bytes=MIB),
        ):
            assert pair.run(order) > 0


def test_a_pull_beyond_the_memory_is_an_error_and_not_a_figure() -> None:
    pytest.importorskip("nixl")
    agents = AgentOptions(environment={PROGRESS_DELAY_VARIABLE: "1000"})
    beyond = Pull(pieces=2, piece_bytes=MIB, scattered=False, hot_polling=False)
    with TransferPair(agents, MIB) as pair, pytest.raises((RuntimeError, EOFError)):
        pair.run(beyond)


def test_all_sizes_of_the_benchmark_are_measured_by_the_repeats_that_were_asked_for() -> None:
    pytest.importorskip("nixl")
    agents = AgentOptions(environment={PROGRESS_DELAY_VARIABLE: "1000"})
    field = [
        Contender(name="a", agents=agents, make_operation=make_contiguous_pull),
        Contender(name="b", agents=agents, make_operation=make_contiguous_pull, max_mib=1),
    ]
    measured = transfer.measure(field, (1, 2), repeats=2)
    assert {name: {s: len(t) for s, t in by.items()} for name, by in measured.items()} == {
        "a": {1: 4, 2: 4},
        "b": {1: 4},
    }
