"""Start, join and end the Ray cluster of a deployment.

Theory of operation: `LocalCluster` owns one Ray session in a run directory of its own. It sets the
data path's environment *before* Ray starts, because Ray Serve reads it when imported, in every
process. `stop` asks Serve to stop its replicas, then ends Ray, then all processes that remain. If
this process is killed, the guardian of `reaper` does the last step. `attach` joins an existing
cluster, and never ends it.

Ray ends its head processes when the *thread* that started them ends: call `start` in a thread that
lives as long as the cluster, such as the main thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import psutil

from baton.config.schema.security import TlsConfig
from baton.domain.errors import ClusterFailed
from baton.domain.names.addresses import (
    connectable_host,
    format_address,
    format_endpoint,
    is_loopback,
    is_loopback_address,
    parse_address,
)
from baton.engine.gpus import mig_devices
from baton.serving.cluster import reaper
from baton.serving.cluster.cluster_state import (
    ClusterState,
    process_start_ticks,
    remove_state,
    state_folder,
    write_state,
)
from baton.serving.cluster.failed_start_logs import archive_logs, failures_folder
from baton.serving.cluster.node_join import save_environment
from baton.serving.front.data_path import (
    DataPath,
    FrontPorts,
    FrontSettings,
    choose_data_path,
    pick_front_ports,
    port_is_free,
    ray_environment,
    serve_environment,
)
from baton.serving.front.haproxy_hardening import harden_front, real_haproxy_environment
from baton.serving.front.public_port import reserve_port
from baton.serving.ray import serve_control
from baton.serving.ray.driver import (
    check_serve_not_imported,
    hide_serve_messages,
    hide_unfinished_tasks,
    redirect_ray_messages,
    reload_environment,
    run_handles_in_own_loop,
)

_LOGGER = logging.getLogger(__name__)
NAMESPACE = "baton"
_LOOPBACK = "127.0.0.1"
_RAY_ADDRESS_KEYWORDS = frozenset({"auto", "local"})
_GREETING_TIMEOUT_S = 2.5
"""To find, connect to and hear from a store. With the start of a command, an address is refused
within about 3 s."""
_STORE_PROCESS = "gcs_server"
_FRAME_HEADER_BYTES = 9
_FRAME_TYPE = 3
_SETTINGS = b"\x04"
"""Of an HTTP/2 frame: the length of its header, where its type is, and the type of settings."""
_OBJECT_STORE_BYTES = 128 * 1024 * 1024
"""Nothing large travels through Ray's object store; Ray's least is 75 MiB."""
_MAX_RUN_DIR_CHARS = 24
"""So that a socket's path below it, with Ray's session name, stays within 107 bytes."""
_RAY_SHUTDOWN_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """Settings of a local cluster."""

    http_host: str
    http_port: int
    node_address: str = _LOOPBACK
    """Address of this node for other nodes; loopback keeps Ray to this machine."""
    cpus: float | None = None
    """Logical CPUs for replicas; None: the number of cores."""
    gpus: float | None = None
    data_path: DataPath | None = None
    """None: HAProxy where it runs, else Serve's Python proxy."""
    max_stream_s: float = 600.0
    environment: Mapping[str, str] = field(default_factory=dict)
    tls: TlsConfig = field(default_factory=TlsConfig)
    front_threads: int = 1
    """Of Ray Serve's HAProxy."""


def ignore_progress(_line: str) -> None:
    """A progress display that shows nothing."""


class LocalCluster:
    """A Ray cluster on this machine that lives as long as this process, or until `stop`."""

    def __init__(
        self, settings: ClusterSettings, *, progress: Callable[[str], None] = ignore_progress
    ) -> None:
        self._settings = settings
        self._progress = progress
        self._run_dir: Path | None = None
        self._guardian: subprocess.Popen[bytes] | None = None
        self._serve_started = False
        self._port_reservation: socket.socket | None = None
        """The public port, where gates share it."""
        self._state: ClusterState | None = None
        self._archive_folder: Path | None = None

    def archive_logs_on_stop(self, folder: Path) -> Path | None:
        """Have `stop` keep the logs below a folder, to diagnose a failed start.

        Returns:
            The future folder of the logs; None if no process was started.
        """
        if self._run_dir is None:
            return None
        self._archive_folder = folder
        return folder / self._run_dir.name

    @property
    def state(self) -> ClusterState:
        """The state file's content.

        Raises:
            ClusterFailed: the cluster does not run.
        """
        if self._state is None:
            raise ClusterFailed("the local cluster does not run", "start it first")
        return self._state

    def start(self) -> ClusterState:
        """Start Ray, the Serve controller and HAProxy; blocks for seconds.

        Raises:
            ClusterFailed: a step failed; no process remains.
        """
        if self._run_dir is not None:
            raise ClusterFailed("the local cluster was started before", "make a new LocalCluster")
        try:
            self._start()
        except BaseException as error:
            # KeyboardInterrupt too: Ctrl-C during the start must leave no process.
            is_start_failure = isinstance(error, RuntimeError | OSError | ValueError)
            archive = self.archive_logs_on_stop(failures_folder()) if is_start_failure else None
            self.stop(serve_timeout_s=0.0)
            if is_start_failure:
                archive_hint = (
                    f", and the logs in {archive}"
                    if archive is not None and archive.is_dir()
                    else ""
                )
                raise ClusterFailed(
                    f"the local cluster did not start: {type(error).__name__}: {error}",
                    "see whether this machine has memory and disk left, the lines above"
                    + archive_hint,
                ) from error
            raise
        return self.state

    def _start(self) -> None:
        settings = self._settings
        host = settings.http_host
        data_path = self._choose_data_path()
        self._reserve_port(data_path)
        self._run_dir = run_dir = make_run_dir()
        ports = pick_front_ports()
        self._apply_environment(run_dir, data_path, ports)
        self._guardian = reaper.start_guardian(
            str(run_dir), str(state_folder() / f"{run_dir.name}.json")
        )
        self._progress("starting Ray")
        with _mark_children(run_dir), _preserve_sigterm_handler():
            address, session_name = _init_ray(run_dir, settings)
        self._progress("starting Ray Serve")
        self._serve_started = True
        scheme = "http" if settings.tls.cert_file is None else "https"
        # Behind HAProxy, Serve listens on loopback: `haproxy_wrapper` moves HAProxy to the public
        # address. Where gates listen, Serve does not get the public port.
        serve_host = host if data_path is DataPath.SERVE_PROXY else _LOOPBACK
        uses_gate = data_path is DataPath.INGRESS_HAPROXY
        _start_serve(serve_host, ports.fallback_http if uses_gate else settings.http_port)
        self._state = ClusterState(
            name=run_dir.name,
            pid=os.getpid(),
            pid_started_at_s=psutil.Process().create_time(),
            pid_started_ticks=process_start_ticks(os.getpid()),
            address=address,
            namespace=NAMESPACE,
            http_url=format_endpoint(scheme, connectable_host(host), settings.http_port),
            data_path=data_path,
            run_dir=str(run_dir),
            session_name=session_name,
            token_file=str(run_dir / "token"),
            cert_file=settings.tls.cert_file,
        )
        write_state(self._state, state_folder())

    def _choose_data_path(self) -> DataPath:
        choice = choose_data_path(os.environ)
        requested = self._settings.data_path
        if requested is DataPath.INGRESS_HAPROXY and choice.data_path is not DataPath.SERVE_HAPROXY:
            raise ClusterFailed(
                f"server.listener is 'ingress', and there can be none: {choice.warning}",
                "put that right, or use server.listener 'ray-serve' and server.api_server 'python'",
            )
        if choice.warning is not None and requested in {None, choice.data_path}:
            self._progress(choice.warning)
        return requested or choice.data_path

    def _reserve_port(self, data_path: DataPath) -> None:
        host, port = self._settings.http_host, self._settings.http_port
        if data_path is DataPath.INGRESS_HAPROXY:
            self._port_reservation = reserve_port(host, port)
        elif not port_is_free(host, port):
            raise ClusterFailed(
                f"cannot listen on {format_address(host, port)}: the port is in use",
                "stop the process that listens there, or set server.port",
            )

    def _apply_environment(self, run_dir: Path, data_path: DataPath, ports: FrontPorts) -> None:
        front = FrontSettings(
            data_path=data_path,
            run_dir=run_dir,
            ports=ports,
            max_stream_s=self._settings.max_stream_s,
            threads=self._settings.front_threads,
        )
        token_file = run_dir / "token"
        token_file.touch(mode=0o600)
        token_file.write_text(secrets.token_hex(32))
        environment = serve_environment(front) | ray_environment(
            token_file, loopback=is_loopback(self._settings.node_address)
        )
        extra = dict(self._settings.environment)
        os.environ.update(environment | self._harden_front(front) | extra)
        save_environment(run_dir, environment | extra)
        check_serve_not_imported()

    def _harden_front(self, front: FrontSettings) -> dict[str, str]:
        if front.data_path is DataPath.INGRESS_HAPROXY:
            return {}  # gates guard the port themselves
        return harden_front(
            os.environ, front, host=self._settings.http_host, tls=self._settings.tls
        )

    def stop(self, *, serve_timeout_s: float = 20.0) -> frozenset[int]:
        """End everything that this object started; idempotent.

        Replicas get `serve_timeout_s` to drain. Returns the ids of processes that survived SIGKILL.
        """
        run_dir, self._run_dir = self._run_dir, None
        reservation, self._port_reservation = self._port_reservation, None
        with reservation or contextlib.nullcontext():
            return frozenset() if run_dir is None else self._stop(run_dir, serve_timeout_s)

    def _stop(self, run_dir: Path, serve_timeout_s: float) -> frozenset[int]:
        if self._serve_started and serve_timeout_s > 0:
            self._progress("draining and stopping replicas")
            _run_with_timeout(
                serve_timeout_s + 1.0,
                "stopping replicas",
                lambda: serve_control.stop_serve(serve_timeout_s),
            )
        self._progress("stopping Ray")
        if "ray" in sys.modules:
            _run_with_timeout(_RAY_SHUTDOWN_TIMEOUT_S, "stopping Ray", _shutdown_ray)
        os.environ.update(real_haproxy_environment(run_dir))
        survivors = reaper.reap(str(run_dir), grace_s=2.0)
        if survivors:
            _LOGGER.error("processes of %s could not be ended: %s", run_dir, sorted(survivors))
        else:
            if self._archive_folder is not None:
                try:
                    archive_logs(run_dir, self._archive_folder)
                except OSError as error:  # a full disk, which may also be why the start failed
                    _LOGGER.warning("the logs of %s could not be kept: %s", run_dir, error)
            shutil.rmtree(run_dir, ignore_errors=True)
        remove_state(run_dir.name, state_folder())
        self._end_guardian()
        self._state = None
        self._serve_started = False
        return survivors

    def _end_guardian(self) -> None:
        guardian, self._guardian = self._guardian, None
        if guardian is None or guardian.stdin is None:
            return
        # Its work is done: at the end of its input it ends.
        guardian.stdin.close()
        try:
            guardian.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            guardian.kill()
            guardian.wait()


def attach(address: str, *, token_file: str | None = None) -> None:
    """Join a running cluster as a driver; `detach` leaves it running.

    Args:
        address: `host:port` of Ray's control store.
        token_file: The cluster's token, if not where Ray looks by itself.

    Raises:
        ClusterFailed: nothing answers there, or it refuses the token.
    """
    check_store_address(address)
    if token_file is not None:
        os.environ.update(ray_environment(Path(token_file), loopback=is_loopback_address(address)))
    elif not is_loopback_address(address):
        os.environ.pop("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", None)
    run_handles_in_own_loop()
    import ray

    redirect_ray_messages()
    reload_environment(loopback=is_loopback_address(address))
    try:
        with _preserve_sigterm_handler():
            ray.init(
                address=address,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.WARNING,
            )
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ClusterFailed(
            f"cannot join the Ray cluster at {address}: {error}",
            f"check that it runs ('ray status --address {address}'), and that RAY_AUTH_TOKEN_PATH"
            " names its token",
        ) from error


def check_store_address(address: str) -> None:
    """Check that the store of a Ray cluster listens at an address.

    Keywords such as `auto` pass. Ray Client's server, at `ray://`, greets as the store does.

    Raises:
        ClusterFailed: Ray would split it at the wrong colon, or would wait there for minutes.
    """
    if address in _RAY_ADDRESS_KEYWORDS:
        return
    try:
        parsed_address = parse_address(address)
    except ValueError as error:
        raise ClusterFailed(
            f"the address of a Ray cluster: {error}", "correct --address"
        ) from error
    remedy = "give the address that 'ray start' or 'baton join' printed, not that of the endpoint"
    if "://" in address and not address.startswith("ray://"):
        raise ClusterFailed(
            f"--address: got {address}, where no deployment of this machine is, expected HOST:PORT"
            " of the store of a Ray cluster",
            remedy,
        )
    try:  # Ray would try for minutes, and not hear Ctrl-C
        greeting = _greeting(parsed_address.host, parsed_address.port)
    except OSError as error:
        raise ClusterFailed(
            f"nothing answers at {address}, where a Ray cluster was to be: {error}",
            f"check the address, and that Ray runs there: 'ray status --address {address}'",
        ) from error
    if os.environ.get("RAY_USE_TLS", "0").lower() in {"1", "true"}:
        return  # the store greets after a handshake
    if not greeting and _is_store_here(parsed_address.port):
        return  # on a busy machine, the store may take longer
    if greeting[_FRAME_TYPE : _FRAME_TYPE + 1] != _SETTINGS:
        listener = "an HTTP server" if greeting.startswith(b"HTTP/") else "another program"
        no_reply = "" if greeting else f"; no reply in {_GREETING_TIMEOUT_S:g} s"
        raise ClusterFailed(
            f"--address: got {address}, where {listener} listens, expected the store of a Ray"
            f" cluster{no_reply}",
            remedy,
        )


def _is_store_here(port: int) -> bool:
    """Whether a store of this machine listens at a port."""
    for connection in psutil.net_connections(kind="tcp"):
        is_listener = connection.status == psutil.CONN_LISTEN
        if is_listener and getattr(connection.laddr, "port", None) == port:
            with contextlib.suppress(psutil.Error, ValueError):
                return psutil.Process(connection.pid).name() == _STORE_PROCESS
    return False


def _greeting(host: str, port: int) -> bytes:
    """The first bytes that a server answers to an HTTP/1.1 request.

    A gRPC server, such as Ray's store, begins with its settings after any request. Source: RFC
    9113, 3.4.

    Raises:
        OSError: the host has no address, or nothing listens there, within the timeout.
    """
    deadline_s = time.monotonic() + _GREETING_TIMEOUT_S
    resolved_host = _resolve(host, timeout_s=_GREETING_TIMEOUT_S)
    greeting = b""
    connect_timeout_s = max(0.01, deadline_s - time.monotonic())
    with socket.create_connection((resolved_host, port), timeout=connect_timeout_s) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: baton\r\nConnection: close\r\n\r\n")
        while len(greeting) < _FRAME_HEADER_BYTES:
            connection.settimeout(max(0.01, deadline_s - time.monotonic()))
            try:
                received = connection.recv(_FRAME_HEADER_BYTES - len(greeting))
            except OSError:  # it says nothing, or has closed the connection
                break
            if not received:
                break
            greeting += received
    return greeting


def _resolve(host: str, *, timeout_s: float) -> str:
    """An address of a host.

    In a thread, because a resolver waits for its servers, deaf to Ctrl-C.

    Raises:
        OSError: it has none, or the resolver does not answer in time.
    """
    results: list[str | OSError] = []

    def resolve() -> None:
        try:
            results.append(str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]))
        except OSError as error:
            results.append(error)
        except UnicodeError as error:  # a part of the name is too long
            results.append(OSError(str(error)))

    thread = threading.Thread(target=resolve, name="resolve", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not results:
        raise TimeoutError(f"the name was not resolved within {timeout_s:g} s")
    if isinstance(results[0], OSError):
        raise results[0]
    return results[0]


def detach() -> None:
    """Leave the cluster that `attach` joined."""
    hide_unfinished_tasks()
    _shutdown_ray()


def make_run_dir() -> Path:
    """A new directory with a short path, readable by this user only."""
    parent = tempfile.gettempdir()
    if len(parent) + len("/baton-xxxxxxxx") > _MAX_RUN_DIR_CHARS:
        parent = "/tmp"  # noqa: S108 - a fresh 0700 directory is made inside, by mkdtemp
    return Path(tempfile.mkdtemp(prefix="baton-", dir=parent))


@contextlib.contextmanager
def _mark_children(run_dir: Path) -> Iterator[None]:
    os.environ[reaper.RUN_DIR_VARIABLE] = str(run_dir)
    try:
        yield
    finally:
        del os.environ[reaper.RUN_DIR_VARIABLE]


@contextlib.contextmanager
def _preserve_sigterm_handler() -> Iterator[None]:
    """Undo Ray's handling of SIGTERM, which prints a C++ stack.

    If the caller has no handler, SIGTERM raises SystemExit, so that `stop` can run.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(
            signal.SIGTERM, previous_handler if callable(previous_handler) else _exit_on_signal
        )


def _exit_on_signal(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _init_ray(run_dir: Path, settings: ClusterSettings) -> tuple[str, str]:
    import ray

    redirect_ray_messages()
    reload_environment(loopback=is_loopback(settings.node_address))
    gpus = settings.gpus
    if gpus is None and (gpu_slices := mig_devices(os.environ)):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_slices)
        gpus = float(len(gpu_slices))
    ray.init(
        address="local",
        num_cpus=settings.cpus,
        num_gpus=gpus,
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level=logging.WARNING,
        _temp_dir=str(_make_ray_folder(run_dir)),
        _node_ip_address=settings.node_address,
    )
    context = ray.get_runtime_context()
    return cast("str", context.gcs_address), cast("str", context.get_session_name())


def _make_ray_folder(run_dir: Path) -> Path:
    """A folder for Ray, which opens its own to every user, inside this user's run_dir."""
    folder = run_dir / "r"
    folder.mkdir(mode=0o700)
    (run_dir / "session_latest").symlink_to(Path(folder.name) / "session_latest")
    return folder


def _start_serve(host: str, port: int) -> None:
    run_handles_in_own_loop()  # in this process only: Ray's were started before
    from ray import serve

    hide_serve_messages()
    serve.start(
        http_options={"host": host, "port": port},
        proxy_location="HeadOnly",
    )


def _shutdown_ray() -> None:
    import ray

    ray.shutdown()


def _run_with_timeout(timeout_s: float, name: str, action: Callable[[], object]) -> None:
    thread = threading.Thread(target=action, name=name, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        _LOGGER.warning("%s takes over %.0f s; what still runs is killed", name, timeout_s)
