"""Runs every verb in this process, whose environment is a pod's, and prints how each ended.

    verbs_in_a_pod.py FOLDER      FOLDER becomes XDG_RUNTIME_DIR

Each verb runs twice: with no deployment, and where a deployment's holder answers. Verbs that join
a cluster find none at RAY_ADDRESS. The last line of output is a JSON object: by verb, the exit
statuses and what was written to stderr. Under "handles" it has whether handles of a process that
has joined a cluster run in an event loop of their own.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path

from baton.cli.main import main
from baton.serving.cluster.cluster_state import (
    ClusterState,
    process_start_ticks,
    remove_state,
    state_folder,
    write_state,
)
from baton.serving.cluster.local_cluster import attach
from baton.serving.front.data_path import DataPath
from baton.serving.operator.control_socket import Answers, ControlSocket

ROOT = Path(__file__).parents[3]
ANSWERS = json.loads(Path(__file__).with_name("answers.json").read_text())
"""What the controller and an ingress of a simulated deployment have answered."""
SIM = ("-c", str(ROOT / "configs" / "sim.yaml"))
REQUEST = ANSWERS["ingress.requests"][0]["request_id"]
VERBS: tuple[tuple[str, ...], ...] = (
    ("status",),
    ("status", "--json"),
    ("top", "--once"),
    ("links",),
    ("usage",),
    ("trace", REQUEST),
    ("explain", "route", REQUEST),
    ("explain", "scale"),
    ("scale", "decode", "2"),
    ("scale", "decode", "--auto"),
    ("history",),
    ("logs",),
    ("apply", *SIM),
    ("rollback",),
    ("upgrade",),
    ("join",),
    ("down", "--timeout", "1s"),
    ("config", "validate", *SIM),
    ("config", "show", *SIM),
    ("config", "schema"),
    ("completion", "bash"),
    ("init", "Qwen/Qwen3-8B", "--gpu", "h100"),
    ("rules", "export", "rules"),
    ("dashboards", "export", "dashboards"),
    ("manifests", "export", *SIM, "--target", "ray", "--out", "manifests"),
    ("version",),
)


def run(words: tuple[str, ...]) -> tuple[int, str]:
    """The exit status of one verb, and what it has written to stderr."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(words)
        except SystemExit as end:
            code = int(end.code or 0)
    return code, err.getvalue()


def answer(deployment: str, method: str, arguments: tuple[object, ...], _: float) -> Answers:
    """What the holder of a deployment answers."""
    if method == "explain":
        return Answers(values=[ANSWERS["ingress.requests"]])
    if method == "lost_nodes":
        return Answers(values=[])
    return Answers(values=[ANSWERS[f"{deployment}.{method}"]])


def hold(folder: Path) -> tuple[ControlSocket, str]:
    """A holder of a deployment, which is this process, and the name of its state."""
    state = ClusterState(
        name="baton-pod",
        pid=os.getpid(),
        pid_started_at_s=0.0,
        address=os.environ["RAY_ADDRESS"],
        namespace="baton",
        http_url="http://127.0.0.1:8000",
        data_path=DataPath.SERVE_HAPROXY,
        run_dir=str(folder),
        session_name="session",
        token_file=str(folder / "token"),
        pid_started_ticks=process_start_ticks(os.getpid()),
    )
    write_state(state, state_folder())
    return ControlSocket(folder, query=answer, load_note=lambda _: None), state.name


def handles_run_in_own_loop() -> bool:
    """Whether a process that joins a cluster, whose Ray is replaced, can ask without a loop."""
    import ray

    ray.init = lambda **_: None  # as if it had joined
    attach("auto")
    from ray.serve._private.handle_options import InitHandleOptions

    return bool(InitHandleOptions()._run_router_in_separate_loop)


def everything(folder: Path) -> dict[str, object]:
    os.environ["XDG_RUNTIME_DIR"] = str(folder)
    os.chdir(folder)
    ended: dict[str, list[tuple[int, str]]] = {" ".join(words): [run(words)] for words in VERBS}
    holder, name = hold(folder)
    try:
        for words in VERBS[:10]:
            ended[" ".join(words)].append(run(words))
    finally:
        holder.close()
        remove_state(name, state_folder())
    return {"ended": ended, "handles": handles_run_in_own_loop()}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(everything(Path(sys.argv[1]))))
