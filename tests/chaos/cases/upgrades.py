"""Everything is replaced while requests are served: configuration, engines, baton itself; and back.

Simulated engines in real time behind everything that a user starts. What clients saw is compared
with what engines would have answered undisturbed: no client may notice anything but a pause.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.serving.shared.names import CONTROLLER, INGRESS
from baton.serving.versions import code_version
from tests.chaos.case import (
    Bound,
    Engines,
    Figure,
    Outcome,
    at_least,
    at_most,
    case,
    exactly,
)
from tests.chaos.clients import POOLS, START_S, Clients, outcome, running_clients, steady_load
from tests.chaos.deployment_processes import DeploymentProcesses, environment, running_processes
from tests.chaos.other_version import FAILS_TO_START, copy_version

_COMMAND_S = 420.0
_SHORT_DRAIN = {"admission.timeouts.drain": "4s"}
"""How long streams run on where a replica drains, before they are moved: half of them are."""
_BAKE = ("--bake", "6s")
FAILURE = 1
USAGE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """What a command of `baton` came to."""

    code: int
    took_s: float
    report: Mapping[str, Any]
    """What it printed, where it succeeded."""
    stderr: str
    """Of its errors."""


def run_command(
    processes: DeploymentProcesses, *command: str, python: str = sys.executable
) -> CommandResult:
    """Run a command on the deployment; its options are those that it was started by."""
    options = processes.deployment.options if command[0] == "apply" else ()
    line = [python, "-m", "baton.cli.main", *command[:1], *options, *command[1:], "-o", "json"]
    started_s = time.monotonic()
    process = subprocess.run(line, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    return CommandResult(
        code=process.returncode,
        took_s=round(time.monotonic() - started_s, 1),
        report=json.loads(process.stdout.splitlines()[-1]) if process.returncode == 0 else {},
        stderr=process.stderr,
    )


def apply_settings(
    up: DeploymentProcesses, *sets: str, options_after: Sequence[str] = _BAKE
) -> CommandResult:
    """Apply what it was started by, with some keys set otherwise."""
    options = [word for set_ in sets for word in ("--set", set_)]
    return run_command(up, "apply", *options, *options_after)


def pids(up: DeploymentProcesses, *names: str) -> dict[str, list[int]]:
    """Processes by what they are."""
    return {name: up.replicas(name) for name in names or (*POOLS, CONTROLLER, INGRESS)}


@contextmanager
def running_under_load(
    folder: Path, name: str, *, ingresses: int = 1, settings: Mapping[str, object] | None = None
) -> Iterator[tuple[DeploymentProcesses, Clients]]:
    """A deployment with clients."""
    ingress_settings = {"server.replicas.min": ingresses, "server.replicas.max": ingresses}
    with running_processes(folder, **_SHORT_DRAIN, **ingress_settings, **(settings or {})) as up:
        up.wait_complete(POOLS, ingresses=ingresses, timeout_s=START_S)
        with running_clients(up, steady_load(name)) as clients:
            yield up, clients


def replaced_processes(before: dict[str, list[int]], after: dict[str, list[int]]) -> list[str]:
    """Deployments none of whose processes is one of those before, and that are as many."""
    return [
        name
        for name, old in before.items()
        if not set(old) & set(after[name]) and len(old) == len(after[name])
    ]


def generation_state(up: DeploymentProcesses) -> Mapping[str, Any]:
    """The generation that holds and the report of the last rollout, once there is one."""
    status = up.deployment.wait_for(lambda status: status["generation"] is not None, 60)
    # Last: a rollout of another version of baton is of no generation.
    return {**status.get("rollout", {}), "generation": status["generation"]}


# -------------------------------------------------------------------- F15


@case(
    "F15",
    "bad configurations applied under load: refused, each with its reason, and nothing has changed",
    engines=Engines.SIMULATED,
    minutes=2.0,
)
def bad_configurations(folder: Path) -> Outcome:
    """One that cannot be read, one of a key that needs a restart, one that processes refuse."""
    bad = folder / "bad.yaml"
    bad.write_text("slo: {default: {ttft: soon}}\n")
    with running_under_load(folder, "F15") as (up, clients):
        before = pids(up)
        results = {
            "cannot be read": run_command(up, "apply", "-c", str(bad)),
            "would need a restart": apply_settings(up, "transfer.lease=2m", "slo.default.ttft=5s"),
            "a policy that cannot be loaded": apply_settings(up, "router.policy=no_such:thing"),
            "keys that are not there": apply_settings(up, "tenants.acme.keys_file=/no/such/file"),
        }
        clients.run_for(2.0)
        are_pids_unchanged, generation = pids(up) == before, generation_state(up)
    codes = {name: done.code for name, done in results.items()}
    expected_codes = dict.fromkeys(results, FAILURE) | {"cannot be read": USAGE}
    without_error = [name for name, done in results.items() if "error: " not in done.stderr]
    bounds = [
        exactly("exit codes", str(codes), str(expected_codes)),
        exactly("refusals without a reason", len(without_error), 0),
        exactly("generation that holds", generation["generation"], 0),
        exactly("every process goes on", are_pids_unchanged, True),  # noqa: FBT003 - a figure
    ]
    return outcome(clients.exchanges, bounds, {name: done.took_s for name, done in results.items()})


@case(
    "F15-two",
    "two ingresses: a configuration holds in both, or in none; a pool is replaced behind both",
    engines=Engines.SIMULATED,
    minutes=3.0,
)
def two_ingresses(folder: Path) -> Outcome:
    """Live keys, a refusal, an engine option, and back to the first of them."""
    with running_under_load(folder, "F15-two", ingresses=2) as (up, clients):
        before = pids(up)
        live_apply = apply_settings(up, "slo.default.ttft=5s", "admission.max_queued_requests=500")
        generations_after_apply = _generations(up)
        rejected_apply = apply_settings(up, "router.policy=no_such:thing")
        generations_after_rejection = _generations(up)
        rollout = apply_settings(
            up,
            "slo.default.ttft=5s",
            "admission.max_queued_requests=500",
            "model.engine.max_num_seqs=200",
        )
        after = pids(up)
        rollback = run_command(up, "rollback", *_BAKE)
        final_generations = _generations(up)
        clients.run_for(2.0)
    bounds = [
        exactly("generations after a live change", str(generations_after_apply), "[1, 1]"),
        exactly("and after one that is refused", str(generations_after_rejection), "[1, 1]"),
        exactly(
            "exit codes",
            str([d.code for d in (live_apply, rejected_apply, rollout, rollback)]),
            "[0, 1, 0, 0]",
        ),
        exactly(
            "pools replaced",
            str(replaced_processes(before, after)),
            str(sorted(POOLS, reverse=True)),
        ),
        exactly("generations after the way back", str(final_generations), "[3, 3]"),
    ]
    figures: dict[str, Figure] = {
        "live change, s": live_apply.report.get("took_s"),
        "both pools, s": rollout.report.get("took_s"),
        "back, s": rollback.report.get("took_s"),
    }
    return outcome(clients.exchanges, bounds, figures)


def _generations(up: DeploymentProcesses) -> list[object]:
    return [ingress["generation"] for ingress in up.status()["ingresses"]]


# -------------------------------------------------------------------- F16


@case(
    "F16",
    "engines of both pools replaced under load, decode first: no request fails, all tokens right",
    engines=Engines.SIMULATED,
    minutes=2.5,
)
def rolling_upgrade_of_engines(folder: Path) -> Outcome:
    """An option of the engines changes."""
    with running_under_load(folder, "F16") as (up, clients):
        before = pids(up)
        done = apply_settings(up, "model.engine.max_num_seqs=200")
        after, holds = pids(up), generation_state(up)
        clients.run_for(2.0)
    bounds = [
        exactly("exit code", done.code, 0),
        exactly("order", str(done.report.get("replaced")), "['decode', 'prefill']"),
        *_only_pools_replaced(before, after),
        exactly("generation that holds", holds["generation"], 1),
        exactly("the rollout is", holds.get("state"), "done"),
    ]
    return outcome(clients.exchanges, bounds, _figures(done))


@case(
    "F16-layout",
    "engines whose KV blocks look otherwise replace both pools: no pair of an old and a new one",
    engines=Engines.SIMULATED,
    minutes=2.5,
)
def rolling_upgrade_of_the_layout(folder: Path) -> Outcome:
    """Blocks of 32 tokens instead of 16: old and new replicas cannot read each other's."""
    with running_under_load(folder, "F16-layout") as (up, clients):
        before = pids(up)
        done = apply_settings(up, "model.engine.block_size=32")
        after = pids(up)
        links = up.deployment.run_json("links")["links"]
        clients.run_for(2.0)
    broken = sum(row["failed_handoffs"] for row in links)
    bounds = [
        exactly("exit code", done.code, 0),
        *_only_pools_replaced(before, after),
        exactly("handoffs that broke", broken, 0),
    ]
    return outcome(clients.exchanges, bounds, _figures(done))


def _only_pools_replaced(
    before: dict[str, list[int]], after: dict[str, list[int]]
) -> Iterator[Bound]:
    yield exactly(
        "pools replaced", str(sorted(replaced_processes(before, after))), str(sorted(POOLS))
    )
    others = all(before[name] == after[name] for name in (CONTROLLER, INGRESS))
    yield exactly("controller and ingress go on", others, True)  # noqa: FBT003 - a figure


def _figures(done: CommandResult) -> dict[str, Figure]:
    reason = done.report.get("reason") or [
        done.stderr.strip().splitlines()[-1] if done.stderr else ""
    ]
    return {"took, s": done.took_s, "why": "; ".join(reason)}


@case(
    "F16-rollback",
    "new engines that do not start: the old ones serve on by the old configuration, exit code 1",
    engines=Engines.SIMULATED,
    minutes=2.5,
)
def engines_that_do_not_start(folder: Path) -> Outcome:
    """The engine has an option that its process ends with."""
    copied_version = copy_version(folder / "same", edits=FAILS_TO_START)
    with (
        environment(PYTHONPATH=str(copied_version.source)),
        running_under_load(folder, "F16-rollback") as (up, clients),
    ):
        before = pids(up)
        done = apply_settings(up, "model.engine.max_num_seqs=13", "slo.default.ttft=5s")
        after, generation = pids(up), generation_state(up)
        history = run_command(up, "history").report["generations"]
        clients.run_for(2.0)
    fates = [str(item["status"]) for item in history]
    bounds = [
        exactly("exit code", done.code, FAILURE),
        exactly("it says why", "no engine starts with 13" in done.stderr, True),  # noqa: FBT003
        exactly("every process goes on", after == before, True),  # noqa: FBT003
        exactly("generation that holds", generation["generation"], 2),
        exactly("history", str(fates), "['started', 'reverted', 'applied']"),
    ]
    return outcome(clients.exchanges, bounds, _figures(done))


@case(
    "F16-goodput",
    "new engines that are too slow for the objectives: noticed on the first, and rolled back",
    engines=Engines.SIMULATED,
    minutes=3.0,
)
def engines_that_are_too_slow(folder: Path) -> Outcome:
    """A token takes 200 ms where the objective is 60 ms; they start and answer like the others."""
    slo_settings = {"slo.default.tpot": "60ms"}
    with running_under_load(folder, "F16-goodput", settings=slo_settings) as (up, clients):
        clients.run_for(10.0)
        before = pids(up)
        done = apply_settings(
            up, "pools.decode.engine.sim.decode_step=200ms", options_after=("--bake", "20s")
        )
        after, holds = pids(up), generation_state(up)
        clients.run_for(2.0)
    unreplaced = len(set(before["decode"]) & set(after["decode"]))
    bounds = [
        exactly("exit code", done.code, FAILURE),
        exactly("it says why", "missed an objective on new replicas" in done.stderr, True),  # noqa: FBT003
        exactly("generation that holds", holds["generation"], 2),
        exactly("decode replicas at last", len(after["decode"]), POOLS["decode"]),
        exactly("prefill replicas go on", before["prefill"] == after["prefill"], True),  # noqa: FBT003
    ]
    figures = _figures(done) | {"decode replicas that were never replaced": unreplaced}
    return outcome(clients.exchanges, bounds, figures)


# -------------------------------------------------------------------- baton itself


@case(
    "F16-code",
    "another version of baton replaces all of it under load, from an environment of its own",
    engines=Engines.SIMULATED,
    minutes=3.5,
)
def another_version_of_baton(folder: Path) -> Outcome:
    """Replicas, controller and ingress; ingresses last. Then a configuration by the new version."""
    new = copy_version(folder / "new", version="99.0.0")
    python = str(new.python(folder / "env"))
    with running_under_load(folder, "F16-code") as (up, clients):
        before = pids(up)
        rejected_apply = run_command(up, "apply", "--set", "slo.default.ttft=5s", python=python)
        done = run_command(up, "upgrade", *_BAKE, python=python)
        after = pids(up)
        running_version = up.status()["baton"]
        second_apply = run_command(up, "apply", "--set", "slo.default.ttft=5s", python=python)
        clients.run_for(2.0)
        holds = generation_state(up)
    bounds = [
        exactly(
            "a configuration of the new version before, exit code", rejected_apply.code, FAILURE
        ),
        exactly("exit code", done.code, 0),
        exactly("replaced", str(sorted(replaced_processes(before, after))), str(sorted(before))),
        exactly("version that runs", running_version.partition("+")[0], new.version),
        exactly("and after", second_apply.code, 0),
        exactly("generation that holds", holds["generation"], 1),
    ]
    return outcome(clients.exchanges, bounds, _figures(done))


@case(
    "F16-code-bad",
    "another version of baton whose replicas do not start: the old one serves on, exit code 1",
    engines=Engines.SIMULATED,
    minutes=2.5,
)
def a_bad_version_of_baton(folder: Path) -> Outcome:
    """Nothing of it ever serves."""
    edits = {
        "serving/replica/deployment.py": (
            "        self._config, self._pool = config, pool\n",
            '        raise RuntimeError("this version does not start")\n',
        )
    }
    new = copy_version(folder / "new", version="99.0.1", edits=edits)
    python = str(new.python(folder / "env"))
    with running_under_load(folder, "F16-code-bad") as (up, clients):
        before = pids(up)
        done = run_command(up, "upgrade", *_BAKE, python=python)
        after = pids(up)
        running_version = up.status()["baton"]
        later_apply = apply_settings(up, "slo.default.ttft=5s")
        clients.run_for(2.0)
    bounds = [
        exactly("exit code", done.code, FAILURE),
        exactly("it says why", "this version does not start" in done.stderr, True),  # noqa: FBT003
        exactly("every process goes on", after == before, True),  # noqa: FBT003
        exactly("version that runs", running_version, code_version()),
        exactly("a configuration of the old version can be applied", later_apply.code, 0),
        at_least("requests meanwhile", len(clients.exchanges), 50),
        at_most("seconds until it was given up", done.took_s, 120.0),
    ]
    return outcome(clients.exchanges, bounds, _figures(done))
