"""What the command line's verbs do: start, watch, show and end a baton."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import psutil

from baton.config import DeploymentConfig, LoadedConfig, render
from baton.config.derive.options import adapter_rules
from baton.config.derive.start_deadlines import deployment_deadline_s
from baton.config.diff import diff
from baton.control.autoscaling.rollout import RolloutRules
from baton.control.fleet.adapter_registry import Registry, hindrances
from baton.domain.errors import (
    ApplyRefused,
    BatonError,
    EngineStartFailed,
    NotRunning,
    ScalingRefused,
    TimedOut,
)
from baton.serving.cluster.cluster_state import ClusterState, running_clusters, state_folder
from baton.serving.cluster.node_join import joining
from baton.serving.doctor.run import examined
from baton.serving.operator import demo as demonstration
from baton.serving.operator.attached import Joined, join, local_state, meant, reach, state_of
from baton.serving.operator.existing_cluster import (
    deploy_there,
    logs_there,
    named_cluster,
    take_down,
    where_it_runs,
)
from baton.serving.operator.local_deployment import LocalDeployment, Progress, say_where_to_look
from baton.serving.operator.log_files import LogFiles, LogLine, LogOrder, followed, printed
from baton.serving.preflight.checks import check_machine, check_submission
from baton.serving.rollout.apply import apply_config, changed_histograms, restarts, roll_back
from baton.serving.rollout.apply import report as applied_report
from baton.serving.rollout.live_deployment import running_deployment
from baton.serving.rollout.ports import Applied, ApplyOptions
from baton.serving.rollout.rollout import Manner
from baton.serving.rollout.upgrade import upgrade as upgraded
from baton.serving.store.adapter_store import AdapterStore, carried_adapters
from baton.serving.store.config_store import Fate, Kept

Report = Mapping[str, object]
_DEMO_START_S = 600.0
_POLL_S = 0.2
_NODES_POLL_S = 1.0
"""Between looks at the logs of all nodes of a cluster."""
_END_S = 60.0
"""For the process that holds a deployment to end what it started, once it gives up."""


def up(config: LoadedConfig, *, block: bool, timeout_s: float | None, progress: Progress) -> Report:
    """Start a deployment; returns when it is healthy, or with `block` when it was told to end.

    On a cluster that runs already nothing has to hold it: there it returns either way.
    """
    if timeout_s is None:
        timeout_s = deployment_deadline_s(config.config)
    address = named_cluster(config.config, os.environ)
    if address is not None:
        check_submission(config.config, warn=progress)
        with _quiet_stdout():
            url = deploy_there(config.config, address, timeout_s=timeout_s, progress=progress)
        progress(f"serving {config.config.model_name} at {url}/v1; it stays when this command ends")
        return {"endpoint": url, "cluster": address, "end": f"baton down --address {address}"}
    check_machine(config.config, warn=progress)
    if not block:
        return _up_detached(config, timeout_s, progress)
    with _quiet_stdout(), LocalDeployment(config.config, progress) as deployment:
        deployment.start(timeout_s)
        url = deployment.state.http_url
        say_where_to_look(progress)
        progress(f"serving {config.config.model_name} at {url}/v1; Ctrl-C ends it")
        _until_interrupted()
        progress("draining and stopping")
    return {"endpoint": url, "ended": True}


def joined(*, address: str | None) -> AbstractContextManager[Joined]:
    """The deployment here or there, to be asked as often as wanted."""
    return reach(address)


def status(*, address: str | None) -> Report:
    """What runs: the deployment, its replicas as Serve and as each ingress sees them."""
    with reach(address) as deployment:
        return deployment.status()


def explain_route(request_id: str, *, address: str | None) -> Report:
    """How a request was placed, as every ingress that remembers it tells."""
    with reach(address) as deployment:
        return deployment.explain_route(request_id)


def requests(count: int, *, order: str, address: str | None) -> Report:
    """Stories of the last requests of every ingress; `order` is a `RecordOrder`."""
    with reach(address) as deployment:
        return deployment.requests(count, order=order)


def links(*, address: str | None) -> Report:
    """Every pair of replicas between which KV blocks may move, and what is known of it."""
    with reach(address) as deployment:
        return deployment.links()


def scale(pool: str, replicas: int, *, for_s: float | None, address: str | None) -> Report:
    """Have exactly so many replicas of a pool, for a while or, with None, until told."""
    with reach(address) as deployment:
        return _scaled(deployment.scale(pool, replicas, for_s))


def scale_auto(pool: str, *, address: str | None) -> Report:
    """Leave a pool to the autoscaler again."""
    with reach(address) as deployment:
        return _scaled(deployment.scale(pool, None))


def explain_scale(ticks: int, *, address: str | None) -> Report:
    """The last ticks of the autoscaler, oldest first."""
    with reach(address) as deployment:
        return deployment.explain_scale(ticks)


def usage(*, address: str | None) -> Report:
    """What each tenant has used, and what nobody has."""
    with reach(address) as deployment:
        return deployment.usage()


def doctor(config: LoadedConfig | None, *, address: str | None, progress: Progress) -> Report:
    """Everything that can be looked at: this machine, a configuration, what runs."""
    return examined(None if config is None else config.config, address=address, progress=progress)


def logs(
    order: LogOrder, *, follow: bool, progress: Progress, address: str | None = None
) -> Iterator[LogLine | None]:
    """What was logged, and with `follow` what will be; None for nothing new for a moment.

    Of a deployment that this machine holds, on this machine; of another, on all nodes that answer.
    """
    state = state_of(address)
    if state is not None:
        files = LogFiles(Path(state.run_dir) / "session_latest" / "logs")
        yield from followed(files, order, alive=state.is_alive) if follow else printed(files, order)
        return
    with logs_there(meant(address), progress) as there:
        if follow:
            yield from followed(there, order, alive=_always, pause_s=_NODES_POLL_S)
        else:
            yield from printed(there, order)


def _always() -> bool:
    return True


def _scaled(told: Report) -> Report:
    if "refused" in told:
        raise ScalingRefused(str(told["refused"]), str(told["remedy"]))
    return told


def apply(config: LoadedConfig, options: ApplyOptions, *, progress: Progress) -> Report:
    """Have what runs go by another configuration: all of it, or nothing."""
    with join(options.address), running_deployment() as running:
        live, added = running.current(), carried_adapters()
        config = replace(config, config=where_it_runs(config.config, live.config))
        shown = Applied(
            generation=live.generation,
            changes=diff(live.config, config.config),
            histograms=changed_histograms(live.config, config.config),
        )
        if options.diff:
            return applied_report(shown, "shown")
        if not (options.allow_restart and restarts(shown.changes)):
            with running.alone():
                applied = apply_config(running, config.config, _manner("apply", options, progress))
            return applied_report(applied, _outcome("applied", options))
    if state_of(options.address) is None or options.address is not None:
        raise ApplyRefused(
            "only a deployment that this machine holds can be started again from here",
            "apply on the machine that holds it; on a cluster that ran before: 'baton down', then"
            " 'baton up'",
        )
    if options.dry_run:
        return applied_report(shown, "dry run")
    started = _start_again(live.config, config, added, options.timeout_s, progress)
    return applied_report(shown, "restarted") | dict(started)


def rollback(to: int | None, options: ApplyOptions, *, progress: Progress) -> Report:
    """Have what runs go by an earlier configuration; None: the last other one that was good."""
    with join(options.address), running_deployment() as running, running.alone():
        applied = roll_back(running, to, _manner("rollback", options, progress))
    return applied_report(applied, _outcome("applied", options))


def upgrade(options: ApplyOptions, *, progress: Progress) -> Report:
    """Have what runs go by the code and the interpreter of this process."""
    with join(options.address), running_deployment() as running, running.alone():
        applied = upgraded(running, _manner("upgrade", options, progress))
    return applied_report(applied, _outcome("upgraded", options))


def history(*, address: str | None) -> Report:
    """Every configuration that is kept, and what became of it; oldest first."""
    with join(address), running_deployment() as running:
        live, built = running.current(), running.built()
        rows = [asdict(one) for one in running.history()]
    if not rows:  # nothing was applied yet
        rows = [asdict(Kept(generation=live.generation, at_s=None, by="up", fate=Fate.STARTED))]
    return {"generation": live.generation, "baton": built.code, "generations": rows}


def _manner(by: str, options: ApplyOptions, progress: Progress) -> Manner:
    return Manner(
        by=by,
        dry_run=options.dry_run,
        wait=options.wait,
        rollback=options.rollback,
        rules=RolloutRules(bake_s=options.bake_s),
        stage_s=options.timeout_s,
        tell=progress,
    )


def _outcome(done: str, options: ApplyOptions) -> str:
    if options.dry_run:
        return "dry run"
    return done if options.wait else "ordered"


def _start_again(
    old: DeploymentConfig,
    new: LoadedConfig,
    added: Registry,
    timeout_s: float,
    progress: Progress,
) -> Report:
    """Drain and end what runs, start the new; the old one again when that does not work.

    Adapters that were `added` while the old one served are served again.
    """
    progress("draining and ending what runs")
    down(timeout_s=timeout_s)
    try:
        started = _up_detached(new, timeout_s, progress)
    except BatonError as error:
        progress(f"it does not start, going back to what ran: {error}")
        _up_detached(LoadedConfig(config=old, origins={}), timeout_s, progress)
        _add_again(old, added, progress)
        raise ApplyRefused(
            f"what ran before runs again, for the new does not start: {error}",
            "correct the configuration and apply it again",
        ) from error
    _add_again(new.config, added, progress)
    return started


def _add_again(config: DeploymentConfig, added: Registry, progress: Progress) -> None:
    """Have the deployment that was started again serve adapters that no file names."""
    if not added.adapters:
        return
    for adapter, why in hindrances(added, adapter_rules(config)):
        progress(f"adapter {adapter.name!r} is not served: {why}")
    with join(None):
        AdapterStore().add(added)


def join_script(*, labels: Sequence[str], node_address: str | None, address: str | None) -> Report:
    """What another machine runs to join the cluster of the deployment that runs here."""
    if state_of(address) is None:
        raise NotRunning(
            f"the Ray cluster at {meant(address)} is not baton's own",
            f"nodes join it as they always did: ray start --address {meant(address)}",
        )
    return joining(local_state(address), labels=labels, node_address=node_address)


def down(*, timeout_s: float, address: str | None = None) -> Report:
    """Tell the process that holds the deployment to drain and end, and wait until it has.

    From a cluster that somebody else has started, it is taken away, and the cluster goes on.
    """
    state = state_of(address)
    if state is None:
        there = meant(address)
        with _quiet_stdout():
            return {"stopped": take_down(there, timeout_s=timeout_s), "cluster": there}
    holder = psutil.Process(state.pid)
    holder.send_signal(signal.SIGTERM)
    until_s = time.monotonic() + timeout_s
    while _runs(holder):
        if time.monotonic() > until_s:
            raise TimedOut(
                f"process {state.pid} had not ended after {timeout_s:.0f} s",
                "it waits for open streams; allow more time with --timeout",
            )
        time.sleep(_POLL_S)
    return {"stopped": state.http_url, "pid": state.pid}


def demo(config: LoadedConfig, *, once: bool, progress: Progress) -> Report:
    """Start a deployment, show a few requests, and stay up unless `once`."""
    check_machine(config.config, warn=progress)
    with _quiet_stdout(), LocalDeployment(config.config, progress) as deployment:
        deployment.start(_DEMO_START_S)
        asked = demonstration.send_prompts(deployment, config.config.model_name, progress)
        figures = demonstration.summary(asked)
        if not once:
            say_where_to_look(progress)
            _show_how_to_go_on(deployment.state, config.config.model_name, progress)
            _until_interrupted()
        progress("stopping")
    failed = [one.problem for one in asked if not one.ok]
    if failed:
        raise BatonError(f"{len(failed)} of {len(asked)} requests failed: {failed[0]}")
    return figures


@contextmanager
def _quiet_stdout() -> Iterator[None]:
    """Keep stdout for our report: Ray, in Python and in C++, prints there what it complains of."""
    sys.stdout.flush()
    ours = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(ours, 1)
        os.close(ours)


def _show_how_to_go_on(state: ClusterState, model: str, progress: Progress) -> None:
    progress(f"the endpoint stays up at {state.http_url}/v1 until Ctrl-C; for example:")
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    progress(
        f"  curl {state.http_url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d '{body}'"
    )


def _until_interrupted() -> None:
    """Block until Ctrl-C or SIGTERM, and take either for the wish to end in good order."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        while True:
            signal.pause()
    except KeyboardInterrupt:
        return
    finally:
        signal.signal(signal.SIGTERM, before)


def _up_detached(config: LoadedConfig, timeout_s: float, progress: Progress) -> Report:
    """Have another process hold the deployment, and wait until it says that it is healthy."""
    folder = Path(tempfile.mkdtemp(prefix="baton-up-", dir=state_folder()))
    effective, log = folder / "config.yaml", folder / "up.log"
    effective.write_text(render(config.config))
    command = [sys.executable, "-m", "baton.cli.main", "up", "-c", str(effective)]
    command += ["--timeout", f"{timeout_s:.3f}s"]
    with log.open("wb") as output:
        holder = subprocess.Popen(  # noqa: S603 - this program again, with our own arguments
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            # What these say is in the effective configuration already.
            env={k: v for k, v in os.environ.items() if not k.startswith("BATON__")},
        )
    progress(f"process {holder.pid} holds the deployment; its output goes to {log}")
    # It says itself when its time is up, with what it waited for, and ends what it has started.
    until_s = time.monotonic() + timeout_s + _END_S
    while time.monotonic() < until_s:
        if holder.poll() is not None:
            raise _told_by(log.read_text(errors="replace").splitlines(), log)
        if "serving " in log.read_text(errors="replace"):
            state = next(
                state for state in running_clusters(state_folder()) if state.pid == holder.pid
            )
            return {"endpoint": state.http_url, "pid": holder.pid, "log": str(log)}
        time.sleep(_POLL_S)
    holder.terminate()
    raise TimedOut(f"not healthy after {timeout_s:.0f} s", f"read {log}")


def _told_by(lines: Sequence[str], log: Path) -> EngineStartFailed:
    """What a holder that has ended complained of, and what it said to do."""
    why = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    remedy = [line.removeprefix("next: ") for line in lines if line.startswith("next: ")]
    return EngineStartFailed(
        "\n".join(why) or "it ended at once", "; ".join([*remedy[-1:], f"its output is in {log}"])
    )


def _runs(process: psutil.Process) -> bool:
    """Whether a process does anything; one that waits for its parent to notice its end does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
