"""Faults of processes, disks and networks, each undone on the way out, even when the way is rough.

What a machine does not allow (no root, no such tool, no such kernel module) raises
`NotPossibleError`, which says why; a case then says so instead of passing.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_COMMAND_S = 20.0
_NETNS = Path("/var/run/netns")
_CLONE_NEWNET = 0x40000000
_INNER_INTERFACE = "chaos-in"
"""The interface of who is inside."""
_RESUME_GUARD = 'read _; kill -CONT "$@" 2>/dev/null; exit 0'
"""Waits until its parent closes the pipe or is gone, then lets all go on."""


class NotPossibleError(Exception):
    """This machine does not allow a fault; the text says why and what would help."""


# -------------------------------------------------------------------- processes


def kill(pid: int) -> None:
    """End a process as a crash does: SIGKILL."""
    _require_not_own(pid)
    os.kill(pid, signal.SIGKILL)


@contextmanager
def stopped_processes(*pids: int) -> Iterator[None]:
    """Stop processes inside: SIGSTOP, and SIGCONT after it, also when this process is killed.

    A process that has ended by then is left out.
    """
    for pid in pids:
        _require_not_own(pid)
    names = [str(pid) for pid in pids]
    guard = subprocess.Popen(
        ["/bin/sh", "-c", _RESUME_GUARD, "guard", *names],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait(_COMMAND_S)


def is_stopped(pid: int) -> bool:
    """Whether a process stands still, as under SIGSTOP."""
    return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)


def process_tree(pid: int) -> list[int]:
    """A process and everything below it, now."""
    process = psutil.Process(pid)
    return [pid, *(child.pid for child in process.children(recursive=True))]


def _require_not_own(pid: int) -> None:
    """Refuse what would end the run rather than a part of what is tested."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    if pid <= 1 or pid in own:
        raise ValueError(f"process {pid} is no part of what is tested; name one that is")


# -------------------------------------------------------------------- disks


@contextmanager
def tiny_disk(folder: Path, size_bytes: int = 1 << 20) -> Iterator[Path]:
    """A disk of its own at `folder`, to be filled; gone afterwards.

    Raises:
        NotPossibleError: nothing can be mounted here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=755", "chaos", str(folder))
    try:
        yield folder
    finally:
        _run("umount", "-l", str(folder))


def fill(folder: Path) -> int:
    """Write into a folder until its disk is full; returns how many bytes went in."""
    written = 0
    with (folder / "filler").open("wb", buffering=0) as file:
        for size in (4096, 1):
            with suppress(OSError):
                while True:
                    written += file.write(b"x" * size)
    return written


def is_full(folder: Path) -> bool:
    """Whether not one more byte can be written there."""
    probe = folder / f"probe-{secrets.token_hex(4)}"
    try:
        probe.write_bytes(b"x" * 4096)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return True
        raise
    finally:
        probe.unlink(missing_ok=True)
    return False


# -------------------------------------------------------------------- networks


@dataclass(frozen=True, slots=True, kw_only=True)
class LossyNetwork:
    """A network namespace behind a pair of interfaces that lose packets both ways."""

    name: str
    outer_address: str
    """This side's address."""
    inner_address: str
    """The address of who is inside."""
    outer_interface: str
    """This side's interface."""
    loss_tool: str
    """What loses the packets."""

    def dropped_packets(self) -> int:
        """Packets that were lost on the way in, so far; the other way loses as many."""
        if self.loss_tool == "netem":
            output = _run("tc", "-s", "qdisc", "show", "dev", self.outer_interface)
            return int(output.partition("dropped ")[2].split(",")[0])
        output = _run("ip", "netns", "exec", self.name, "nft", "list", "table", "inet", "chaos")
        return int(output.partition("packets ")[2].split()[0])

    def heal(self) -> int:
        """Lose no more packets. Returns how many were lost before, as `dropped_packets` does."""
        dropped = self.dropped_packets()
        if self.loss_tool == "netem":
            _run("tc", "qdisc", "del", "dev", self.outer_interface, "root")
            _run("tc", "-n", self.name, "qdisc", "del", "dev", _INNER_INTERFACE, "root")
        else:
            _run("ip", "netns", "exec", self.name, "nft", "delete", "table", "inet", "chaos")
        return dropped


@contextmanager
def lossy_network(loss: float) -> Iterator[LossyNetwork]:
    """A namespace whose packets are lost with a chance of `loss`, each way; gone afterwards.

    netem where the kernel has it, else a rule of nftables that drops at random.

    Raises:
        NotPossibleError: namespaces or both ways to lose packets are not to be had.
    """
    name = f"chaos-{secrets.token_hex(3)}"
    octet = secrets.randbelow(200) + 20
    outer, inner = f"10.213.{octet}.1", f"10.213.{octet}.2"
    outer_interface = f"ch-{name[-6:]}"
    _run("ip", "netns", "add", name)
    try:
        _run(
            "ip",
            "link",
            "add",
            outer_interface,
            "type",
            "veth",
            "peer",
            _INNER_INTERFACE,
            "netns",
            name,
        )
        _run("ip", "addr", "add", f"{outer}/30", "dev", outer_interface)
        _run("ip", "link", "set", outer_interface, "up")
        _run("ip", "-n", name, "addr", "add", f"{inner}/30", "dev", _INNER_INTERFACE)
        _run("ip", "-n", name, "link", "set", _INNER_INTERFACE, "up")
        _run("ip", "-n", name, "link", "set", "lo", "up")
        loss_tool = _add_loss(name, outer_interface, loss)
        yield LossyNetwork(
            name=name,
            outer_address=outer,
            inner_address=inner,
            outer_interface=outer_interface,
            loss_tool=loss_tool,
        )
    finally:
        with suppress(NotPossibleError):
            _run("ip", "link", "del", outer_interface)
        _run("ip", "netns", "del", name)


def _add_loss(name: str, outer_interface: str, loss: float) -> str:
    percent = f"{100 * loss:g}%"
    try:
        _run("tc", "qdisc", "add", "dev", outer_interface, "root", "netem", "loss", percent)
        _run(
            "tc",
            "-n",
            name,
            "qdisc",
            "add",
            "dev",
            _INNER_INTERFACE,
            "root",
            "netem",
            "loss",
            percent,
        )
    except NotPossibleError as reason:
        _add_loss_by_nft(name, loss, reason)
        return "nft"
    return "netem"


def _add_loss_by_nft(name: str, loss: float, netem: NotPossibleError) -> None:
    if shutil.which("nft") is None:
        raise NotPossibleError(
            f"netem: {netem}; and there is no nft: apt-get install nftables"
        ) from netem
    nft_add = ("ip", "netns", "exec", name, "nft", "add")
    _run(*nft_add, "table", "inet", "chaos")
    per_mille = round(1000 * loss)
    for hook in ("input", "output"):
        chain = f"{{ type filter hook {hook} priority 0 ; }}"
        _run(*nft_add, "chain", "inet", "chaos", hook, chain)
        rule = (
            f'oifname "{_INNER_INTERFACE}"' if hook == "output" else f'iifname "{_INNER_INTERFACE}"'
        )
        drop = f"{rule} numgen random mod 1000 < {per_mille} counter drop"
        _run(*nft_add, "rule", "inet", "chaos", hook, *drop.split())


def enter_network(name: str) -> None:
    """Have this thread, and all that it starts from now on, live in a namespace.

    Raises:
        NotPossibleError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with (_NETNS / name).open() as space:
        if libc.setns(space.fileno(), _CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise NotPossibleError(f"cannot enter network {name}: {os.strerror(code)}")


def _run(*command: str) -> str:
    """What a command of the machine says.

    Raises:
        NotPossibleError: it is not there, or fails.
    """
    try:
        return _output(command)
    except FileNotFoundError as error:
        raise NotPossibleError(f"there is no {command[0]!r} on this machine") from error
    except subprocess.CalledProcessError as error:
        stderr = (error.stderr or b"").decode(errors="replace").strip().replace("\n", " ")
        raise NotPossibleError(f"{' '.join(command)}: {stderr}") from error


def _output(command: Sequence[str]) -> str:
    process = subprocess.run(command, capture_output=True, check=True, timeout=_COMMAND_S)
    return process.stdout.decode(errors="replace")
