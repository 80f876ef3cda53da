"""How placement policies compare, on simulated engines in virtual time.

Every policy serves the same requests on the same fleet, all in turn, several times over with other
seeds. All figures are simulated: they compare policies, and say nothing of any real engine. Parts:

- `prefixes`, by default, has three loads, from `benchmarks/scenarios/routing.yaml`: prompts that
  share prefixes in groups, in a closed loop (the figures at the top); `heavy`: prompts four times
  as long, in an open loop at 80 % of saturation; `single_turn`: prompts that share nothing, on
  split pools: does any replica starve?
- `adapters`: 50 LoRA adapters over one model; how often is one loaded where a request is placed?
- `example`: prints one placement as `baton explain route` does, and writes nothing.

Prints one JSON object as the last line of stdout and writes it, with every repeat's figures, to
`benchmarks/results/routing.json` or `adapters.json`. Progress goes to stderr.

    python -m benchmarks.routing [--repeats 3] [--seed 1] [--policy NAME]... [--out FILE]
    python -m benchmarks.routing --part adapters
    python -m benchmarks.routing --part example [--request r25]
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks import _routing_adapters as adapters
from benchmarks._program import RESULTS, quote, say, write
from benchmarks._provenance import provenance
from benchmarks._routing_example import explained
from benchmarks._routing_policies import VARIANTS, PolicyVariant
from benchmarks._routing_report import compare, summarize
from benchmarks._routing_runs import RunSetting, run, saturated_rate
from benchmarks._routing_workloads import SCENARIO, Scenario, read_scenario

_REFERENCE_POLICY = "dynamo"
"""Whose saturation sets the rate of the heavy load."""

Runs = dict[str, dict[str, list[dict[str, float]]]]
"""Figures by load, policy and repeat."""


def main() -> int:
    """Run a part; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("prefixes", "adapters", "example"), default="prefixes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--policy", action="append", choices=sorted(VARIANTS), default=[])
    parser.add_argument("--load", action="append", default=[])
    parser.add_argument("--request", default="r25", help="of the example")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.part == "example":
        print(explained(options.request))
        return 0
    seeds = [options.seed + repeat for repeat in range(options.repeats)]
    began_s = time.monotonic()
    if options.part == "adapters":
        file, (figures, details) = RESULTS / "adapters.json", _adapters(seeds)
    else:
        file, (figures, details) = RESULTS / "routing.json", _prefixes(options, seeds)
    figures |= {"simulated": True, "repeats": options.repeats, "seed": options.seed}
    figures |= {"took_s": time.monotonic() - began_s} | provenance()
    write(options.out or file, figures | details)
    quote(figures)
    return 0


def _adapters(seeds: Sequence[int]) -> tuple[dict[str, object], dict[str, object]]:
    setting = adapters.Setting()
    runs = adapters.run_all(setting, seeds)
    figures = adapters.summary(runs) | {"adapters": setting.adapters}
    return figures, {"setting": asdict(setting), "runs": runs}


def _prefixes(
    options: argparse.Namespace, seeds: Sequence[int]
) -> tuple[dict[str, object], dict[str, object]]:
    scenario = read_scenario()
    arms = {
        name: arm for name, arm in VARIANTS.items() if not options.policy or name in options.policy
    }
    runs = run_all(scenario, arms, seeds, loads=options.load or list(scenario.workloads))
    figures = summarize(runs) | compare(runs) | _ideal_fractions(scenario)
    figures |= {"config_sha256": hashlib.sha256(SCENARIO.read_bytes()).hexdigest()}
    return figures, {"engine": asdict(scenario.engine), "runs": runs}


def run_all(
    scenario: Scenario,
    variants: Mapping[str, PolicyVariant],
    seeds: Sequence[int],
    *,
    loads: Sequence[str],
) -> Runs:
    """Every load, with each seed, under every policy in turn."""
    runs: Runs = {load: {name: [] for name in variants} for load in loads}
    for load in loads:
        for seed in seeds:
            workload = scenario.workloads[load]
            setting = RunSetting(workload=workload, engine=scenario.engine_of(workload), seed=seed)
            requests = workload.draw_requests(seed)
            if workload.saturating_clients is not None:
                saturated_rate_per_s = saturated_rate(
                    setting, VARIANTS[_REFERENCE_POLICY], requests
                )
                rate = saturated_rate_per_s * workload.load_fraction
                open_loop_workload = replace(workload, rate_per_s=rate, saturating_clients=None)
                setting = replace(setting, workload=open_loop_workload)
                say(
                    f"{load}, seed {seed}: {saturated_rate_per_s:.2f} requests/s at most,"
                    f" {rate:.2f} are sent"
                )
            for name, arm in variants.items():
                metrics = run(setting, arm, requests)
                metrics["offered_per_s"] = setting.workload.rate_per_s or metrics["requests_per_s"]
                runs[load][name].append(metrics)
                say(f"{load}, seed {seed}, {name}: {_format_metrics(metrics)}")
    return runs


def _ideal_fractions(scenario: Scenario) -> dict[str, object]:
    return {
        "ideal_cached_fraction": {
            name: workload.ideal_fraction for name, workload in scenario.workloads.items()
        }
    }


def _format_metrics(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in figures.items())


if __name__ == "__main__":
    sys.exit(main())
