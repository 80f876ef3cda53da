"""`baton simulate`: what it runs, what it says, and what it refuses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from baton.cli.model.simulation import SimulateArgs, run_study
from baton.cli.traces import RequestArgs
from tests.cli.invoked import run_baton
from tests.repo.project import code_blocks

ROOT = Path(__file__).parents[2]
SIM = str(ROOT / "configs" / "sim.yaml")
GPU = str(ROOT / "configs" / "gpu-example.yaml")
SMALL = ("--workload", "conv", "--rate", "4", "--requests", "12")
NO_SLO = ("--set", "slo.default.ttft=null", "--set", "slo.default.tpot=null")
LINE = '{{"timestamp": {at}, "input_length": 600, "output_length": 5, "hash_ids": [{first}, 7]}}\n'


def simulate(*arguments: str, config: str = SIM) -> Result:
    return run_baton("simulate", "-c", config, *arguments)


def report_of(*arguments: str, config: str = SIM) -> dict[str, Any]:
    result = simulate(*arguments, "-o", "json", config=config)
    assert result.exit_code == 0, result.stderr
    (line,) = result.stdout.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Twenty requests, four a second, of which every one shares its first block with another."""
    file = tmp_path / "trace.jsonl"
    file.write_text(
        "".join(LINE.format(at=number * 250, first=number // 2) for number in range(20))
    )
    return file


# ------------------------------------------------------------------ errors of times

ROWS = (
    "backend,model_path,system,gemm_quant_mode,mode,isl,osl,tp_size,pp_size,concurrency,"
    "silicon_ttft_ms,silicon_tpot_ms\n"
    "vllm,meta-llama/Llama-3.1-8B-Instruct,h100_sxm,bf16,agg,1024,16,1,1,2,60,{tpot}\n"
)


def test_times_have_an_error_or_none_is_known() -> None:
    report = report_of(*SMALL, config=GPU)
    (bands,) = report["error_bands"].values()
    assert bands["tpot"]["low"] == -bands["tpot"]["high"] < 0
    said = report["provenance"]["error of times, h100_sxm"]
    assert "predicted by a fit without it" in said
    engines_as_configured = report_of(*SMALL)
    assert engines_as_configured["error_bands"] == {}


def test_a_calibration_changes_the_times_and_brings_their_error(tmp_path: Path) -> None:
    slow = tmp_path / "slow.csv"
    slow.write_text(ROWS.format(tpot=14))
    plain = report_of(*SMALL, config=GPU)
    report = report_of(*SMALL, "--calibration", str(slow), config=GPU)
    assert report["results"][0]["tpot"]["p50"] > 1.1 * plain["results"][0]["tpot"]["p50"]
    bands = report["error_bands"]["h100_sxm"]
    assert bands["tpot"]["low"] <= bands["tpot"]["high"]
    assert "(slow.csv, 1)" in bands["source"]
    assert any("fitted on measured rows (slow.csv)" in note for note in report["notes"])
    assert not any("not measured" in note for note in report["notes"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ROWS.format(tpot=9).replace("\nvllm", "\nsglang"), "none of vLLM can be used: they are"),
        (ROWS.format(tpot=9).replace(",60,", ",9000,"), "of 9.0 s is a queue's"),
        ("a,b\n1,2\n", "rows.csv"),
    ],
)
def test_a_calibration_without_rows_of_vllm_is_refused(
    tmp_path: Path, text: str, said: str
) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text(text)
    result = simulate(*SMALL, "--calibration", str(rows), config=GPU)
    assert result.exit_code == 1
    assert said in result.stderr


# ------------------------------------------------------------------ what is run


def test_a_trace_is_served_and_every_request_is_evaluated(trace: Path) -> None:
    report = report_of("--trace", str(trace), "--ttft", "2s", "--tpot", "50ms")
    (run,) = report["results"]
    assert (run["name"], run["requests"], run["failed"]) == ("predicted", 20, 0)
    assert run["rate_per_s"] == pytest.approx(4.0)
    assert run["attainment"] == 1.0
    assert run["cached_fraction"] > 0.3
    assert report["objectives"] == {"ttft_s": 2.0, "tpot_s": 0.05, "e2e_s": None, "target": 0.9}
    assert report["device"] == "engine"


def test_the_same_command_gives_the_same_figures_and_another_seed_others() -> None:
    first, again, other = (report_of(*SMALL, "--seed", seed) for seed in ("1", "1", "2"))
    assert first == again
    assert first["results"] != other["results"]


def test_engines_of_vllm_are_modelled_without_a_gpu() -> None:
    report = report_of(*SMALL, "--compare", "disaggregate=never", config=GPU)
    mixed, alone = report["results"]
    assert report["device"] == "GPU"
    assert (mixed["devices"], mixed["failed"]) == (5, 0)
    assert alone["name"] == "disaggregate=never"
    assert alone["counts"]["handoffs"] == 0
    assert 0.001 < mixed["tpot"]["p50"] < 0.05
    assert "h100" in report["provenance"]["pool decode"].lower()
    assert any("data sheets" in note for note in report["notes"])


def test_a_plain_policy_is_compared_even_if_the_configuration_leaves_splitting_open() -> None:
    report = report_of(*SMALL, "--compare", "policy=round-robin", config=GPU)
    assert [item["name"] for item in report["results"]] == ["predicted", "policy=round-robin"]
    assert report["provenance"]["with policy=round-robin"].count("disaggregate always") == 1
    assert report["results"][1]["counts"]["handoffs"] == 12


def test_policies_from_outside_the_package_are_compared() -> None:
    placement, scaling = "benchmarks.policies.llmd:LlmdScorers", "benchmarks.policies.hpa:Hpa"
    report = report_of(*SMALL, "--autoscaler", scaling, "--compare", f"policy={placement}")
    first, second = report["results"]
    assert (first["name"], second["name"]) == (f"autoscaler={scaling}", f"policy={placement}")
    assert first["failed"] == second["failed"] == 0


def test_colocated_means_that_every_replica_does_both() -> None:
    report = report_of(*SMALL, "--compare", "colocated")
    split, colocated = report["results"]
    assert split["counts"]["handoffs"] == split["requests"]
    assert colocated["counts"]["handoffs"] == 0
    assert colocated["name"] == "colocated"
    placement = report["provenance"]["with colocated"]
    assert placement.endswith("disaggregate never; roles: prefill mixed, decode mixed")


def test_several_rates_make_a_curve_and_a_capacity(trace: Path) -> None:
    arguments = ("--trace", str(trace), "--ttft", "2s", "--scale", "2", "--scale", "4")
    report = report_of(*arguments)
    (curve,) = report["attainment_by_rate"]
    rates = [rate for rate, _ in curve["rate_per_device_and_attainment"]]
    assert rates == pytest.approx([0.5, 1.0], rel=0.5)
    assert rates == sorted(rates)
    assert curve["capacity_per_device"] == rates[-1]


def test_a_trace_is_brought_to_a_rate_and_lengths_alone_arrive_at_it(
    trace: Path, tmp_path: Path
) -> None:
    recorded = report_of("--trace", str(trace), "--rate", "8")
    assert recorded["results"][0]["requests"] == 40
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("num_prefill_tokens,num_decode_tokens\n" + "100,5\n" * 30)
    assert "give a rate" in simulate("--trace", str(lengths)).stderr
    arriving = report_of("--trace", str(lengths), "--rate", "8")
    assert arriving["results"][0]["requests"] == 30
    assert arriving["results"][0]["rate_per_s"] == pytest.approx(8, rel=0.5)


def test_only_the_first_requests_and_seconds_are_served(trace: Path) -> None:
    assert report_of("--trace", str(trace), "--requests", "5")["results"][0]["requests"] == 5
    assert report_of("--trace", str(trace), "--duration", "1s")["results"][0]["requests"] == 4


def test_the_first_part_of_a_trace_counts_from_its_first_arrival(tmp_path: Path) -> None:
    file = tmp_path / "piece.jsonl"
    line = '{{"at_s": {at}, "input_length": 60, "output_length": 3}}\n'
    file.write_text("".join(line.format(at=3600 + number) for number in range(20)))
    assert report_of("--trace", str(file), "--duration", "5s")["results"][0]["requests"] == 5


def test_seconds_in_a_field_of_milliseconds_are_read_as_seconds_and_the_report_says_so(
    tmp_path: Path,
) -> None:
    file = tmp_path / "seconds.jsonl"
    file.write_text("".join(LINE.format(at=number / 2, first=number) for number in range(20)))
    report = report_of("--trace", str(file))
    assert report["results"][0]["rate_per_s"] == pytest.approx(2.0)
    assert report["provenance"]["arrival times"] == (
        "seconds: in milliseconds, as this format has them, they would be 2e+03 requests/s"
    )
    named = simulate("--trace", str(file), "--time-unit", "ms")
    assert "arrival times: milliseconds: as --time-unit says" in named.stdout
    assert simulate(*SMALL, "--time-unit", "ms").exit_code == 2
    assert "us" in simulate("--trace", str(file), "--time-unit", "minutes").stderr


@pytest.mark.parametrize("limit", [("--requests", "30"), ("--duration", "30s")])
@pytest.mark.parametrize("rate", [(), ("--rate", "2"), ("--scale", "1", "--scale", "3")])
def test_of_a_long_series_of_rates_only_the_part_that_is_asked_for_is_made(
    tmp_path: Path, limit: tuple[str, str], rate: tuple[str, ...]
) -> None:
    file = tmp_path / "fortnight.csv"
    rows = "".join(f"{600 * number},20,1,100,5\n" for number in range(2016))
    file.write_text("t_s,req_per_s,active_clients,mean_input_tokens,mean_output_tokens\n" + rows)
    for run in report_of("--trace", str(file), *limit, *rate)["results"]:
        assert 10 < run["requests"] < 800


@pytest.mark.parametrize("limit", [("--requests", "40"), ("--duration", "20s")])
@pytest.mark.parametrize("workload", ["conv", "chat", "shifting"])
def test_users_wait_for_answers_and_think(workload: str, limit: tuple[str, str]) -> None:
    users = ("--users", "8", "--think-time", "2s", "--workload", workload)
    report = report_of(*users, *limit, "--compare", "policy=random,disaggregate=always")
    said = report["provenance"]["users"]
    assert said.startswith("8 users, who think for 2 s in the mean (exponential), send ")
    for run in report["results"]:
        answer_s = run["e2e"]["mean"] if "mean" in run["e2e"] else run["e2e"]["p50"]
        assert 8 / (2 + 3 * answer_s) < run["rate_per_s"] < 8 / 1.2


def test_users_of_a_trace_send_its_requests_when_they_are_answered(trace: Path) -> None:
    report = report_of("--trace", str(trace), "--users", "2", "--think-time", "0s")
    assert report["results"][0]["requests"] == 20
    assert "20, as users send them" in report["provenance"]["requests"]
    assert not any("users" in note for note in report["notes"])
    many = report_of("--trace", str(trace), "--users", "99", "--think-time", "1s")
    assert any("Only 20 of 99 users send" in note for note in many["notes"])
    hour = report_of(
        *("--trace", str(trace), "--users", "2", "--think-time", "0s", "--duration", "1h")
    )
    assert any("All requests were sent after" in note for note in hour["notes"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--users", "3"), "needs the time from an answer"),
        (("--think-time", "3s"), "is of users: give --users, too"),
        (("--users", "0", "--think-time", "3s"), "greater than or equal to 1"),
        (("--users", "3", "--think-time", "soon"), "expected a duration"),
        (("--users", "3", "--think-time", "3s", "--rate", "3"), "one of --users, --rate"),
        (("--users", "3", "--think-time", "3s", "--scale", "3"), "one of --users, --rate"),
    ],
)
def test_users_that_are_none_are_refused(options: tuple[str, ...], said: str) -> None:
    result = simulate("--workload", "conv", "--requests", "5", *options)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())


def test_users_of_a_workload_need_an_end() -> None:
    result = simulate("--workload", "conv", "--users", "3", "--think-time", "1s")
    assert "--workload needs an end" in result.stderr


def test_a_sweep_leaves_out_objectives_that_cannot_be_configured_and_says_so() -> None:
    limits = ("--ttft", "200ms", "--tpot", "1500us")
    swept = report_of(*SMALL, *limits, "--slo-scale-sweep")
    (curve,) = swept["attainment_by_slo_scale"]
    assert [scale for scale, _ in curve["scale_and_attainment"]] == [
        *(0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
    ]
    (note,) = (item for item in swept["notes"] if "sweep" in item)
    assert "0.25, 0.5" in note
    assert "at least 1ms, at most" in note


def test_a_sweep_of_objectives_is_a_run_for_each_that_the_policy_knows_of() -> None:
    busy = ("--workload", "conv", "--rate", "60", "--requests", "60")
    limits = ("--ttft", "60ms", "--tpot", "11ms")
    judged = report_of(*busy, *limits, config=GPU)
    swept = report_of(*busy, *limits, "--slo-scale-sweep", config=GPU)
    (once,), (each,) = (entry["attainment_by_slo_scale"] for entry in (judged, swept))
    assert (once["a_run_for_each"], each["a_run_for_each"]) == (False, True)
    assert len(each["scale_and_attainment"]) == 9
    assert dict(each["scale_and_attainment"])[1.0] == swept["results"][0]["attainment"]
    # Placement that aims at other objectives is another placement.
    assert each["scale_and_attainment"] != once["scale_and_attainment"]


def test_a_replica_that_is_killed_takes_no_request_with_it(trace: Path) -> None:
    report = report_of("--trace", str(trace), "--kill", "decode-0@1s")
    (run,) = report["results"]
    assert run["failed"] == 0
    assert run["devices"] < 4


def test_prompts_that_are_too_long_are_counted_and_said() -> None:
    report = report_of(*SMALL, "--set", "model.max_len=800")
    assert report["results"][0]["failed"] > 0
    assert any("no room for an answer in max_len (800)" in note for note in report["notes"])


def test_bad_lines_are_left_out_when_asked_and_counted(trace: Path) -> None:
    trace.write_text(trace.read_text() + "{broken\n")
    refused = simulate("--trace", str(trace))
    assert refused.exit_code == 1
    assert f"error: {trace}, line 21: " in refused.stderr
    assert "next: correct the line, or leave out all that are bad with --skip-bad" in refused.stderr
    report = report_of("--trace", str(trace), "--skip-bad")
    assert report["results"][0]["requests"] == 20
    assert "1 line of the trace was bad and left out." in report["notes"]


# ------------------------------------------------------------------ what is shown


def test_the_timeline_begins_with_the_first_arrival() -> None:
    rare = RequestArgs(workload="summaries", rate_per_s=0.2, max_requests=4, seed=3)
    study = run_study(SimulateArgs(files=[Path(SIM)], environ={}, requests=rare), command="")
    (run,) = study.results
    first, second = run.samples[:2]
    assert run.outcomes[0].arrived_at_s > 2 * (second.at_s - first.at_s)
    assert 0 <= first.at_s < second.at_s - first.at_s
    assert first.replicas == {"prefill": 2, "decode": 2}


def test_people_get_tables_and_a_page_that_says_how_to_make_it_again(tmp_path: Path) -> None:
    file = tmp_path / "a.html"
    result = simulate(*SMALL, "--ttft", "1s", "--report", str(file))
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("sim.yaml on conv\nfigures: (S) simulated\n")
    assert "TTFT p50 / p90 / p99" in result.stdout
    assert result.stderr == f"report: {file}\n"
    command = f"baton simulate --config {SIM} --workload conv --rate 4.0 --requests 12 --ttft 1s"
    assert f"<code>{command} --report {file}</code>" in file.read_text()


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give one of --trace and --workload"),
        (("--trace", "a", "--workload", "conv"), "give one of --trace and --workload"),
        ((*SMALL, "--duration", "10"), "expected a duration such as"),
        ((*SMALL, "--kill", "decode-0"), "expected a replica and a time such as decode-0@30s"),
        ((*SMALL, "--scale", "0"), "expected more than 0"),
        ((*SMALL, "--attainment", "90"), "--attainment"),
    ],
)
def test_options_that_make_no_sense_are_wrong_usage(arguments: tuple[str, ...], says: str) -> None:
    result = simulate(*arguments)
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--workload", "konv", "--rate", "1", "--requests", "5"), "workload 'konv' is not known"),
        (("--workload", "conv", "--requests", "5"), "--workload needs a rate"),
        (("--workload", "conv", "--rate", "5"), "--workload needs an end"),
        (("--trace", "none.csv"), "none.csv: cannot be read"),
        ((*SMALL, "--compare", "random"), "expected a key and a value such as policy=random"),
        ((*SMALL, "--kill", "decode-9@1s"), "'decode-9'"),
        ((*SMALL, *NO_SLO, "--slo-scale-sweep"), "--slo-scale-sweep needs objectives"),
        ((*SMALL, "--report", "a.pdf"), "expected .html or .png"),
    ],
)
def test_an_error_has_a_reason_and_a_remedy(arguments: tuple[str, ...], says: str) -> None:
    result = simulate(*arguments)
    assert result.exit_code == 1
    assert says in result.stderr
    assert result.stderr.splitlines()[-1].startswith("next: ")
    assert result.stdout == ""


def test_a_comparison_that_cannot_be_configured_says_which_it_is() -> None:
    result = simulate(*SMALL, "--compare", "policy=randm")
    assert result.exit_code == 2
    assert "with router.policy=randm: --set: router.policy" in result.stderr


def test_a_configuration_whose_engines_cannot_be_modelled_says_why() -> None:
    result = simulate(*SMALL, "--set", "pools.decode.resources.accelerator=null", config=GPU)
    assert result.exit_code == 2
    assert "pools.decode.resources.accelerator: missing" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("next: correct these keys, as with --set")


def test_a_comparison_whose_engines_cannot_be_modelled_says_which_it_is() -> None:
    change = "models.llama-8b.source=nobody/knows"
    result = simulate(*SMALL, "--compare", change, config=GPU)
    assert result.exit_code == 2
    assert f"error: with {change}: models.llama-8b.source: the shape of" in result.stderr
    assert "--model-config" in result.stderr.splitlines()[-1]


# ------------------------------------------------------------------ who scales, and for whom

GROWING = ("--set", "pools.prefill.replicas={min: 1, initial: 1, max: 3}", "--cold-start", "1s")


def test_autoscalers_are_compared_by_name_and_say_what_they_did() -> None:
    report = report_of(*SMALL, *GROWING, "--autoscaler", "slo", "--autoscaler", "static")
    ours, static = report["results"]
    assert (ours["name"], static["name"]) == ("autoscaler=slo", "autoscaler=static")
    assert static["scaling"]["actions"] == 0
    assert static["scaling"]["ticks"] > 0
    assert static["scaling"]["device_hours"] == pytest.approx(
        static["devices"] * static["span_s"] / 3600, rel=0.05
    )
    assert report["provenance"]["autoscaler"] == "policy slo, every 2 s"


def test_without_an_autoscaler_scaling_is_not_mentioned() -> None:
    report = report_of(*SMALL)
    (run,) = report["results"]
    assert run["scaling"] is None
    assert "autoscaler" not in report["provenance"]
    assert "scaling actions" not in simulate(*SMALL).stdout


def test_pools_that_cannot_change_are_said() -> None:
    report = report_of(
        *SMALL,
        "--autoscaler",
        "slo",
        "--set",
        "pools.prefill.replicas={min: 1, initial: 1, max: 1}",
        "--set",
        "pools.decode.replicas={min: 1, initial: 1, max: 1}",
    )
    assert any("No pool may change its size" in note for note in report["notes"])


def test_requests_are_served_in_the_classes_and_for_the_tenants_that_the_trace_names(
    tmp_path: Path,
) -> None:
    file = tmp_path / "trace.jsonl"
    line = '{{"at_s": {at}, "input_length": 50, "output_length": 5, "slo_class": "{kind}"{more}}}\n'
    file.write_text(
        line.format(at=0.1, kind="strict", more="")
        + line.format(at=0.2, kind="unheard-of", more=', "tenant": "acme"')
    )
    sets = (
        *("--set", "slo.classes.strict={ttft: 1ms, priority: 0}"),
        *("--set", "slo.default={ttft: 60s}"),
        *("--set", "tenants.acme={weight: 2}"),
        *("--set", "admission.policy=bounded"),
    )
    report = report_of("--trace", str(file), *sets)
    (run,) = report["results"]
    shares = {(item["slo_class"], item["tenant"]): item["attainment"] for item in run["shares"]}
    assert shares == {("default", "acme"): 1.0, ("strict", "default"): 0.0}
    assert any("by its own" in note for note in report["notes"])
    text = simulate("--trace", str(file), *sets).stdout
    assert "Attainment by class and tenant" in text


def test_a_report_says_whose_limits_refuse_requests() -> None:
    rate = ("--set", "tenants.default.rate={tokens: 1k/min, burst: 1s}")
    limited = report_of(*SMALL, *rate, "--set", "tenants.acme={weight: 2}")
    (note,) = (item for item in limited["notes"] if item.startswith("Limits hold"))
    assert "(default)" in note
    assert limited["results"][0]["failed"] > 0
    free = report_of(*SMALL, "--set", "tenants.acme={weight: 2}")
    assert not any(item.startswith("Limits hold") for item in free["notes"])


SPECULATES = "models.llama-8b.engine.extra.speculative_config={method: ngram}"
NOTE = (
    "Speculative decoding is not simulated: a step gives each stream one token"
    " (pools.prefill.engine.extra.speculative_config,"
    " pools.decode.engine.extra.speculative_config)."
)


def test_unsimulated_keys_are_named_in_every_kind_of_report(tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    few = (*SMALL, "--set", SPECULATES, "--report", str(page))
    assert NOTE in report_of(*few, config=GPU)["notes"]
    assert NOTE in page.read_text()
    shown = simulate(*few, config=GPU)
    assert NOTE in " ".join(shown.stdout.split())
    assert not [n for n in report_of(*SMALL, config=GPU)["notes"] if "not simulated" in n]


def test_keys_unsimulated_in_a_comparison_are_named_for_it() -> None:
    compared = ("--compare", "disaggregate=never", "--compare", "pools.decode.env.A=1")
    notes = report_of(*SMALL, *compared, config=GPU)["notes"]
    (note,) = (other for other in notes if "not simulated" in other)
    assert note.startswith("With pools.decode.env.A=1: Environment variables of engines are not")
    notes = report_of(*SMALL, *compared, "--set", SPECULATES, config=GPU)["notes"]
    assert len([other for other in notes if "not simulated" in other]) == 2


def test_a_scaling_policy_that_there_is_not_is_refused() -> None:
    result = simulate(*SMALL, "--autoscaler", "magic")
    assert result.exit_code == 2
    assert "autoscaler.policy" in result.stderr


# -------------------------------------------------------------------- documents of simulations


CHEAP = ("baton size ", "baton calibrate ", "baton simulate -c configs/sim.yaml ")


def examples() -> list[str]:
    blocks = [block for block in code_blocks("bash") if block.file == "docs/operations/simulate.md"]
    return [block.text.strip() for block in blocks if block.text.startswith(CHEAP)]


def test_there_are_examples() -> None:
    assert len(examples()) >= 2


@pytest.mark.parametrize("example", examples())
def test_an_example_runs(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    _, *arguments = shlex.split(example)
    result = run_baton(*arguments)
    assert result.exit_code == 0, result.stderr
    assert result.stdout
