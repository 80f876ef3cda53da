"""A plan as a configuration: it loads, and the simulator takes from it what was planned."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from baton.config import LoadedConfig, load_config
from baton.config.simulation.to_scenario import to_scenario
from baton.config.write.render_plan import ray_accelerator_name, render_plan
from baton.domain.errors import OperatorError
from baton.domain.fleet import Role
from baton.perf.hardware.accelerators import Dtype
from baton.perf.hardware.catalogue import find_accelerator
from baton.perf.model.known_models import find_shape
from baton.planner.problem import AcceleratorOffer, PlanningProblem, SloClass
from baton.planner.rates.closed_form import MeanRequest
from baton.planner.rates.measure import RateSearchResult
from baton.planner.result import Candidate, Plan
from baton.planner.shapes.fleets import FleetKind, PlannedFleet, PlannedPool
from baton.planner.shapes.space import Split, build_engine_shape
from baton.policy.placement.port import Disaggregate
from baton.simulator.outcome import Objectives
from baton.simulator.workloads.presets import synthetic

MODEL = "meta-llama/Llama-3.1-70B"
QUESTION = PlanningProblem(
    model=find_shape(MODEL),
    offers=(AcceleratorOffer(accelerator=find_accelerator("H100")),),
    traffic=synthetic("conv", rate_per_s=5, duration_s=20),
    classes=(SloClass(objectives=Objectives(ttft_s=0.75, tpot_s=0.03)),),
    gpus=16,
    weights_dtype=Dtype.FP8,
)


SAME = (
    "kv_blocks",
    "kv_block_bytes",
    "block_size_tokens",
    "max_running_requests",
    "max_batched_tokens",
    "pipeline_stages",
    "transfer_bytes_per_s",
)


def planned(kind: FleetKind, question: PlanningProblem = QUESTION) -> tuple[Plan, Candidate]:
    offer = question.offers[0]
    first = build_engine_shape(question, offer, Split(2, 1), chunk_tokens=8192)
    second = build_engine_shape(question, offer, Split(4, 1), chunk_tokens=1024)
    pools: tuple[PlannedPool, ...] = (
        PlannedPool(role=Role.PREFILL, engine_shape=first, replicas=4),
        PlannedPool(role=Role.DECODE, engine_shape=second, replicas=2),
    )
    if kind is FleetKind.COLOCATED:
        pools = (PlannedPool(role=Role.MIXED, engine_shape=second, replicas=3),)
    fleet = PlannedFleet(kind=kind, pools=pools)
    chosen = Candidate(
        fleet=fleet,
        simulated_fleet=fleet,
        scale_factor=1.0,
        estimate_per_s=20.0,
        search_result=RateSearchResult(rate_per_s=21.0, trials=()),
    )
    mix = MeanRequest(prompt_tokens=1155, output_tokens=211)
    return Plan(question=question, mix=mix, best=chosen, meets_rate=True, verdict=""), chosen


def loaded(text: str, folder: Path) -> LoadedConfig:
    (folder / "plan.yaml").write_text(text)
    return load_config([folder / "plan.yaml"])


@pytest.mark.parametrize(
    ("kind", "split"),
    [
        (FleetKind.COLOCATED, Disaggregate.NEVER),
        (FleetKind.DISAGGREGATED, Disaggregate.ALWAYS),
        (FleetKind.HYBRID, Disaggregate.AUTO),
    ],
)
def test_a_rendered_plan_loads_as_planned(
    kind: FleetKind, split: Disaggregate, tmp_path: Path
) -> None:
    plan, chosen = planned(kind)
    config = loaded(render_plan(plan, chosen, source=MODEL, stored_dtype=None), tmp_path).config

    assert config.router.disaggregate is split
    assert (config.slo.default.ttft_s, config.slo.default.tpot_s) == (0.75, 0.03)
    assert list(config.pools) == [str(pool.role) for pool in chosen.fleet.pools]
    for pool in chosen.fleet.pools:
        got = config.pools[str(pool.role)]
        assert got.role is pool.role
        assert got.replicas.initial == got.replicas.max == pool.replicas
        assert (got.parallel.tp, got.parallel.pp) == (pool.engine_shape.tp, pool.engine_shape.pp)
        assert got.resources.gpus == pool.engine_shape.gpus
        assert got.resources.accelerator == "H100"
        assert got.engine.max_num_batched_tokens == pool.engine_shape.chunk_tokens
        assert got.engine.max_num_seqs == QUESTION.space.max_running_requests


def of_experts(split: Split) -> tuple[Plan, Candidate]:
    """A plan of one replica of gpt-oss-120b that is divided so."""
    question = replace(QUESTION, model=find_shape("openai/gpt-oss-120b"), weights_dtype=Dtype.FP4)
    shape = build_engine_shape(question, question.offers[0], split, chunk_tokens=2048)
    pool = PlannedPool(role=Role.MIXED, engine_shape=shape, replicas=1)
    plan, chosen = planned(FleetKind.COLOCATED)
    fleet = replace(chosen.fleet, pools=(pool,))
    return replace(plan, question=question), replace(chosen, fleet=fleet)


def test_whole_experts_on_each_gpu_are_written(tmp_path: Path) -> None:
    plan, chosen = of_experts(Split(4, 1, ep=True))
    text = render_plan(plan, chosen, source="openai/gpt-oss-120b", stored_dtype=Dtype.FP4)
    parallel = loaded(text, tmp_path).config.pools["mixed"].parallel
    assert (parallel.tp, parallel.dp, parallel.ep) == (4, 1, True)


def test_a_group_of_ranks_is_not_written_for_no_deployment_starts_it() -> None:
    plan, chosen = of_experts(Split(1, 1, 8, ep=True))
    with pytest.raises(
        OperatorError, match=r"vllm serve --data-parallel-size 8 --enable-expert-parallel'"
    ):
        render_plan(plan, chosen, source="openai/gpt-oss-120b", stored_dtype=Dtype.FP4)


def test_the_deployment_has_the_objectives_that_the_plan_was_made_for(tmp_path: Path) -> None:
    classes = (
        SloClass(objectives=Objectives(ttft_s=0.75, tpot_s=0.03), attainment=0.95),
        SloClass(name="batch", objectives=Objectives(ttft_s=10), attainment=0.8),
        SloClass(name="whenever", objectives=Objectives()),
    )
    plan, chosen = planned(FleetKind.HYBRID, replace(QUESTION, classes=classes))
    slo = loaded(render_plan(plan, chosen, source=MODEL, stored_dtype=None), tmp_path).config.slo

    default, batch = slo.default, slo.classes["batch"]
    assert (default.ttft_s, default.tpot_s, default.attainment) == (0.75, 0.03, 0.95)
    assert (batch.ttft_s, batch.tpot_s, batch.attainment) == (10, None, 0.8)
    assert slo.classes["whenever"].ttft_s is None  # who asks for it is let in all the same


def test_a_plan_without_objectives_sets_none(tmp_path: Path) -> None:
    classes = (SloClass(objectives=Objectives()),)
    plan, chosen = planned(FleetKind.COLOCATED, replace(QUESTION, classes=classes))
    text = render_plan(plan, chosen, source=MODEL, stored_dtype=None)

    assert "slo:" not in text
    assert loaded(text, tmp_path).config.slo.default.ttft_s is None


@pytest.mark.parametrize("kind", list(FleetKind))
@pytest.mark.parametrize("kv", [Dtype.BF16, Dtype.FP8])
def test_the_simulator_takes_the_planned_engines_from_it(
    kind: FleetKind, kv: Dtype, tmp_path: Path
) -> None:
    plan, chosen = planned(kind, replace(QUESTION, kv_dtype=kv))
    config = loaded(render_plan(plan, chosen, source=MODEL, stored_dtype=None), tmp_path).config
    taken = {pool.name: pool.settings for pool in to_scenario(config).scenario.pools}

    for pool in chosen.fleet.pools:
        got, wanted = taken[str(pool.role)], pool.engine_shape.settings
        for field in SAME:
            assert getattr(got, field) == getattr(wanted, field), field


def test_weights_that_are_stored_so_are_not_quantized_again(tmp_path: Path) -> None:
    plan, chosen = planned(FleetKind.HYBRID)
    stored = loaded(
        render_plan(plan, chosen, source=MODEL, stored_dtype=Dtype.FP8), tmp_path
    ).config
    wide = loaded(render_plan(plan, chosen, source=MODEL, stored_dtype=None), tmp_path).config

    assert not stored.pools["decode"].engine.extra
    assert wide.pools["decode"].engine.extra == {"quantization": "fp8"}


@pytest.mark.parametrize(
    ("weights", "stored"),
    [
        (Dtype.INT4, Dtype.BF16),
        (Dtype.INT4, None),
        (Dtype.INT8, Dtype.FP16),
        (Dtype.FP4, Dtype.FP8),
        (Dtype.FP8, Dtype.INT4),
        (Dtype.BF16, Dtype.FP8),
    ],
)
def test_weights_that_vllm_cannot_make_of_those_stored_are_refused(
    weights: Dtype, stored: Dtype | None
) -> None:
    plan, chosen = planned(FleetKind.HYBRID, replace(QUESTION, weights_dtype=weights))
    with pytest.raises(OperatorError, match=f"name a model whose weights are stored as {weights}"):
        render_plan(plan, chosen, source=MODEL, stored_dtype=stored)


@pytest.mark.parametrize(
    ("weights", "stored"),
    [(Dtype.INT4, Dtype.INT4), (Dtype.FP16, Dtype.BF16), (Dtype.FP8, Dtype.FP16)],
)
def test_weights_that_are_stored_so_or_made_so_are_written(
    weights: Dtype, stored: Dtype, tmp_path: Path
) -> None:
    plan, chosen = planned(FleetKind.HYBRID, replace(QUESTION, weights_dtype=weights))
    config = loaded(render_plan(plan, chosen, source=MODEL, stored_dtype=stored), tmp_path).config
    assert list(config.pools) == ["prefill", "decode"]


@pytest.mark.parametrize("kv", [Dtype.INT8, Dtype.FP32])
def test_a_kv_cache_that_no_configuration_asks_for_is_refused(kv: Dtype) -> None:
    plan, chosen = planned(FleetKind.HYBRID, replace(QUESTION, kv_dtype=kv))
    with pytest.raises(OperatorError, match="plan with --kv-dtype bf16 or fp8"):
        render_plan(plan, chosen, source=MODEL, stored_dtype=None)


def test_a_model_given_by_its_config_json_is_written_as_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps({"model_type": "llama"}))
    plan, chosen = planned(FleetKind.HYBRID)
    config = loaded(
        render_plan(plan, chosen, source="config.json", stored_dtype=None), tmp_path
    ).config

    assert config.models[config.model_name].source == str(tmp_path)


def test_a_model_given_by_a_file_that_no_folder_is_read_by_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "llama.json"
    file.write_text("{}")
    plan, chosen = planned(FleetKind.HYBRID)
    with pytest.raises(OperatorError, match=r"call the file config\.json"):
        render_plan(plan, chosen, source=str(file), stored_dtype=None)


@pytest.mark.parametrize("name", ["default", "Chat", "two words"])
def test_a_class_that_no_configuration_may_call_so_is_refused(name: str) -> None:
    named = SloClass(name=name, objectives=Objectives(ttft_s=1))
    question = replace(QUESTION, classes=(*QUESTION.classes, named))
    plan, chosen = planned(FleetKind.HYBRID, question)
    with pytest.raises(OperatorError, match=f"a class called '{name}' cannot be written"):
        render_plan(plan, chosen, source=MODEL, stored_dtype=None)


def test_it_is_said_where_rays_name_is_also_that_of_another_accelerator() -> None:
    said = {}
    for gpu in ("a100_40gb", "A100"):
        small = replace(
            QUESTION,
            offers=(AcceleratorOffer(accelerator=find_accelerator(gpu)),),
            model=find_shape("meta-llama/Llama-3.1-8B"),
        )
        plan, chosen = planned(FleetKind.HYBRID, small)
        said[gpu] = render_plan(plan, chosen, source=MODEL, stored_dtype=None)

    assert said["a100_40gb"].count("# Planned for a100_40gb, which Ray calls A100") == 1
    assert "takes it for a100_sxm" in said["a100_40gb"]
    assert "# Planned for" not in said["A100"]


def test_a_fleet_on_processors_asks_for_no_gpus(tmp_path: Path) -> None:
    cpu = AcceleratorOffer(accelerator=find_accelerator("cpu"))
    small = replace(
        QUESTION,
        offers=(cpu,),
        weights_dtype=Dtype.BF16,
        model=find_shape("meta-llama/Llama-3.2-1B"),
    )
    plan, chosen = planned(FleetKind.COLOCATED, small)
    config = loaded(render_plan(plan, chosen, source="tiny", stored_dtype=None), tmp_path).config

    assert config.pools["mixed"].resources.gpus == 0
    assert config.pools["mixed"].resources.accelerator is None


@pytest.mark.parametrize(
    ("name", "wanted"), [("H100", "H100"), ("a100_40gb", "A100"), ("L40S", "L40S"), ("cpu", None)]
)
def test_accelerators_are_named_as_ray_does(name: str, wanted: str | None) -> None:
    assert ray_accelerator_name(find_accelerator(name)) == wanted
