"""What fits where, against capacities that engines reported."""

from __future__ import annotations

import csv
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.errors import InsufficientMemory
from baton.perf.hardware.accelerators import Dtype
from baton.perf.hardware.catalogue import find_accelerator
from baton.perf.model.known_models import KNOWN_MODELS, find_shape
from baton.perf.model.layers import Part
from baton.perf.model.memory import (
    MemoryModel,
    ModelSplit,
    fit,
    smallest_sizing,
)
from baton.perf.model.shape import ModelShape
from baton.perf.model.weight_formats import uniform_weights

LLAMA_70B = find_shape("meta-llama/Llama-3.1-70B")
GIB = 2**30


def question(
    model: str, gpu: str = "H100", weights: Dtype = Dtype.BF16, **changes: float
) -> MemoryModel:
    asked = MemoryModel(
        shape=find_shape(model), accelerator=find_accelerator(gpu), weights_dtype=weights
    )
    return replace(asked, **changes)  # type: ignore[arg-type] # numbers of either kind


def opt_tokens(model: str, tp: int, pp: int) -> int:
    """As DistServe ran it: 95 % of an A100 of 80 GB, in 16 bits."""
    asked = question(model, "A100", Dtype.FP16, utilization=0.95)
    return replace(asked, kv_dtype=Dtype.FP16).fit(tp, pp).kv_tokens


# --------------------------------------------------------------------------- what engines said


@pytest.mark.parametrize(
    ("model", "tp", "pp", "tokens"),
    [
        ("facebook/opt-13b", 1, 1, 66_144),
        ("facebook/opt-13b", 2, 1, 163_008),
        ("facebook/opt-13b", 1, 2, 163_008),
        ("facebook/opt-66b", 4, 1, 78_496),
        ("facebook/opt-66b", 2, 2, 78_512),
        ("facebook/opt-66b", 8, 1, 212_304),
        ("facebook/opt-175b", 3, 3, 76_192),
        ("facebook/opt-175b", 8, 8, 992_400),
    ],
)
def test_kv_capacities_are_those_that_distserve_published(
    model: str, tp: int, pp: int, tokens: int
) -> None:
    assert opt_tokens(model, tp, pp) == pytest.approx(tokens, rel=0.02)


@pytest.mark.data
def test_all_of_distserves_capacities_are_met_within_two_percent_on_average() -> None:
    path = Path(os.environ["BATON_TRACES"]).parent / "perf" / "distserve" / "max_num_tokens.csv"
    if not path.is_file():
        pytest.skip(f"there is no {path}")
    with path.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    errors = [
        abs(
            opt_tokens(row["model"], int(row["tp"]), int(row["pp"])) / int(row["max_num_tokens"])
            - 1
        )
        for row in rows
    ]
    assert len(errors) == 76
    assert sum(errors) / len(errors) < 0.02
    assert max(errors) < 0.15


def test_an_8b_model_on_a_4090_has_the_room_that_vllm_reports() -> None:
    """41,408 tokens at a utilization of 0.9."""
    assert question("Llama-3.1-8B", "RTX 4090").fit(1, 1).kv_tokens == pytest.approx(
        41_408, rel=0.02
    )


def test_an_8b_model_on_an_h100_has_the_room_that_vllm_reports() -> None:
    """53.29 GiB, with weights of 14.96. Source: vllm-project/vllm pull request 10511."""
    found = question("Meta-Llama-3-8B").fit(1, 1)
    assert found.weights_bytes / GIB == pytest.approx(14.96, abs=0.01)
    assert found.kv_bytes / GIB == pytest.approx(53.29, rel=0.04)


@pytest.mark.parametrize(
    ("model", "weights", "gigabytes"),
    [
        ("meta-llama/Llama-3.1-405B", Dtype.BF16, 811.7),
        ("meta-llama/Llama-3.1-70B", Dtype.FP8, 72.7),
        ("meta-llama/Llama-3.1-70B", Dtype.INT4, 39.8),
        ("openai/gpt-oss-120b", Dtype.FP4, 65.3),
        ("deepseek-ai/DeepSeek-V3", Dtype.FP8, 673),
    ],
)
def test_weights_take_what_the_published_files_take(
    model: str, weights: Dtype, gigabytes: float
) -> None:
    """The sizes of the safetensors; embeddings and output are in 16 bits in all of them."""
    found = ModelSplit(shape=find_shape(model)).stage_weights_bytes(0, weights)
    assert found / 1e9 == pytest.approx(gigabytes, rel=0.04)


# --------------------------------------------------------------------------- splitting


def test_heads_that_are_fewer_than_the_devices_are_on_several_of_them() -> None:
    shares = [ModelSplit(shape=LLAMA_70B, tp=tp).kv_share for tp in (1, 2, 8, 16)]
    assert shares == [1, 1 / 2, 1 / 8, 1 / 8]


def test_latent_attention_is_on_every_device_whole() -> None:
    shape = find_shape("deepseek-ai/DeepSeek-V3")
    alone, together = ModelSplit(shape=shape), ModelSplit(shape=shape, tp=8)
    assert together.kv_share == 1
    assert together.stage_token_bytes(0, Dtype.BF16) == alone.stage_token_bytes(0, Dtype.BF16)
    down = shape.kv_projection_parameters
    rest = shape.attention_parameters - down
    assert together.attention_parameters == rest / 8 + down


@pytest.mark.parametrize(
    ("layers", "pp", "stages"),
    [
        (80, 1, (80,)),
        (80, 4, (20, 20, 20, 20)),
        (126, 4, (31, 32, 32, 31)),
        (61, 2, (31, 30)),
        (61, 8, (7, 7, 8, 8, 8, 8, 8, 7)),
    ],
)
def test_layers_left_over_go_to_the_stages_before_the_last(
    layers: int, pp: int, stages: tuple[int, ...]
) -> None:
    assert ModelSplit(shape=replace(LLAMA_70B, layers=layers), pp=pp).stage_layers() == stages


@given(st.sampled_from(list(KNOWN_MODELS.values())), st.integers(1, 12))
def test_no_layer_is_lost_or_held_twice_in_a_pipeline(shape: ModelShape, pp: int) -> None:
    split = ModelSplit(shape=shape, pp=pp)
    assert sum(split.stage_layers()) == shape.layers
    assert max(split.stage_layers()) - min(split.stage_layers()) <= 1
    stored = sum(split.stage_weights_bytes(stage, Dtype.BF16) for stage in range(pp))
    # Tied embeddings are in two places when the first and the last stage are.
    copied = shape.output_parameters if shape.tied_embeddings and pp > 1 else 0
    assert stored == pytest.approx(2 * (shape.parameters + copied), rel=1e-12)


@given(st.sampled_from(list(KNOWN_MODELS.values())), st.integers(1, 16))
def test_tensor_parallel_devices_hold_the_model_and_its_unsplit_parts(
    shape: ModelShape, tp: int
) -> None:
    split = ModelSplit(shape=shape, tp=tp)
    if not split.is_valid:
        return
    together = tp * split.stage_weights_bytes(0, Dtype.BF16)
    copies = 0.0
    for layer, count in shape.layer_counts().items():
        parts = shape.part_parameters(layer)
        whole = sum(parts[part] for part in (Part.ROUTER, Part.INDEXER, Part.EXPERT_LATENT))
        of_kv_heads = parts[Part.KEY_VALUE] * (tp * split.kv_share - 1)
        copies += count * (of_kv_heads + (tp - 1) * whole)
    assert together == pytest.approx(2 * (shape.parameters + copies), rel=1e-9)


@pytest.mark.parametrize(
    ("model", "tp", "pp", "possible"),
    [
        ("meta-llama/Llama-3.1-70B", 8, 1, True),
        ("meta-llama/Llama-3.1-70B", 16, 1, True),
        ("meta-llama/Llama-3.1-70B", 3, 1, False),
        ("meta-llama/Llama-3.1-70B", 1, 80, True),
        ("meta-llama/Llama-3.1-70B", 1, 81, False),
        ("facebook/opt-66b", 3, 1, True),
        ("facebook/opt-66b", 5, 1, False),
        ("Qwen/Qwen2.5-14B", 5, 1, False),
        ("deepseek-ai/DeepSeek-V3", 16, 2, True),
    ],
)
def test_heads_and_layers_decide_what_splits_are_possible(
    model: str,
    tp: int,
    pp: int,
    possible: bool,  # noqa: FBT001 - the expectation of a row
) -> None:
    assert ModelSplit(shape=find_shape(model), tp=tp, pp=pp).is_valid is possible


@pytest.mark.parametrize(("tp", "pp"), [(0, 1), (1, 0), (-2, 1)])
def test_a_split_into_nothing_is_refused(tp: int, pp: int) -> None:
    with pytest.raises(ValueError, match=f"got tp {tp}, pp {pp}"):
        ModelSplit(shape=LLAMA_70B, tp=tp, pp=pp)


# --------------------------------------------------------------------------- fitting


def test_the_terms_add_up_to_the_usable_memory() -> None:
    found = question("Llama-3.1-70B").fit(4, 1)
    terms = found.weights_bytes + found.activation_bytes + found.runtime_bytes + found.kv_bytes
    assert terms == pytest.approx(found.usable_bytes)
    assert found.usable_bytes == pytest.approx(0.9 * 79.04 * GIB, rel=1e-3)
    assert found.kv_tokens == int(found.kv_bytes / (327_680 / 4))
    assert found.kv_blocks(16) == found.kv_tokens // 16


def test_the_tightest_stage_decides_for_the_replica() -> None:
    """The middle stages of 126 layers over 4 have one more than the first and the last."""
    found = question("Llama-3.1-405B").fit(8, 4)
    layer = found.split.stage_token_bytes(1, Dtype.BF16) / 32
    rooms = []
    for stage, layers in enumerate(found.split.stage_layers()):
        weights = found.split.stage_weights_bytes(stage, Dtype.BF16)
        rooms.append((found.usable_bytes - weights) / (layers * layer))
    assert min(rooms) == rooms[1]
    assert found.kv_token_bytes == 32 * layer


@given(
    st.sampled_from(["Llama-3.1-8B", "Qwen3-30B-A3B", "gpt-oss-20b", "DeepSeek-V2-Lite"]),
    st.sampled_from([1, 2, 4]),
    st.floats(0.85, 0.95),
    st.integers(256, 16_384),
    st.integers(1, 512),
)
def test_more_of_anything_leaves_no_more_room(
    model: str, tp: int, utilization: float, tokens: int, requests: int
) -> None:
    def room(**changes: float) -> int:
        asked = question(
            model,
            utilization=utilization,
            max_batched_tokens=tokens,
            max_running_requests=requests,
        )
        changed = replace(asked, **changes)  # type: ignore[arg-type] # numbers of either kind
        return changed.fit(tp, 1).kv_tokens

    assert room() <= room(utilization=utilization + 0.05)
    assert room(max_batched_tokens=2 * tokens) <= room()
    assert room(max_running_requests=2 * requests) <= room()


def test_narrower_numbers_leave_more_room() -> None:
    asked = question("Llama-3.1-70B")
    plain = asked.fit(4, 1)
    narrow_weights = replace(asked, weights_dtype=Dtype.FP8).fit(4, 1)
    assert narrow_weights.weights_bytes < 0.52 * plain.weights_bytes
    narrow_kv = replace(asked, kv_dtype=Dtype.FP8).fit(4, 1)
    assert narrow_kv.kv_tokens == pytest.approx(2 * plain.kv_tokens, abs=1)


def test_sampling_for_many_requests_takes_memory_on_the_last_stage_only() -> None:
    few, many = (
        question("Llama-3.2-3B", max_batched_tokens=256, max_running_requests=requests).fit(1, 1)
        for requests in (1, 1024)
    )
    assert few.activation_bytes < many.activation_bytes == 1024 * 128_256 * 24


def test_only_the_last_stage_samples() -> None:
    asked = question("Llama-3.1-70B", max_batched_tokens=16, max_running_requests=1024)
    split = ModelSplit(shape=asked.shape, tp=2, pp=3)
    first, middle, last = (asked._at_stage(split, stage).activation_bytes for stage in range(3))
    assert first == middle == split.activation_bytes(16) < last == split.sampler_bytes(1024)


def test_a_step_is_widest_in_the_feed_forward_of_a_dense_model() -> None:
    """Hidden state and residual, then both halves of the gated feed-forward and their product."""
    dense, plain = (
        ModelSplit(shape=find_shape("Llama-3.1-8B")),
        ModelSplit(shape=find_shape("opt-13b"), tp=2),
    )
    assert dense.activation_bytes(10) == 10 * 2 * (2 * 4096 + 3 * 14_336)
    assert plain.activation_bytes(10) == 10 * 2 * (2 * 5120 + 2 * 20_480 / 2)


def test_a_step_is_widest_where_tokens_are_copied_to_their_experts() -> None:
    """Eight copies of the hidden state and eight times the width of an expert."""
    mixed = ModelSplit(shape=find_shape("Qwen3-30B-A3B"))
    assert mixed.activation_bytes(10) == 10 * 2 * (2 * 2048 + 8 * (2048 + 768))


def test_a_dense_layer_among_experts_can_be_the_widest() -> None:
    """Llama 4 Maverick: one expert of 8,192, but 16,384 in the layers between."""
    shape = find_shape("Llama-4-Maverick-17B-128E")
    assert ModelSplit(shape=shape).activation_bytes(10) == 10 * 2 * (2 * 5120 + 3 * 16_384)
    scout = find_shape("Llama-4-Scout-17B-16E")
    assert ModelSplit(shape=scout).activation_bytes(10) == 10 * 2 * (2 * 5120 + 3 * 8192)


def test_attention_can_be_the_widest() -> None:
    """With one KV head for each of two devices: queries and their output, keys and values."""
    shape = replace(find_shape("Qwen3-32B"), ffn_width=1024, kv_heads=2)
    found = ModelSplit(shape=shape, tp=4).activation_bytes(10)
    assert found == 10 * 2 * (2 * 5120 + 2 * 64 * 128 / 4 + 2 * 128)


def test_one_call_is_the_same_as_asking() -> None:
    asked = question("Llama-3.1-70B", utilization=0.8, max_batched_tokens=2048)
    asked = replace(asked, weights_dtype=Dtype.FP8, kv_dtype=Dtype.FP8, max_running_requests=64)
    found = fit(
        asked.shape,
        asked.accelerator,
        tp=2,
        pp=2,
        weights=Dtype.FP8,
        kv=Dtype.FP8,
        utilization=0.8,
        max_batched_tokens=2048,
        max_running_requests=64,
    )
    assert found == asked.fit(2, 2)


@pytest.mark.parametrize("utilization", [0.0, -1.0, 1.01])
def test_a_utilization_that_is_none_is_refused(utilization: float) -> None:
    with pytest.raises(ValueError, match="utilization"):
        question("Llama-3.1-8B", utilization=utilization)


# --------------------------------------------------------------------------- not fitting


def refusal(asked: MemoryModel, tp: int = 1, pp: int = 1) -> InsufficientMemory:
    with pytest.raises(InsufficientMemory) as caught:
        asked.fit(tp, pp)
    return caught.value


def test_weights_that_do_not_fit_are_named_with_their_excess() -> None:
    error = refusal(question("Llama-3.1-405B"), tp=8)
    assert error.term == "weights"
    assert error.excess_bytes / 1e9 == pytest.approx(811.7 / 8 - 0.9 * 0.988 * 85.9, abs=0.1)
    assert error.min_parallelism == (8, 2)
    assert "tp 8, pp 1 does not fit h100_sxm" in error.reason
    assert error.remedy == "the smallest that fits is tp 8, pp 2"


def test_activations_that_do_not_fit_are_named() -> None:
    error = refusal(question("Llama-3.1-8B", "RTX 4090", max_batched_tokens=1_000_000))
    assert error.term == "activations"


def test_a_kv_cache_that_does_not_fit_is_named_with_the_tokens_it_is_to_hold() -> None:
    asked = question("Llama-3.1-8B", "RTX 4090", min_kv_tokens=50_000)
    error = refusal(asked)
    assert error.term == "KV cache of 50000 tokens"
    missing_tokens = 50_000 - replace(asked, min_kv_tokens=1).fit(1, 1).kv_tokens
    assert error.excess_bytes == pytest.approx(missing_tokens * 131_072, abs=131_072)
    assert error.min_parallelism == (2, 1)


def test_the_excess_is_the_missing_memory() -> None:
    """With that much more memory it would just have fitted."""
    asked = question("Llama-3.1-70B", "H100")
    error = refusal(asked)
    more = asked.accelerator.memory_bytes + error.excess_bytes / 0.9 / 0.988
    larger = replace(asked, accelerator=replace(asked.accelerator, memory_bytes=more + 1))
    assert refusal(larger).term == "activations"


def test_the_smallest_shape_fits_and_nothing_smaller_does() -> None:
    for model, gpu in (("Llama-3.1-405B", "H100"), ("opt-66b", "A100"), ("DeepSeek-R1", "H200")):
        asked = question(model, gpu, min_kv_tokens=10_000)
        error = refusal(asked)
        assert error.min_parallelism is not None
        tp, pp = error.min_parallelism
        assert asked.fit(tp, pp).kv_tokens >= 10_000
        if pp == 1:
            smaller = [ModelSplit(shape=asked.shape, tp=index) for index in range(1, tp)]
            for split in smaller:
                assert not split.is_valid or refusal(asked, tp=split.tp).term
        else:
            assert tp == asked.accelerator.devices_per_node
            assert refusal(asked, tp=tp, pp=pp - 1).min_parallelism == (tp, pp)


def test_heads_that_cannot_be_split_are_refused_with_a_split_that_can() -> None:
    error = refusal(question("Llama-3.1-70B"), tp=3)
    assert (error.term, error.excess_bytes, error.min_parallelism) == (
        "heads and layers",
        0.0,
        (2, 1),
    )
    assert "64 heads (8 of keys and values) and 80 layers" in error.reason


def test_a_model_that_no_number_of_devices_holds_is_refused_without_a_shape() -> None:
    error = refusal(question("Llama-3.1-405B", "L4", max_batched_tokens=10**7))
    assert error.min_parallelism is None
    assert "narrower weights or larger devices" in error.remedy


# --------------------------------------------------------------------------- how many


def test_all_splits_within_a_node_come_first_and_pipelines_are_of_whole_nodes() -> None:
    fits = list(question("Llama-3.1-70B").fits(32))
    splits = [(found.split.tp, found.split.pp) for found in fits]
    assert splits == [(2, 1), (4, 1), (8, 1), (8, 2), (8, 3), (8, 4)]
    every = {(f.split.tp, f.split.pp) for f in question("Llama-3.1-70B").fits(8, whole_nodes=False)}
    assert every >= {(2, 1), (1, 2), (1, 3), (2, 4), (4, 2), (8, 1)}
    ordered = [f.split for f in question("Llama-3.1-8B").fits(4, whole_nodes=False)]
    assert [(split.tp, split.pp) for split in ordered] == [
        *[(1, 1), (2, 1), (1, 2), (1, 3), (4, 1), (2, 2), (1, 4)],
    ]
    assert every.isdisjoint({(1, 1), (8, 2), (3, 1)})


def devices(asked: MemoryModel, requests: int, context_tokens: int) -> int:
    sizing = smallest_sizing(asked.fits(64), requests=requests, context_tokens=context_tokens)
    assert sizing is not None
    each = sizing.fit.concurrent_requests(context_tokens)
    assert sizing.replicas * int(each) >= requests
    return sizing.devices


def test_grouped_heads_save_most_of_the_devices() -> None:
    """100 requests of 4,096 tokens: 134 GB of KV cache, or 1,074 GB, besides weights of 141."""
    grouped = question("Llama-3.1-70B")
    ungrouped = replace(grouped, shape=replace(LLAMA_70B, kv_heads=64))
    assert devices(grouped, 100, 4096) == 4
    assert devices(ungrouped, 100, 4096) == 24
    assert devices(grouped, 1, 131_072) == 4
    assert devices(ungrouped, 1, 131_072) == 8


def test_no_replica_that_holds_less_than_one_request_is_counted() -> None:
    asked = question("Llama-3.1-8B", "RTX 4090")
    assert smallest_sizing(asked.fits(1), requests=1, context_tokens=131_072) is None
    assert smallest_sizing([], requests=1, context_tokens=1) is None


def test_requests_at_once_are_those_whose_kv_fits() -> None:
    plain = question("Llama-3.1-8B").fit(1, 1)
    assert plain.concurrent_requests(1000) == pytest.approx(plain.kv_tokens / 1000)
    windowed = question("openai/gpt-oss-120b", weights=Dtype.FP4).fit(1, 1)
    held = windowed.concurrent_requests(100_000)
    assert held * windowed.split.shape.kv_bytes(100_000, Dtype.BF16) == pytest.approx(
        windowed.kv_tokens * 73_728
    )
    assert held > 1.9 * windowed.kv_tokens / 100_000


# --------------------------------------------------------------------------- shared experts


def expert_bytes(asked: MemoryModel) -> float:
    """Of all routed experts of a model with FP8 weights."""
    parameters = sum(
        count * asked.shape.part_parameters(layer).get(Part.EXPERTS, 0)
        for layer, count in asked.shape.layer_counts().items()
    )
    return parameters * uniform_weights(Dtype.FP8).bytes_by_part[Part.EXPERTS]


@pytest.mark.parametrize("ep", [False, True])
def test_each_rank_has_all_weights_but_its_share_of_the_experts(*, ep: bool) -> None:
    asked = question("deepseek-ai/DeepSeek-V3", "H200", Dtype.FP8)
    whole = ModelSplit(shape=asked.shape).stage_weights_bytes(0, Dtype.FP8)
    rank = ModelSplit(shape=asked.shape, dp=8, ep=ep).stage_weights_bytes(0, Dtype.FP8)
    assert rank == pytest.approx(whole - expert_bytes(asked) * 7 / 8)


def test_where_experts_do_not_divide_a_device_has_one_more() -> None:
    shape = find_shape("deepseek-ai/DeepSeek-V3")  # 256 experts
    on_64, on_72, on_86 = (
        ModelSplit(shape=shape, dp=dp, ep=True).stage_weights_bytes(0, Dtype.FP8)
        for dp in (64, 72, 86)
    )
    assert on_64 == pytest.approx(on_72)
    assert on_86 < on_72


def test_ranks_keep_keys_and_values_of_their_own_requests() -> None:
    group = question("deepseek-ai/DeepSeek-V3", "H200", Dtype.FP8).fit(1, 1, 16, ep=True)
    assert group.kv_tokens == 16 * group.rank_kv_tokens
    assert group.rank_kv_tokens == int(group.kv_bytes / group.kv_token_bytes)


def test_a_device_has_room_for_the_gathered_tokens_of_all_ranks() -> None:
    shape = find_shape("deepseek-ai/DeepSeek-V3")
    one, eight = (ModelSplit(shape=shape, dp=dp, ep=True).activation_bytes(1000) for dp in (1, 8))
    hidden = 2 * 1000 * 2 * shape.hidden
    assert eight - hidden == pytest.approx(8 * (one - hidden))


@pytest.mark.parametrize(("dp", "ep"), [(2, False), (1, True), (2, True)])
def test_a_model_without_experts_has_none_to_share(dp: int, *, ep: bool) -> None:
    with pytest.raises(InsufficientMemory, match="there are no experts to share"):
        question("Llama-3.1-8B").fit(1, 1, dp, ep=ep)


def test_devices_without_an_expert_are_refused() -> None:
    with pytest.raises(InsufficientMemory, match="8 experts and 32 layers cannot be split as"):
        question("Mixtral-8x7B").fit(2, 1, 8, ep=True)
