"""A real local cluster: what clients see through its front, and what is left after its end."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from baton.serving.cluster import reaper
from baton.serving.cluster.cluster_state import ClusterState, running_clusters, state_folder
from baton.serving.front.data_path import DataPath, pick_front_ports

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PROGRAM = Path(__file__).parent / "programs" / "stream_app.py"
SOURCES = Path(__file__).parents[2] / "platform"


@dataclass
class Up:
    process: subprocess.Popen[str]
    url: str
    run_dir: str
    lines: list[str]

    def state(self) -> ClusterState | None:
        found = [s for s in running_clusters(state_folder()) if s.run_dir == self.run_dir]
        return found[0] if found else None

    def end(self, number: signal.Signals) -> str:
        self.process.send_signal(number)
        rest, _ = self.process.communicate(timeout=60)
        return rest


def start(port: int, data_path: str = "auto") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), str(port), data_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SOURCES)},
    )


@contextlib.contextmanager
def up(data_path: str = "auto") -> Iterator[Up]:
    port = pick_front_ports().stats
    process = start(port, data_path)
    assert process.stdout is not None
    lines = []
    try:
        for line in process.stdout:
            lines.append(line)
            if line.startswith("READY "):
                break
        assert lines, "the program printed nothing"
        assert lines[-1].startswith("READY "), "".join(lines)
        yield Up(process, f"http://127.0.0.1:{port}", lines[-1].split()[1], lines)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=60)


def wait_until(condition: Callable[[], bool], within_s: float) -> bool:
    until_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.05)
    return True


def nothing_left(cluster: Up) -> bool:
    return (
        not reaper.marked_processes(cluster.run_dir)
        and not Path(cluster.run_dir).exists()
        and cluster.state() is None
    )


def chunk_gaps_s(url: str) -> list[float]:
    with httpx.stream("GET", f"{url}/", timeout=10) as response:
        seen_at_s = [time.monotonic() for _chunk in response.iter_raw()]
    return [after - before for before, after in itertools.pairwise(seen_at_s)]


def cancelled(url: str) -> list[float]:
    found: list[float] = httpx.get(f"{url}/cancelled", timeout=10).json()
    return found


@pytest.mark.parametrize(
    "data_path",
    [DataPath.SERVE_HAPROXY, pytest.param(DataPath.SERVE_PROXY, marks=pytest.mark.thorough)],
)
def test_chunks_arrive_one_by_one_and_a_disconnect_is_seen_and_ctrl_c_leaves_nothing(
    data_path: DataPath,
) -> None:
    with up(data_path) as cluster:
        state = cluster.state()
        assert state is not None
        assert state.http_url == cluster.url
        assert state.data_path is data_path

        gaps_s = chunk_gaps_s(cluster.url)
        # Buffered, they would come at once: a few chunks with gaps of zero.
        assert len(gaps_s) > 50
        assert 0.002 < statistics.median(gaps_s) < 0.05

        with httpx.stream("GET", f"{cluster.url}/endless", timeout=10) as response:
            next(response.iter_raw())
        closed_at_s = time.monotonic()
        assert wait_until(lambda: bool(cancelled(cluster.url)), within_s=5)
        # Both clocks are the machine's monotonic clock.
        assert cancelled(cluster.url)[0] - closed_at_s < 1.0

        assert "STOPPED []" in cluster.end(signal.SIGINT)
        assert nothing_left(cluster)


@pytest.mark.thorough
def test_a_killed_holder_leaves_nothing_either() -> None:
    with up() as cluster:
        assert reaper.marked_processes(cluster.run_dir)
        cluster.end(signal.SIGKILL)
        assert wait_until(lambda: nothing_left(cluster), within_s=15)


@pytest.mark.thorough
def test_two_clusters_live_side_by_side_and_one_port_is_not_shared() -> None:
    with up() as one, up() as two:
        refused = start(int(one.url.rpartition(":")[2]))
        said, _ = refused.communicate(timeout=60)
        assert refused.returncode != 0
        assert "the port is in use" in said

        assert "STOPPED []" in one.end(signal.SIGTERM)
        assert nothing_left(one)
        assert len(chunk_gaps_s(two.url)) > 50
        assert "STOPPED []" in two.end(signal.SIGINT)
        assert nothing_left(two)
