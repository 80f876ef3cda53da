"""What comes from outside is never unpickled: code that could is in one known place."""

from __future__ import annotations

import re
from pathlib import Path

PLATFORM = Path(__file__).parents[2] / "platform" / "baton"
RUNS_WHAT_IT_READS = re.compile(
    r"^\s*(?:import|from)\s+(pickle|cloudpickle|dill|joblib|marshal|shelve|jsonpickle)\b"
    r"|\b(recv_pyobj|send_pyobj|unsafe_load|full_load)\("
    r"|(?<![\w.])(eval|exec)\(",
    re.MULTILINE,
)
FROM_RAYS_OWN_CALLS = frozenset({"serving/ray/packing.py"})
"""Whoever can make those can run code on every node anyway."""


def dangerous(source: str) -> set[str]:
    """Modules and calls in a source by which bytes could become code."""
    return {name for found in RUNS_WHAT_IT_READS.findall(source) for name in found if name}


def test_only_what_ray_itself_carries_is_unpickled() -> None:
    found = {
        str(path.relative_to(PLATFORM))
        for path in PLATFORM.rglob("*.py")
        if dangerous(path.read_text())
    }
    assert found == FROM_RAYS_OWN_CALLS


def test_a_module_that_unpickles_would_be_found() -> None:
    assert dangerous("import pickle") == {"pickle"}
    assert dangerous("from cloudpickle import loads") == {"cloudpickle"}
    assert dangerous("socket.recv_pyobj()") == {"recv_pyobj"}
    assert dangerous("eval(text)") == {"eval"}
    assert dangerous("import json; json.loads(b''); model.eval()") == set()
