"""Garbage collection in a process that serves."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys
import weakref

import pytest

_SCRIPT = """
import gc
from baton.runtime.process.gc_tuning import freeze_startup_heap

old = [[number] for number in range(200_000)]
freeze_startup_heap()
sizes = []

def note(when, info):
    if when == "start" and info["generation"] == 2:
        sizes.append(len(gc.get_objects(2)))

gc.callbacks.append(note)
new = [[number] for number in range(200_000)]
gc.callbacks.remove(note)
assert sizes, "what is old is never looked through"
assert sizes[0] < 100_000, sizes
print("ok")
"""


def test_what_was_there_at_the_start_is_not_looked_through_and_cycles_go_soon() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "ok\n", done.stderr


def test_garbage_from_before_is_let_go_first() -> None:
    class Thing:
        pass

    thing = Thing()
    thing.itself = thing  # type: ignore[attr-defined]  # a cycle
    gone = weakref.ref(thing)
    del thing
    from baton.runtime.process.gc_tuning import freeze_startup_heap

    before = gc.get_threshold()
    try:
        freeze_startup_heap()
        assert gone() is None
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


_HELD = """
import gc
from baton.runtime.process.gc_tuning import freeze_startup_heap

def collections():
    before = [one["collections"] for one in gc.get_stats()]
    held = [[number] for number in range(210_000)]
    return [one["collections"] - was for one, was in zip(gc.get_stats(), before)]

usual = collections()
freeze_startup_heap()
ours = collections()
assert 8 * sum(ours) < sum(usual), (ours, usual)
assert ours[2] >= usual[2] >= 1, (ours, usual)
print("ok")
"""


def test_what_is_new_is_looked_through_a_tenth_as_often_and_what_is_old_no_less() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _HELD], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "ok\n", done.stderr


def test_tidying_lets_go_of_tuples_that_are_only_kept_to_be_used_again() -> None:
    from baton.runtime.process.gc_tuning import trim_memory

    trim_memory()
    before = sys.getallocatedblocks()
    kept = [tuple(number for number in range(13)) for _ in range(1500)]
    del kept
    for_later = sys.getallocatedblocks() - before
    trim_memory()
    assert for_later > 1000, "this Python keeps none: then there is nothing to tidy"
    assert sys.getallocatedblocks() - before < 300


_SCATTERED = """
from pathlib import Path
from baton.runtime.process.gc_tuning import trim_memory

def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

pieces = [bytes(2000) for _ in range(40_000)]
pins = pieces[::100]
del pieces
before = resident_mb()
trim_memory()
print(before - resident_mb())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps no pages")
def test_tidying_gives_back_pages_that_lie_between_pieces_in_use() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCATTERED], capture_output=True, text=True, timeout=60, check=True
    )
    assert float(done.stdout) > 30, "of the 80 MB hardly any went back"
