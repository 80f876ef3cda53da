"""Each runbook against the fault that it is for: its commands show what it says that they show.

A comment behind a command of a runbook's *Diagnosis* is a text of its output. Here the fault is
caused, the commands run as they stand there, and their texts are looked for.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from baton.runtime.keys.api_keys import mint
from baton.runtime.keys.key_files import edit_key_file
from tests.chaos.faults import stopped_processes
from tests.e2e.deployments import Deployment, running_deployment
from tests.fakes.certificates import make_key_pair
from tests.fakes.processes import descendants
from tests.fakes.scaled_deadline import ScaledDeadline
from tests.rules.rule_files import RUNBOOKS, diagnosis

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
_SHOWN_WITHIN_S = 60.0
_COMMAND_S = 120.0
_SITES: Mapping[str, Mapping[str, object]] = {
    "two ingresses": {"server.replicas.min": 2},
    # A handoff takes so long that there is always one to disturb.
    "slow transfers": {
        "server.replicas.min": 2,
        "transfer.lease": "1s",
        "transfer.deadline": "1s",
        "model.engine.sim.transfer_setup": "1s",
    },
    # And a pool without replicas, of which Serve starts none by itself.
    "what expires": {
        "pools.spare.role": "decode",
        "pools.spare.replicas.min": 0,
        "pools.spare.replicas.max": 1,
    },
}
"""The deployments, by what they have."""
Values = Mapping[str, str]
"""What an operator puts for the capitals in a command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong, and the runbooks of the alerts that it fires."""

    cause: Callable[[Deployment, Path], AbstractContextManager[Values]]
    runbooks: tuple[str, ...]
    site: str = "two ingresses"


# ------------------------------------------------------------------------------------- commands
def run_command(command: str, values: Values, texts: tuple[str, ...] = ()) -> str:
    """Run a command of a runbook as an operator does; returns what it prints.

    With `texts`, until it has shown all of them: `baton doctor` looks at the machine after that.
    """
    words = shlex.split(filled_in(command, values))
    assert words[0] == "baton"
    process = subprocess.Popen(
        [sys.executable, "-m", "baton.cli.main", *words[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"NO_COLOR": "1", "COLUMNS": "250"},
        start_new_session=True,
    )
    watchdog = threading.Timer(_COMMAND_S, os.killpg, (process.pid, signal.SIGKILL))
    watchdog.start()
    output = ""
    try:
        assert process.stdout is not None
        for line in process.stdout:
            output += line
            if texts and not missing_texts(texts, output, values):
                break
    finally:
        watchdog.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert "Traceback" not in output, output
    return output


def run_until_shown(command: str, texts: tuple[str, ...], values: Values) -> float:
    """Run it until it shows these texts; returns the seconds that the last run took."""
    deadline = ScaledDeadline(_SHOWN_WITHIN_S)
    while True:
        started_s = time.monotonic()
        output = run_command(command, values, texts)
        if not (missing := missing_texts(texts, output, values)):
            return time.monotonic() - started_s
        assert not deadline.is_expired(), f"{command} shows no {missing}:\n{output}"


def missing_texts(texts: tuple[str, ...], output: str, values: Values) -> list[str]:
    return [text for text in texts if not is_shown(filled_in(text, values), output)]


def filled_in(text: str, values: Values) -> str:
    """The text with values for its capitals."""
    for name, value in values.items():
        text = re.sub(rf"\b{name}\b", value, text)
    return text


def is_shown(text: str, output: str) -> bool:
    """Whether a line has the text; `N` in it is a number above 0, and columns may be wide."""
    words = [r"[1-9]\d*" if word == "N" else re.escape(word) for word in text.split()]
    return re.search(r"[ \t]+".join(words), output) is not None


# --------------------------------------------------------------------------------------- faults
def apply(baton: Deployment, folder: Path, changes: str) -> None:
    """Change the live configuration."""
    file = folder / "changes.yaml"
    file.write_text(changes)
    baton.run_json("apply", *baton.options, "-c", str(file), timeout_s=_COMMAND_S)


@contextmanager
def applied(baton: Deployment, folder: Path, changes: str) -> Iterator[None]:
    apply(baton, folder, changes)
    try:
        yield
    finally:
        baton.run_json("apply", *baton.options, timeout_s=_COMMAND_S)


@contextmanager
def asking(
    baton: Deployment, streams: int, *, tokens: int, max_tokens: int = 8, request_id: str = ""
) -> Iterator[None]:
    """Clients that send one request after the other, also after an error."""
    over = threading.Event()

    def keep_asking(number: int) -> None:
        count = 0
        while not over.is_set():
            count += 1
            body = {
                "model": "tiny",
                "prompt": [
                    300 + (number * 7919 + count * 104_729 + at) % 7000 for at in range(tokens)
                ],
                "max_tokens": max_tokens,
                "stream": True,
                "ignore_eos": True,
            }
            headers = {"X-Request-Id": f"{request_id}-{number}-{count}"} if request_id else {}
            with contextlib.suppress(httpx.TransportError):
                answer = httpx.post(
                    f"{baton.url}/v1/completions", json=body, headers=headers, timeout=60
                )
                if answer.status_code != httpx.codes.OK:
                    over.wait(0.1)

    with ThreadPoolExecutor(streams) as pool:
        for number in range(streams):
            pool.submit(keep_asking, number)
        try:
            yield
        finally:
            over.set()


def replica_pids(baton: Deployment, pool: str) -> list[int]:
    return [pid for name, pid in baton.pids().items() if name.startswith(f"{pool}-")]


def ready(status: Mapping[str, Any], pool: str) -> int:
    return sum(int(row["ready"]) for row in status["pools"] if row["pool"] == pool)


def is_whole(status: Mapping[str, Any]) -> bool:
    """Whether every ingress sees both replicas of both pools, and none else."""
    return not status.get("unresponsive_ingresses") and all(
        sorted(row["pool"] for row in ingress["replicas"]) == ["decode"] * 2 + ["prefill"] * 2
        for ingress in status["ingresses"]
    )


@contextmanager
def ingress_stands_still(baton: Deployment, _: Path) -> Iterator[Values]:
    with stopped_processes(baton.status()["ingresses"][0]["pid"]):
        yield {}


@contextmanager
def bad_policy_is_applied(baton: Deployment, folder: Path) -> Iterator[Values]:
    config = yaml.safe_load(run_command(f"baton config show {shlex.join(baton.options)}", {}))
    file = folder / "bad.yaml"
    file.write_text(yaml.safe_dump(config | {"router": {"policy": "no_such_module:choose"}}))
    assert "no_such_module" in baton.run_failing("apply", "-c", str(file))
    yield {"FILE": str(file)}


@contextmanager
def overloaded(baton: Deployment, folder: Path) -> Iterator[Values]:
    changes = (
        "slo: {default: {ttft: 200ms, attainment: 0.9}}\n"
        "autoscaler: {interval: 500ms}\n"
        "pools: {prefill: {replicas: {max: 2}}}\n"
    )
    with (
        applied(baton, folder, changes),
        asking(baton, 24, tokens=3000, request_id="late"),
    ):
        yield {"REQUEST_ID": "late-1-4"}
    # Without an autoscaler the pool stays as large as it is, until an override ends.
    baton.run_json("scale", "decode", "2")
    baton.run_json("scale", "decode", "--auto")


@contextmanager
def queue_grows(baton: Deployment, folder: Path) -> Iterator[Values]:
    with ExitStack() as stack:
        stack.enter_context(applied(baton, folder, "admission: {queue_timeout: 30s}\n"))
        for pool in ("prefill", "decode"):
            stack.enter_context(killed_again_and_again(baton, pool))
        stack.enter_context(asking(baton, 30, tokens=20))
        yield {}


@contextmanager
def tenant_is_limited(baton: Deployment, folder: Path) -> Iterator[Values]:
    with (
        applied(baton, folder, "tenants: {default: {rate: {requests: 1/s}}}\n"),
        asking(baton, 2, tokens=10),
    ):
        yield {}


@contextmanager
def killed_again_and_again(baton: Deployment, deployment: str) -> Iterator[None]:
    """Every replica of one deployment of Serve's is killed, and each that Ray starts instead."""
    over = threading.Event()
    title = f"ray::ServeReplica:baton:{deployment}"

    def keep_killing() -> None:
        while not over.wait(0.2):
            for process in descendants(baton.process.pid):
                with contextlib.suppress(psutil.Error):
                    if "".join(process.cmdline()[:1]).startswith(title):
                        process.kill()

    thread = threading.Thread(target=keep_killing)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def no_decode(baton: Deployment, _: Path) -> Iterator[Values]:
    with killed_again_and_again(baton, "decode"):
        yield {}


@contextmanager
def no_prefill(baton: Deployment, _: Path) -> Iterator[Values]:
    with killed_again_and_again(baton, "prefill"):
        baton.wait_for(lambda status: not ready(status, "prefill"), 60)
        baton.stream("no prefill here", request_id="without-prefill", max_tokens=4)
        yield {"REQUEST_ID": "without-prefill"}


@contextmanager
def no_ingress(baton: Deployment, _: Path) -> Iterator[Values]:
    with killed_again_and_again(baton, "ingress"):
        yield {}


@contextmanager
def prefill_stands_still(baton: Deployment, _: Path) -> Iterator[Values]:
    with asking(baton, 4, tokens=200):
        replica, pid = next(
            (name, pid) for name, pid in baton.pids().items() if name.startswith("prefill-")
        )
        with stopped_processes(pid):
            yield {"REPLICA_ID": replica}


@contextmanager
def ingresses_end_while_decode_stands_still(baton: Deployment, _: Path) -> Iterator[Values]:
    with asking(baton, 8, tokens=200):
        baton.wait_for(lambda status: bool(status["ingresses"][0]["in_flight"]), 60)
        with stopped_processes(*replica_pids(baton, "decode")):
            for ingress in baton.status()["ingresses"]:
                os.kill(ingress["pid"], signal.SIGKILL)
            baton.wait_for(lambda status: len(status["ingresses"]) == 2, 120)
    yield {}


@contextmanager
def decode_stands_still_for_longer_than_a_lease(
    baton: Deployment, folder: Path
) -> Iterator[Values]:
    """And for less than a heartbeat's timeout, again and again."""
    over, pids = threading.Event(), replica_pids(baton, "decode")

    def keep_stopping() -> None:
        while not over.is_set():
            with stopped_processes(*pids):
                over.wait(1.4)
            over.wait(1.0)

    with (
        applied(baton, folder, "recovery: {heartbeat_timeout: 1min}\n"),
        asking(baton, 8, tokens=200),
    ):
        thread = threading.Thread(target=keep_stopping)
        thread.start()
        try:
            yield {}
        finally:
            over.set()
            thread.join()


@contextmanager
def few_file_descriptors(
    baton: Deployment, pool: str, others: str, *, left: int
) -> Iterator[Values]:
    """A replica can open only `left` new connections, and all of another pool are new."""
    pid = replica_pids(baton, pool)[0]
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = {int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()}
    lowest_free = min(set(range(len(used) + 1)) - used)
    # Its fleet link goes on: it has connections of its own to both ingresses.
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest_free + left, hard))
    try:
        for other in replica_pids(baton, others):
            os.kill(other, signal.SIGKILL)
        with asking(baton, 4, tokens=200):
            yield {}
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def agent_breaks(baton: Deployment, _: Path) -> AbstractContextManager[Values]:
    return few_file_descriptors(baton, "decode", "prefill", left=0)


def side_channel_breaks(baton: Deployment, _: Path) -> AbstractContextManager[Values]:
    return few_file_descriptors(baton, "prefill", "decode", left=1)


@contextmanager
def another_process_takes_the_time(baton: Deployment, _: Path) -> Iterator[Values]:
    """Every prefill replica stands still for three quarters of the time."""
    over, pids = threading.Event(), replica_pids(baton, "prefill")

    def keep_stopping() -> None:
        while not over.is_set():
            with stopped_processes(*pids):
                over.wait(0.6)
            over.wait(0.2)

    thread = threading.Thread(target=keep_stopping)
    thread.start()
    try:
        with asking(baton, 2, tokens=1000, request_id="mispredicted"):
            yield {"REQUEST_ID": "mispredicted-0-1"}
    finally:
        over.set()
        thread.join()


@contextmanager
def controller_stands_still(baton: Deployment, _: Path) -> Iterator[Values]:
    (pid,) = [
        process.pid
        for process in descendants(baton.process.pid)
        if "".join(process.cmdline()[:1]).startswith("ray::ServeReplica:baton:controller")
    ]
    with stopped_processes(pid):
        yield {}


@contextmanager
def caches_are_lost(baton: Deployment, _: Path) -> Iterator[Values]:
    prompt = list(range(300, 1300))
    baton.stream(prompt, max_tokens=4)
    before = baton.pids()
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
    baton.wait_for(
        lambda status: is_whole(status) and not before.items() & baton.pids().items(), 90
    )
    baton.stream(prompt, request_id="not-cached", max_tokens=4)
    yield {"REQUEST_ID": "not-cached"}


@contextmanager
def credentials_expire(baton: Deployment, _: Path) -> Iterator[Values]:
    """As from the beginning."""
    folder = baton.log.parent
    yield {"KEYS_FILE": str(folder / "acme.keys"), "KEY_FILE": str(folder / "key")}


FAULTS = {
    "an ingress stands still": Fault(
        cause=ingress_stands_still,
        runbooks=("BatonIngressSilent", "BatonAutoscalerHeld", "BatonGenerationsDiffer"),
    ),
    "a configuration with an unknown policy is applied": Fault(
        cause=bad_policy_is_applied, runbooks=("BatonConfigRefused",)
    ),
    "twice the load that prefill carries": Fault(
        cause=overloaded,
        runbooks=(
            "BatonPoolAtMax",
            "BatonRequestsLate",
            "BatonGoodputBurnsFast",
            "BatonGoodputBurnsSlowly",
            "BatonPoolFlaps",
        ),
    ),
    "no replica is there for requests that wait": Fault(
        cause=queue_grows, runbooks=("BatonQueueGrows",)
    ),
    "a tenant over its rate": Fault(cause=tenant_is_limited, runbooks=("BatonTenantLimited",)),
    "all decode replicas are killed": Fault(
        cause=no_decode, runbooks=("BatonNoDecode", "BatonPoolShort")
    ),
    "all prefill replicas are killed": Fault(cause=no_prefill, runbooks=("BatonNoPrefill",)),
    "all ingresses are killed": Fault(cause=no_ingress, runbooks=("BatonNoIngress",)),
    "a prefill replica stands still": Fault(
        cause=prefill_stands_still, runbooks=("BatonReplicasUnreachable",)
    ),
    "ingresses end while decode stands still": Fault(
        cause=ingresses_end_while_decode_stands_still,
        runbooks=("BatonLeasesExpire",),
        site="slow transfers",
    ),
    "decode stands still for longer than a lease": Fault(
        cause=decode_stands_still_for_longer_than_a_lease,
        runbooks=("BatonPullsVoid",),
        site="slow transfers",
    ),
    "a prefill replica accepts no new connections": Fault(
        cause=side_channel_breaks,
        runbooks=("BatonLinksQuarantined", "BatonTransfersFail"),
        site="slow transfers",
    ),
    "a decode replica opens no new connections": Fault(
        cause=agent_breaks, runbooks=("BatonAgentBroken",), site="slow transfers"
    ),
    "a certificate and a key expire": Fault(
        cause=credentials_expire,
        runbooks=("BatonCredentialsExpire", "BatonCredentialsExpireSoon"),
        site="what expires",
    ),
    "another process takes the GPU's time": Fault(
        cause=another_process_takes_the_time, runbooks=("BatonPredictionOff",)
    ),
    "all caches are lost": Fault(cause=caches_are_lost, runbooks=("BatonHitsDropped",)),
    "the controller stands still": Fault(
        cause=controller_stands_still, runbooks=("BatonTargetDown",)
    ),
}


def guard(folder: Path) -> dict[str, object]:
    """Settings of a deployment whose certificate and only key expire."""
    pair = make_key_pair(folder, "server", valid_for=timedelta(days=1))
    now = datetime.now(UTC)
    key, token = mint("acme", now=now, expires_at=now + timedelta(days=10))
    with edit_key_file(folder / "acme.keys", create=True) as document:
        document.add(key)
    (folder / "key").write_text(token)
    return {
        "security.tls.cert_file": pair.cert,
        "security.tls.key_file": pair.key,
        "tenants.acme.keys_file": folder / "acme.keys",
    }


@pytest.fixture(scope="module")
def baton(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    folder, settings = tmp_path_factory.mktemp("runbooks"), dict(_SITES[request.param])
    if request.param == "what expires":
        settings |= guard(folder)
    with running_deployment("sim.yaml", folder, **settings) as found:
        yield found


def test_every_runbook_is_executed_against_a_fault() -> None:
    executed = [name for fault in FAULTS.values() for name in fault.runbooks]
    assert sorted(executed) == sorted(path.stem for path in RUNBOOKS.glob("*.md"))


@pytest.mark.parametrize(
    ("baton", "fault"),
    [
        pytest.param(site, name, id=name)
        for site in _SITES  # one after the other, for each is a deployment
        for name, fault in FAULTS.items()
        if fault.site == site
    ],
    indirect=["baton"],
    scope="module",
)
def test_the_commands_of_a_runbook_show_the_fault_that_it_is_for(
    fault: str, baton: Deployment, tmp_path: Path
) -> None:
    baton.wait_for(is_whole, 120)
    with FAULTS[fault].cause(baton, tmp_path) as values:
        for command, texts in commands_of(*FAULTS[fault].runbooks).items():
            shown_s = run_until_shown(command, texts, values)
            sys.stdout.write(f"{fault}: {command}: {shown_s:.1f} s: {', '.join(texts)}\n")


def commands_of(*runbooks: str) -> dict[str, tuple[str, ...]]:
    """The distinct commands of some runbooks, each with the texts that any of them names."""
    found: dict[str, tuple[str, ...]] = {}
    for runbook in runbooks:
        for command, text in diagnosis(runbook):
            found[command] = (*found.get(command, ()), text)
    return found
