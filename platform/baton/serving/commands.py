"""The verbs of the command line: start, watch, show and end a deployment."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import psutil

from baton.config import DeploymentConfig, LoadedConfig, render
from baton.config.derive.options import adapter_rules
from baton.config.derive.start_deadlines import deployment_deadline_s
from baton.config.diff import diff
from baton.control.autoscaling.rollout import RolloutRules
from baton.control.fleet.adapter_registry import AdapterRegistry, unserved_adapters
from baton.domain.errors import (
    ApplyRejected,
    BatonError,
    ConfigInvalid,
    EngineStartFailed,
    NotRunning,
    ScalingRejected,
    TimedOut,
)
from baton.runtime.process.progress import Progress, RepeatedProgress
from baton.serving.checks.endpoint import Client
from baton.serving.checks.start import check_machine, check_submission, placement_warnings
from baton.serving.cluster.cluster_state import ClusterState, running_clusters, state_folder
from baton.serving.cluster.local_cluster import check_store_address
from baton.serving.cluster.node_join import join_instructions
from baton.serving.doctor import run_checks
from baton.serving.operator import demo as demonstration
from baton.serving.operator.attached import (
    AttachedCluster,
    attach_deployment,
    connect_deployment,
    find_local_state,
    local_state,
    remote_address,
)
from baton.serving.operator.existing_cluster import (
    cluster_address,
    cluster_logs,
    deploy_to_cluster,
    undeploy,
    with_live_cluster,
)
from baton.serving.operator.local_deployment import LocalDeployment, announce_observability
from baton.serving.operator.log_files import (
    LogFiles,
    LogLine,
    LogQuery,
    follow_lines,
    last_lines,
)
from baton.serving.rollout.apply import (
    apply_config,
    changed_histograms,
    restart_changes,
    roll_back,
    shown_changes,
)
from baton.serving.rollout.apply import report as applied_report
from baton.serving.rollout.live_deployment import open_live_deployment
from baton.serving.rollout.ports import ApplyOptions, ApplyResult
from baton.serving.rollout.rollout import RolloutOptions
from baton.serving.rollout.upgrade import upgrade as upgraded
from baton.serving.store.adapter_store import AdapterStore, active_adapters
from baton.serving.store.config_store import (
    STARTED_BY_KEY,
    GenerationRecord,
    GenerationStatus,
    load,
)

Report = Mapping[str, object]
_DEMO_START_TIMEOUT_S = 600.0
_POLL_S = 0.2
_PROGRESS_LINE = re.compile(r"\[ *\d+\.\d+s\] (?P<line>.*)")
"""Of `cli.output.ProgressLines`."""
_NODES_POLL_S = 1.0
_EXIT_TIMEOUT_S = 60.0
"""For the process that owns a deployment to clean up after a timeout."""


def up(config: LoadedConfig, *, block: bool, timeout_s: float | None, progress: Progress) -> Report:
    """Start a deployment; returns when it is healthy, or with `block` after SIGINT or SIGTERM.

    On an existing cluster it returns when it is healthy: no process needs to stay.
    """
    if timeout_s is None:
        timeout_s = deployment_deadline_s(config.config)
    address = cluster_address(config.config, os.environ)
    if address is not None:
        check_submission(config.config, warn=progress)
        repeated = RepeatedProgress(progress)
        with _quiet_stdout(), repeated.repeating():
            url = deploy_to_cluster(config.config, address, timeout_s=timeout_s, progress=repeated)
        progress(f"serving {config.config.model_name} at {url}/v1; it stays when this command ends")
        return {"endpoint": url, "cluster": address, "end": f"baton down --address {address}"}
    check_machine(config.config, warn=progress)
    if not block:
        return _up_detached(config, timeout_s, progress)
    with _quiet_stdout(), LocalDeployment(config.config, progress) as deployment:
        deployment.start(timeout_s)
        url = deployment.state.http_url
        announce_observability(progress)
        progress(f"serving {config.config.model_name} at {url}/v1; Ctrl-C ends it")
        _wait_for_interrupt()
    return {"endpoint": url, "ended": True}


def attach(*, address: str | None) -> AbstractContextManager[AttachedCluster]:
    """A connection to the deployment, for any number of queries."""
    return connect_deployment(address)


def status(*, address: str | None) -> Report:
    """The deployment, its replicas as Serve and as each ingress sees them."""
    with connect_deployment(address) as deployment:
        return deployment.status()


def explain_route(request_id: str, *, address: str | None) -> Report:
    """How a request was placed, from every ingress that remembers it."""
    with connect_deployment(address) as deployment:
        return deployment.explain_route(request_id)


def requests(count: int, *, order: str, address: str | None) -> Report:
    """Reports of the last requests of every ingress; `order` is a `RecordSelection`."""
    with connect_deployment(address) as deployment:
        return deployment.requests(count, order=order)


def links(*, address: str | None) -> Report:
    """The state of every pair of replicas between which KV blocks may move."""
    with connect_deployment(address) as deployment:
        return deployment.links()


def scale(pool: str, replicas: int, *, for_s: float | None, address: str | None) -> Report:
    """Set the replicas of a pool for `for_s` seconds; None: until released."""
    with connect_deployment(address) as deployment:
        return _raise_if_rejected(deployment.scale(pool, replicas, for_s))


def scale_auto(pool: str, *, address: str | None) -> Report:
    """Leave a pool to the autoscaler again."""
    with connect_deployment(address) as deployment:
        return _raise_if_rejected(deployment.scale(pool, None))


def explain_scale(ticks: int, *, address: str | None) -> Report:
    """The last ticks of the autoscaler, oldest first."""
    with connect_deployment(address) as deployment:
        return deployment.explain_scale(ticks)


def usage(*, address: str | None) -> Report:
    """The usage of each tenant, overhead and idle time."""
    with connect_deployment(address) as deployment:
        return deployment.usage()


def doctor(  # noqa: PLR0913 - each is an option
    config: LoadedConfig | None,
    *,
    address: str | None,
    progress: Progress,
    on_checks: Callable[[Report], None],
    url: str | None = None,
    headers: Mapping[str, str] | None = None,
    ca_file: Path | None = None,
) -> Report:
    """All checks: of the running deployment, this machine, and a configuration."""
    if address is not None and find_local_state(address) is None:
        check_store_address(address)
    return run_checks(
        None if config is None else config.config,
        address=address,
        progress=progress,
        on_checks=on_checks,
        client=Client(url=url, headers=headers or {}, ca_file=ca_file),
    )


def logs(
    query: LogQuery, *, follow: bool, progress: Progress, address: str | None = None
) -> Iterator[LogLine | None]:
    """Existing log lines and, with `follow`, new lines; None after a moment without any.

    Of a local deployment from this machine's files, else from all nodes that answer.
    """
    state = find_local_state(address)
    if state is not None:
        files = LogFiles(Path(state.run_dir) / "session_latest" / "logs")
        yield from (
            follow_lines(files, query, is_alive=state.is_alive)
            if follow
            else last_lines(files.read(query), query)
        )
        return
    with cluster_logs(remote_address(address), progress) as node_logs:
        if follow:
            yield from follow_lines(node_logs, query, is_alive=lambda: True, pause_s=_NODES_POLL_S)
        else:
            yield from last_lines(node_logs.read(query), query)


def _raise_if_rejected(result: Report) -> Report:
    if "rejected" in result:
        raise ScalingRejected(str(result["rejected"]), str(result["remedy"]))
    return result


def apply(config: LoadedConfig, options: ApplyOptions, *, progress: Progress) -> Report:
    """Change the configuration of the running deployment: all of it, or nothing."""
    repeated = RepeatedProgress(progress)
    with repeated.repeating("asking the deployment"):
        return _apply(config, options, repeated)


def _apply(config: LoadedConfig, options: ApplyOptions, progress: Progress) -> Report:
    with attach_deployment(options.address), open_live_deployment() as deployment:
        live, registry = deployment.current(), active_adapters()
        config = replace(config, config=with_live_cluster(config.config, live.config))
        for warning in placement_warnings(config.config):
            progress(f"warning: {warning}")
        preview = ApplyResult(
            generation=live.generation,
            changes=diff(live.config, config.config),
            histograms=changed_histograms(live.config, config.config),
        )
        if options.diff:
            return applied_report(preview, "shown")
        if not (options.allow_restart and restart_changes(preview.changes)):
            with deployment.exclusive():
                applied = apply_config(
                    deployment, config.config, _rollout_options("apply", options, progress)
                )
            return applied_report(applied, _outcome("applied", options))
    if find_local_state(options.address) is None or options.address is not None:
        raise ApplyRejected(
            "only a deployment that this machine holds can be started again from here",
            "apply on the machine that holds it; on a cluster that ran before: 'baton down', then"
            " 'baton up'",
        )
    if options.dry_run:
        return applied_report(preview, "dry run")
    started = _restart(live.config, config, registry, options.timeout_s, progress)
    return applied_report(preview, "restarted") | dict(started)


def rollback(to: int | None, options: ApplyOptions, *, progress: Progress) -> Report:
    """Return to an earlier configuration; None: the last other one with a good result."""
    repeated = RepeatedProgress(progress)
    with (
        repeated.repeating("asking the deployment"),
        attach_deployment(options.address),
        open_live_deployment() as deployment,
        deployment.exclusive(),
    ):
        applied = roll_back(deployment, to, _rollout_options("rollback", options, repeated))
    return applied_report(applied, _outcome("applied", options))


def upgrade(options: ApplyOptions, *, progress: Progress) -> Report:
    """Replace what runs by the code and interpreter of this process."""
    repeated = RepeatedProgress(progress)
    with (
        repeated.repeating("asking the deployment"),
        attach_deployment(options.address),
        open_live_deployment() as deployment,
        deployment.exclusive(),
    ):
        applied = upgraded(deployment, _rollout_options("upgrade", options, repeated))
    return applied_report(applied, _outcome("upgraded", options))


def history(*, address: str | None) -> Report:
    """All stored configurations with their outcomes, oldest first."""
    with attach_deployment(address), open_live_deployment() as deployment:
        live, record = deployment.current(), deployment.build_record()
        rows = history_rows(deployment.history(), deployment.find)
        author = (load(STARTED_BY_KEY) or b"").decode()
    if not rows:  # nothing was applied yet
        rows = [
            asdict(
                GenerationRecord(
                    generation=live.generation,
                    at_s=None,
                    operation="up",
                    status=GenerationStatus.STARTED,
                    author=author,
                )
            )
            | {"changes": None}
        ]
    return {"generation": live.generation, "baton": record.code, "generations": rows}


def history_rows(
    records: Iterable[GenerationRecord], find: Callable[[int], DeploymentConfig | None]
) -> list[dict[str, object]]:
    """Each generation with its changes against the one before, as lines; None where unknown."""
    rows: list[dict[str, object]] = []
    previous: DeploymentConfig | None = None
    for record in records:
        try:
            config = find(record.generation)
        except ConfigInvalid:  # another version of baton wrote it
            config = None
        changes = None
        if previous is not None and config is not None:
            changes = [str(change) for change in shown_changes(diff(previous, config))]
        rows.append(asdict(record) | {"changes": changes})
        previous = config
    return rows


def running_config(*, address: str | None) -> tuple[int, DeploymentConfig]:
    """The generation that runs, and its configuration."""
    with attach_deployment(address), open_live_deployment() as deployment:
        live = deployment.current()
    return live.generation, live.config


def _rollout_options(operation: str, options: ApplyOptions, progress: Progress) -> RolloutOptions:
    return RolloutOptions(
        operation=operation,
        dry_run=options.dry_run,
        wait=options.wait,
        rollback=options.rollback,
        rules=RolloutRules(bake_s=options.bake_s),
        stage_timeout_s=options.timeout_s,
        on_progress=progress,
    )


def _outcome(label: str, options: ApplyOptions) -> str:
    if options.dry_run:
        return "dry run"
    return label if options.wait else "ordered"


def _restart(
    old: DeploymentConfig,
    new: LoadedConfig,
    registry: AdapterRegistry,
    timeout_s: float,
    progress: Progress,
) -> Report:
    """Drain and end the running deployment, start the new one; start the old again if that fails.

    The adapters in `registry` are served again.
    """
    progress("draining and ending what runs")
    down(timeout_s=timeout_s)
    try:
        started = _up_detached(new, timeout_s, progress)
    except BatonError as error:
        progress(f"it does not start, going back to what ran: {error}")
        _up_detached(LoadedConfig(config=old, origins={}), timeout_s, progress)
        _restore_adapters(old, registry, progress)
        raise ApplyRejected(
            f"the previous configuration runs again, for the new does not start: {error}",
            "correct the configuration and apply it again",
        ) from error
    _restore_adapters(new.config, registry, progress)
    return started


def _restore_adapters(
    config: DeploymentConfig, registry: AdapterRegistry, progress: Progress
) -> None:
    if not registry.adapters:
        return
    for adapter, reason in unserved_adapters(registry, adapter_rules(config)):
        progress(f"adapter {adapter.name!r} is not served: {reason}")
    with attach_deployment(None):
        AdapterStore().add(registry)


def join_script(*, labels: Sequence[str], node_address: str | None, address: str | None) -> Report:
    """A script with which another machine joins the local cluster."""
    if find_local_state(address) is None:
        check_store_address(remote_address(address))
        raise NotRunning(
            f"the Ray cluster at {remote_address(address)} is not baton's own",
            f"nodes join it as they always did: ray start --address {remote_address(address)}",
        )
    return join_instructions(local_state(address), labels=labels, node_address=node_address)


def down(*, timeout_s: float, address: str | None = None) -> Report:
    """Have the owner of the deployment drain and end, and wait until it has.

    From an existing cluster only the application is removed.
    """
    state = find_local_state(address)
    if state is None:
        cluster = remote_address(address)
        with _quiet_stdout():
            return {"stopped": undeploy(cluster, timeout_s=timeout_s), "cluster": cluster}
    owner_process = psutil.Process(state.pid)
    owner_process.send_signal(signal.SIGTERM)
    until_s = time.monotonic() + timeout_s
    while _is_alive(owner_process):
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
        deployment.start(_DEMO_START_TIMEOUT_S)
        results = demonstration.send_prompts(deployment, config.config.model_name, progress)
        figures = demonstration.summary(results)
        if not once:
            announce_observability(progress)
            _show_next_steps(deployment.state, config.config.model_name, progress)
            _wait_for_interrupt()
    failed = [result.error for result in results if not result.ok]
    if failed:
        raise BatonError(f"{len(failed)} of {len(results)} requests failed: {failed[0]}")
    return figures


@contextmanager
def _quiet_stdout() -> Iterator[None]:
    """Keep stdout for the report: Ray prints complaints there, in Python and in C++."""
    sys.stdout.flush()
    saved_fd = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved_fd, 1)
        os.close(saved_fd)


def _show_next_steps(state: ClusterState, model: str, progress: Progress) -> None:
    progress(f"the endpoint stays up at {state.http_url}/v1 until Ctrl-C; for example:")
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    progress(
        f"  curl {state.http_url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d '{body}'"
    )


def _wait_for_interrupt() -> None:
    """Block until Ctrl-C or SIGTERM; both end the deployment in good order."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    previous_handler = signal.signal(signal.SIGTERM, interrupt)
    try:
        while True:
            signal.pause()
    except KeyboardInterrupt:
        return
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def _up_detached(config: LoadedConfig, timeout_s: float, progress: Progress) -> Report:
    """Start a process that owns the deployment, and wait until it reports health."""
    folder = Path(tempfile.mkdtemp(prefix="baton-up-", dir=state_folder()))
    effective, log = folder / "config.yaml", folder / "up.log"
    effective.write_text(render(config.config))
    command = [sys.executable, "-m", "baton.cli.main", "up", "-c", str(effective)]
    command += ["--timeout", f"{timeout_s:.3f}s"]
    with log.open("wb") as output:
        owner_process = subprocess.Popen(  # noqa: S603 - this program again, with our own arguments
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            # The effective configuration contains the values of these variables.
            env={k: v for k, v in os.environ.items() if not k.startswith("BATON__")},
        )
    progress(f"process {owner_process.pid} holds the deployment; its output goes to {log}")
    # After its own timeout the process says why, and ends what it has started.
    until_s = time.monotonic() + timeout_s + _EXIT_TIMEOUT_S
    shown_lines = 0
    while time.monotonic() < until_s:
        lines = _progress_lines(log)
        for line in lines[shown_lines:]:
            progress(line)
        shown_lines = len(lines)
        if owner_process.poll() is not None:
            raise _startup_failure(log.read_text(errors="replace").splitlines(), log)
        if "serving " in log.read_text(errors="replace"):
            state = next(
                state
                for state in running_clusters(state_folder())
                if state.pid == owner_process.pid
            )
            return {"endpoint": state.http_url, "pid": owner_process.pid, "log": str(log)}
        time.sleep(_POLL_S)
    owner_process.terminate()
    raise TimedOut(f"not healthy after {timeout_s:.0f} s", f"read {log}")


def _progress_lines(log: Path) -> list[str]:
    """The owner's complete lines of progress before it serves, without their seconds."""
    complete_lines = log.read_text(errors="replace").split("\n")[:-1]
    matches = (_PROGRESS_LINE.fullmatch(line) for line in complete_lines)
    texts = [match["line"] for match in matches if match is not None]
    return [text for text in texts if not text.startswith("serving ")]


def _startup_failure(lines: Sequence[str], log: Path) -> EngineStartFailed:
    reason = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    remedy = [line.removeprefix("next: ") for line in lines if line.startswith("next: ")]
    return EngineStartFailed(
        "\n".join(reason) or "it ended at once",
        "; ".join([*remedy[-1:], f"its output is in {log}"]),
    )


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
