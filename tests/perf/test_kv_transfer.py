"""Seconds of a transfer, and what of them a prefill hides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.perf.catalogue import accelerator
from baton.perf.hardware import Dtype
from baton.perf.known_models import shape_of
from baton.perf.kv_transfer import KvTransfer, Link, link_between

LLAMA_70B = KvTransfer(shape=shape_of("Llama-3.1-70B"), kv=Dtype.FP16)


def between(model: str, *, source: tuple[int, int], target: tuple[int, int]) -> KvTransfer:
    return KvTransfer(
        shape=shape_of(model),
        kv=Dtype.BF16,
        source_tp=source[0],
        source_pp=source[1],
        target_tp=target[0],
        target_pp=target[1],
    )


def test_4000_tokens_of_a_70b_model_take_26_ms_at_50_gigabytes_a_second() -> None:
    assert LLAMA_70B.device_bytes(4000) / 1e9 == pytest.approx(1.31, abs=0.005)
    assert LLAMA_70B.seconds(4000, Link(bytes_per_s=50e9)) == pytest.approx(0.0262, abs=5e-5)


@pytest.mark.parametrize(("gigabytes_per_s", "ms"), [(25, 158), (50, 79), (100, 39)])
def test_a_long_prompt_takes_what_the_field_computes(gigabytes_per_s: float, ms: float) -> None:
    """12,035 tokens are 3.94 GB."""
    link = Link(bytes_per_s=gigabytes_per_s * 1e9)
    assert LLAMA_70B.seconds(12_035, link) * 1e3 == pytest.approx(ms, abs=0.5)


def test_devices_send_side_by_side() -> None:
    link = Link(bytes_per_s=50e9)
    one = between("Llama-3.1-70B", source=(1, 1), target=(1, 1)).seconds(1000, link)
    four = between("Llama-3.1-70B", source=(4, 1), target=(4, 1)).seconds(1000, link)
    staged = between("Llama-3.1-70B", source=(2, 2), target=(2, 2)).seconds(1000, link)
    assert four == staged == pytest.approx(one / 4)


def test_the_end_with_fewer_devices_decides() -> None:
    narrow = between("Llama-3.1-70B", source=(2, 1), target=(2, 1)).device_bytes(1000)
    for source, target in (((2, 1), (8, 1)), ((8, 1), (2, 1))):
        assert between("Llama-3.1-70B", source=source, target=target).device_bytes(1000) == narrow


def test_what_every_device_needs_whole_is_sent_to_each() -> None:
    """Latent attention is not split, nor are 8 heads among 16 devices."""
    alone = between("DeepSeek-V3", source=(1, 1), target=(1, 1)).device_bytes(1000)
    assert between("DeepSeek-V3", source=(8, 1), target=(8, 1)).device_bytes(1000) == alone
    eight = between("Llama-3.1-70B", source=(8, 1), target=(8, 1)).device_bytes(1000)
    assert between("Llama-3.1-70B", source=(16, 1), target=(16, 1)).device_bytes(1000) == eight


def test_a_link_costs_its_setup_and_nothing_when_there_is_nothing_to_send() -> None:
    link = Link(bytes_per_s=1e9, setup_s=0.25)
    assert link.seconds(5e8) == 0.75
    assert LLAMA_70B.seconds(0, link) == 0.0


def test_the_slower_end_and_the_distance_decide_about_a_link() -> None:
    h100, a100 = accelerator("H100"), accelerator("A100")
    assert link_between(h100, a100, same_node=False).bytes_per_s == pytest.approx(0.87 * 25e9)
    assert link_between(a100, h100, same_node=True).bytes_per_s == 300e9
    assert link_between(h100, h100, same_node=False).setup_s > 0


@pytest.mark.parametrize(("bytes_per_s", "setup_s"), [(0.0, 0.0), (-1.0, 0.0), (1.0, -1.0)])
def test_a_senseless_link_is_refused(bytes_per_s: float, setup_s: float) -> None:
    with pytest.raises(ValueError, match="link: got"):
        Link(bytes_per_s=bytes_per_s, setup_s=setup_s)


def test_a_long_prefill_hides_all_but_the_last_layer() -> None:
    link = Link(bytes_per_s=50e9)
    transfer_s = LLAMA_70B.seconds(12_035, link)
    hidden = LLAMA_70B.exposed_s(12_035, link, prefill_s=0.288)
    assert hidden == pytest.approx(transfer_s / 80)


def test_a_slow_link_shows_what_the_prefill_does_not_hide() -> None:
    link = Link(bytes_per_s=12.5e9)
    transfer_s = LLAMA_70B.seconds(12_035, link)
    shown = LLAMA_70B.exposed_s(12_035, link, prefill_s=0.288)
    assert shown == pytest.approx(transfer_s - 0.288 * 79 / 80 + transfer_s / 80)


@given(st.integers(1, 100_000), st.floats(0, 100), st.floats(1e6, 1e12))
def test_no_more_is_exposed_than_there_is_and_never_less_than_one_layer(
    tokens: int, prefill_s: float, bytes_per_s: float
) -> None:
    link = Link(bytes_per_s=bytes_per_s)
    transfer_s = LLAMA_70B.seconds(tokens, link)
    exposed_s = LLAMA_70B.exposed_s(tokens, link, prefill_s=prefill_s)
    assert transfer_s / 80 <= exposed_s * (1 + 1e-12)
    assert exposed_s <= transfer_s
    assert LLAMA_70B.exposed_s(tokens, link, prefill_s=0.0) == transfer_s
