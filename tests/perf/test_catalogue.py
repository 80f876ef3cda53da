"""Accelerators by name, and what their figures have to agree on."""

from __future__ import annotations

import pytest

from baton.domain.errors import UnknownAccelerator
from baton.perf.hardware.accelerators import DTYPE_BYTES, Accelerator, Dtype
from baton.perf.hardware.catalogue import CATALOGUE, find_accelerator

ALL = pytest.mark.parametrize("one", CATALOGUE.values(), ids=list(CATALOGUE))


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("H100", "h100_sxm"),
        ("h100-sxm", "h100_sxm"),
        ("h100-80gb", "h100_sxm"),
        ("NVIDIA H100 80GB HBM3", "h100_sxm"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("a100", "a100_sxm"),
        ("a100-80gb", "a100_sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100_sxm"),
        ("NVIDIA A100-SXM4-40GB", "a100_40gb"),
        ("A800", "a800_sxm"),
        ("H800", "h800_sxm"),
        ("H200", "h200_sxm"),
        ("b200_sxm", "b200_sxm"),
        ("B300", "b300_sxm"),
        ("GB200", "gb200"),
        ("NVIDIA L40S", "l40s"),
        ("l4", "l4"),
        ("RTXPRO6000", "rtx_pro_6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx_pro_6000"),
        ("NVIDIA GeForce RTX 4090", "rtx_4090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("MI325X", "mi325x"),
        ("mi355x", "mi355x"),
        ("rtx_pro_6000_server", "rtx_pro_6000"),
        ("NVIDIA GeForce RTX 5090", "rtx_5090"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("gb200_sxm", "gb200"),
        ("GB300", "gb300"),
        ("cpu", "cpu"),
    ],
)
def test_an_accelerator_is_found_as_people_and_drivers_call_it(said: str, name: str) -> None:
    assert find_accelerator(said) is CATALOGUE[name]


def test_an_unknown_accelerator_is_answered_with_near_names() -> None:
    with pytest.raises(UnknownAccelerator) as caught:
        find_accelerator("H2000")
    assert "'H2000'" in caught.value.why
    assert "h200_sxm" in caught.value.remedy


def test_an_accelerator_like_none_is_answered_with_all_names() -> None:
    with pytest.raises(UnknownAccelerator) as caught:
        find_accelerator("???")
    assert all(name in caught.value.remedy for name in CATALOGUE)


@ALL
def test_each_accelerator_says_where_its_figures_come_from(one: Accelerator) -> None:
    assert one.source


@ALL
def test_the_figures_of_an_accelerator_are_of_one_order(one: Accelerator) -> None:
    """A slip in a power of ten would leave these ranges."""
    assert 20e9 < one.memory_bytes < 320e9
    assert 0.2e12 < one.memory_bytes_per_s < 10e12
    assert 100e12 <= one.flops_of(Dtype.BF16) < 3e15
    assert 1e9 < one.network_bytes_per_s <= 100e9
    assert one.network_bytes_per_s <= one.peer_bytes_per_s <= 900e9
    assert 20e9 < one.host_bytes_per_s <= 450e9
    assert one.price_per_hour is None or 0.3 < one.price_per_hour < 20


@ALL
def test_narrower_floating_point_is_never_slower(one: Accelerator) -> None:
    types = (Dtype.FP32, Dtype.BF16, Dtype.FP8, Dtype.FP4)
    speeds = [one.flops_of(dtype) for dtype in types]
    assert speeds == sorted(speeds)


def test_a_type_without_arithmetic_of_its_own_runs_as_the_next_wider_one() -> None:
    a100, h100 = find_accelerator("A100"), find_accelerator("H100")
    assert a100.flops_of(Dtype.FP8) == a100.flops_of(Dtype.FP16) == 312e12
    assert a100.flops_of(Dtype.INT8) == 624e12
    assert h100.flops_of(Dtype.FP4) == h100.flops_of(Dtype.FP8) == 1979e12
    assert h100.flops_of(Dtype.INT4) == h100.flops_of(Dtype.BF16)


def test_a_type_that_nothing_wider_stands_for_is_refused() -> None:
    bare = Accelerator(
        name="bare",
        memory_bytes=1.0,
        memory_bytes_per_s=1.0,
        flops_by_dtype={Dtype.BF16: 1.0},
        peer_bytes_per_s=1.0,
        network_bytes_per_s=1.0,
    )
    with pytest.raises(ValueError, match=r"bare.*fp32"):
        bare.flops_of(Dtype.FP32)


def test_the_figures_that_published_work_is_built_on_are_those() -> None:
    h100, h200, a100 = find_accelerator("H100"), find_accelerator("H200"), find_accelerator("A100")
    assert (h100.memory_bytes_per_s, h200.memory_bytes_per_s) == (3.35e12, 4.8e12)
    assert a100.memory_bytes_per_s == 2.039e12
    assert h100.flops_by_dtype == h200.flops_by_dtype
    assert (h100.memory_bytes, h200.memory_bytes) == (80 * 2**30, 141 * 2**30)
    assert find_accelerator("H800").peer_bytes_per_s < h100.peer_bytes_per_s


def test_every_type_has_a_size() -> None:
    assert set(DTYPE_BYTES) == set(Dtype)
