"""`baton plan`: what is refused, what is printed, and how it exits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import Result

from baton.bench.report.write import render_page
from baton.cli.model.planning import study_of
from baton.cli.model.planning_text import PlanResult, plan_lines
from baton.planner.result import (
    Bottleneck,
    Constraint,
    Plan,
    Quantization,
    Speculation,
    SpeculationPoint,
)
from baton.planner.shapes.fleets import FleetKind
from tests.cli.invoked import run_baton
from tests.planner.test_answers import ASKED, MIX, candidate

MODEL = "meta-llama/Llama-3.1-70B"
CONV = ("--workload", "conv", "--gpus", "8", "--processes", "1")


def run(*arguments: str) -> Result:
    return run_baton("plan", *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpus", "8", "--ttft", "1s"), "one of --trace and --workload"),
        (("--workload", "conv", "--ttft", "1s"), "give --rate or --users, --gpus, or both"),
        (("--workload", "conv", "--ttft", "1s", "--rate", "0"), "got 0, expected more than 0"),
        ((*CONV, "--ttft", "1s", "--rate", "inf"), "got inf, expected more than 0"),
        (
            (*CONV, "--ttft", "1s", "--users", "0", "--think-time", "1s"),
            "greater than or equal to 1",
        ),
        ((*CONV, "--ttft", "1s", "--users", "9"), "needs the time from an answer"),
        ((*CONV, "--ttft", "1s", "--think-time", "9s"), "is of users: give --users, too"),
        ((*CONV, "--ttft", "1s", "--users", "9", "--think-time", "9"), "expected a duration"),
        ((*CONV, "--ttft", "1s", "--users", "9", "--think-time", "-1s"), "expected a duration"),
        ((*CONV, "--ttft", "1s", "--users", "9", "--think-time", "999y"), "expected"),
        (
            (*CONV, "--ttft", "1s", "--users", "9", "--think-time", "9s", "--rate", "4"),
            "give one of --rate and --users",
        ),
        *(
            ((*CONV, "--ttft", "1s", "--speculate", text), "expected an acceptance rate")
            for text in ("", "0.7", "0.7:3:0.1:2", "70:3", "0:3", "1:3", "0.7:0", "0.7:x", "0.7:3:")
        ),
        (CONV, "give --ttft, --tpot, or both"),
        ((*CONV, "--ttft", "500"), "expected a duration"),
        ((*CONV, "--ttft", "1s", "--tp", "two"), "expected numbers as 1,2,4"),
        ((*CONV, "--ttft", "1s", "--price", "1", "--price", "2"), "one for each --gpu"),
        ((*CONV, "--ttft", "1s", "--price", "0"), "got 0, expected more than 0"),
        ((*CONV, *("--class", "a:ttft=1s") * 2), "got 'a' twice"),
        ((*CONV, "--ttft", "1s", "--class", "batch"), "expected a name and its objectives"),
        ((*CONV, "--ttft", "1s", "--class", "batch:tft=1s"), "expected a name and its objectives"),
        ((*CONV, "--ttft", "1s", "--class", "b:attainment=90"), "expected between 0 and 1"),
    ],
)
def test_a_question_that_is_none_is_refused(arguments: tuple[str, ...], said: str) -> None:
    result = run(MODEL, "--gpu", "H100", *arguments)

    assert result.exit_code == 2
    assert said in " ".join(result.stderr.replace("│", " ").split())


def test_an_unwritable_path_is_refused_before_planning(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    result = run(
        *(MODEL, "--gpu", "H100", *CONV, "--ttft", "1s"),
        *("--class", "Chat:ttft=2s", "--write", str(file)),
    )

    assert (result.exit_code, result.stdout) == (1, "")
    assert "a class called 'Chat' cannot be written" in result.stderr
    assert not file.exists()


@pytest.mark.parametrize(
    ("model", "gpu", "said"),
    [
        (MODEL, "H1000", "there is no accelerator 'H1000'"),
        ("nobody/Knows-1B", "H100", "the shape of 'nobody/Knows-1B' is not known"),
        ("meta-llama/Llama-3.1-405B", "L4", "weights"),
    ],
)
def test_an_unmodelled_setting_is_reported_with_a_remedy(model: str, gpu: str, said: str) -> None:
    result = run(model, "--gpu", gpu, *CONV, "--ttft", "1s")

    assert result.exit_code == 1
    assert said in result.stderr
    assert "next: " in result.stderr


def test_an_objective_out_of_reach_is_told_from_the_bound_and_by_how_much() -> None:
    result = run(MODEL, "--gpu", "H100", *CONV, "--tpot", "2ms")

    assert result.exit_code == 1
    assert "is physically out of reach" in result.stdout
    assert "2.6 times as long" in result.stdout


def test_json_says_the_same_in_plain_values() -> None:
    result = run(MODEL, "--gpu", "H100", *CONV, "--tpot", "2ms", "-o", "json")
    told = json.loads(result.stdout)

    assert told["answer"] is None
    assert told["enough"] is False
    (bound,) = told["out_of_reach"]
    assert bound["is_physical"]
    assert bound["factor"] == pytest.approx(bound["physical_s"] / 0.002)
    assert any(item["label"] == "h100_sxm tp1" for item in told["left_out"])


def test_a_trace_with_a_bad_line_is_refused_with_its_place(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,few,109\n"
    )
    result = run(MODEL, "--gpu", "H100", "--trace", str(trace), "--ttft", "1s")

    assert result.exit_code == 1
    assert f"{trace}, line 3" in result.stderr


@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize("given", [(), ("--rate", "5")])
def test_a_trace_that_says_nothing_of_a_rate_is_refused(
    tmp_path: Path, requests: int, given: tuple[str, ...]
) -> None:
    trace = tmp_path / "t.csv"
    line = "2023-11-16 18:15:46.6805900,374,44\n"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + line * requests)
    result = run(MODEL, "--gpu", "H100", "--trace", str(trace), "--ttft", "1s", *given)

    assert result.exit_code == 1
    assert f"{trace}: all its requests, {requests}, arrive at one time" in result.stderr
    assert "next: name a trace" in result.stderr


@pytest.mark.parametrize(
    "load", [("--users", "9", "--think-time", "5s"), ("--gpus", "8"), ("--rate", "3")]
)
def test_lengths_alone_are_traffic_where_a_load_is_given(
    tmp_path: Path, load: tuple[str, ...]
) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("num_prefill_tokens,num_decode_tokens\n" + "100,5\n" * 300)
    question = (MODEL, "--gpu", "H100", "--trace", str(lengths), "--tpot", "2ms")
    result = run(*question, *load)

    assert "is physically out of reach" in result.stdout  # so that it was read
    assert "give --rate" in run(*question).stderr


def test_where_no_configuration_can_be_written_nothing_is_planned(tmp_path: Path) -> None:
    out = tmp_path / "none" / "plan.yaml"
    result = run(MODEL, "--gpu", "H100", *CONV, "--ttft", "1s", "--write", str(out))

    assert result.exit_code == 1
    assert f"a configuration cannot be written to '{out}': no folder" in result.stderr
    assert not result.stdout


def test_a_plan_is_printed_written_and_loads_again(tmp_path: Path) -> None:
    out = tmp_path / "plan.yaml"
    result = run(
        *("meta-llama/Llama-3.1-8B", "--gpu", "H100", "--gpus", "1", "--workload", "conv"),
        *("--ttft", "1s", "--tpot", "40ms", "--quick", "--processes", "1", "--tp", "1"),
        *("--speculate", "0.7:3", "--quantizations", "-o", "json", "--write", str(out)),
    )
    told = json.loads(result.stdout)

    assert result.exit_code == 0
    assert told["gpus"] == 1
    assert told["rate_per_s"] > 0
    assert told["verdict"] == "do not disaggregate: there is no room for two pools"
    assert told["candidates"][0]["at_that_rate"]["attainment"] >= 0.9
    assert told["speculation"]["expected_tokens"] == pytest.approx(2.533)
    assert told["speculation"]["draft_cost"] == pytest.approx(1 / 32)
    assert told["speculation"]["points"][0]["gain"] > 1.1
    weights = [item["weights"] for item in told["quantizations"]]
    assert weights == ["bf16", "fp8", "fp8", "fp4"]
    best = told["quantizations"][2]["best"]
    assert best["rate_per_s"] > told["rate_per_s"]
    assert "predicted by a fit without it" in told["error_bands"]["h100_sxm"]["source"]
    validated = run_baton("config", "validate", "-c", out)
    assert validated.exit_code == 0


# -------------------------------------------------------------------- texts of plans


def made_plan(*rates: tuple[FleetKind, float], asked_per_s: float | None = None) -> Plan:
    """Of fleets with these rates, of which the first is taken."""
    candidates = tuple(candidate(kind, rate) for kind, rate in rates)
    return Plan(
        question=replace(ASKED, rate_per_s=asked_per_s, gpus=8),
        mix=MIX,
        best=candidates[0],
        meets_rate=True,
        verdict="take the first",
        candidates=candidates,
        bottleneck=Bottleneck(constraint=Constraint.NETWORK, reason="it is full"),
    )


def lines_of(made: Plan) -> Iterator[str]:
    return plan_lines(PlanResult(plan=made, stored_dtype=None))


def test_the_answer_and_its_reasons_come_before_tables_and_the_question() -> None:
    lines = list(lines_of(made_plan((FleetKind.COLOCATED, 10.0), (FleetKind.HYBRID, 9.0))))

    assert lines[0] == "answer (simulated): take the first"
    assert lines[1].startswith("  take 1 x mixed")
    places = [
        next(number for number, line in enumerate(lines) if line.startswith(start))
        for start in ("  what binds: network: it is full", "fleets (", "model: ")
    ]
    assert places == sorted(places)


def test_a_page_has_the_answer_first_then_its_reasons_then_tables() -> None:
    made = made_plan((FleetKind.COLOCATED, 10.0), (FleetKind.HYBRID, 9.0))
    page = render_page(
        study_of(PlanResult(plan=made, stored_dtype=None), command="baton plan plain")
    )

    parts = ("<h1>", "take the first", "take 1 x mixed", "it is full", "<dl>", "Fleets (S)")
    places = [page.index(part) for part in parts]
    assert places == sorted(places)
    assert "a fifth off" not in page  # a quick plan has no such rows, and no empty section


def heading(*rates: tuple[FleetKind, float], asked_per_s: float | None = None) -> str:
    """Of the fleets, of which the first is taken."""
    made = made_plan(*rates, asked_per_s=asked_per_s)
    (found,) = (line for line in lines_of(made) if line.startswith("fleets (simulated; best first"))
    return found


def test_where_the_first_fleet_does_not_carry_most_the_reason_is_said() -> None:
    most, less = (FleetKind.DISAGGREGATED, 10.3), (FleetKind.COLOCATED, 10.0)
    assert heading(most, less) == "fleets (simulated; best first):"
    assert heading(less, most).endswith("of those within 15%, the simplest to run):")
    assert heading(less, most, asked_per_s=9.0).endswith("the cheapest that is enough):")


def test_quantizations_and_speculation_are_tables_with_their_labels() -> None:
    made = made_plan((FleetKind.COLOCATED, 10.0))
    cheaper = replace(made, candidates=(candidate(FleetKind.COLOCATED, 15.0),))
    cheaper = replace(cheaper, best=cheaper.candidates[0])
    result = PlanResult(
        plan=made,
        stored_dtype=None,
        speculation=Speculation(
            acceptance=0.7,
            drafted=3,
            draft_cost=0.1,
            expected_tokens=2.53,
            pool="mixed plain tp1",
            points=(SpeculationPoint(streams=1, step_s=0.01, gain=2.0),),
            at_load=SpeculationPoint(streams=99, step_s=0.02, gain=0.5),
            break_even_streams=40,
            best_drafted=0,
        ),
        quantizations=(
            Quantization(weights="fp8", kv="bf16", plan=cheaper),
            Quantization(weights="fp4", kv="fp8", plan=None, reason="it does not fit"),
        ),
    )
    text = "\n".join(plan_lines(result))

    assert "with other types of weights and KV cache (simulated, rates within" in text
    assert "x1.50" in text
    assert "none: it does not fit" in text
    assert "speculative decoding (simulated, in closed form" in text
    assert "2.00 times as slow with 99 streams on a replica (mixed plain tp1)" in text
    assert "from 40 streams on a replica it is no gain" in text
    assert "no number of drafted tokens is a gain" in text
    assert "Speculative decoding (S)" in render_page(study_of(result, command="baton plan"))


# -------------------------------------------------------------------- groups of ranks


def with_groups(made: Plan) -> Plan:
    """The same fleet, but each replica is a group of eight ranks."""
    best = made.best
    assert best is not None
    pools = tuple(
        replace(pool, engine_shape=replace(pool.engine_shape, tp=1, dp=8, ep=True))
        for pool in best.fleet.pools
    )
    return replace(made, best=replace(best, fleet=replace(best.fleet, pools=pools)))


def test_a_better_group_is_named_with_its_arguments_and_that_it_is_not_started() -> None:
    asked = made_plan((FleetKind.COLOCATED, 1.0), asked_per_s=5.0)
    groups = with_groups(made_plan((FleetKind.COLOCATED, 9.0), asked_per_s=5.0))
    lines = "\n".join(plan_lines(PlanResult(plan=asked, stored_dtype=None, groups=groups)))
    assert "better, but 'baton up' starts no data-parallel group" in lines
    assert "vllm serve --data-parallel-size 8 --enable-expert-parallel" in lines


def test_groups_that_are_no_better_are_not_recommended() -> None:
    asked = made_plan((FleetKind.COLOCATED, 9.0))
    groups = with_groups(made_plan((FleetKind.COLOCATED, 9.0)))
    lines = "\n".join(plan_lines(PlanResult(plan=asked, stored_dtype=None, groups=groups)))
    assert "no fleet with data-parallel groups" in lines
    assert "vllm serve" not in lines
