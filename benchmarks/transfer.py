"""What a pull over loopback achieves as baton's engines make it, against NIXL alone and memcpy.

Two processes with a NIXL agent each, and one pulls from the other's memory. In turn, repeat by
repeat, each alone (the processes of the others are stopped meanwhile):

- `memcpy`: inside the pulling process;
- `bare`: NIXL as it comes, one piece of memory, everything polling without pause;
- `bare_blocks`: the same in the pieces that an engine's KV blocks are;
- `calm`: one piece, but progress threads that pause as baton's do;
- `baton`: KV blocks, agents as vLLM makes them, in the environment that baton gives engines.

With `_tcp` after it: UCX held to TCP, as between nodes without RDMA. Prints one JSON object as the
last line of stdout and writes it, with all measurements, to `benchmarks/results/transfer.json`.
Progress goes to stderr.

    python -m benchmarks.transfer [--repeats 5] [--out FILE]
    python -m benchmarks.transfer --sweep tcp [--repeats 5]

A sweep sets other settings against the chosen ones and only prints.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from baton.runtime.rank_transports import read_transports
from baton.transfer.peers import transport_environment
from benchmarks._program import RESULTS, quote, say
from benchmarks._provenance import provenance
from benchmarks._statistics import round_floats
from benchmarks._transfer_contenders import (
    MIB,
    SIZES_MIB,
    SWEEPS,
    Contender,
    contenders,
    sweep,
)
from benchmarks._transfer_metrics import Seconds, format_size, medians_by_size, summarize
from benchmarks._transfer_pair import AgentOptions, TransferPair

_TIMED_PULLS = 2
"""Pulls that are timed in a visit, after one that is not."""


def main() -> int:
    """Run everything; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sweep", choices=sorted(SWEEPS))
    parser.add_argument("--out", type=Path, default=RESULTS / "transfer.json")
    options = parser.parse_args()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        if options.sweep:
            seconds = measure(sweep(options.sweep), (16, 64), options.repeats)
            print(json.dumps(round_floats(medians_by_size(seconds))))
            return 0
        logs = Path(folder)
        seconds = measure(contenders(transport_environment(logs)), SIZES_MIB, options.repeats)
        transports = {str(reach): sorted(names) for reach, names in read_transports(logs).items()}
    result = summarize(seconds) | {
        "transports": transports,
        "repeats": options.repeats,
        "took_s": time.monotonic() - began_s,
    }
    result |= provenance(("nixl", "torch"))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    document = round_floats(result | {"seconds": seconds}, digits=7)
    options.out.write_text(json.dumps(document) + "\n", encoding="utf-8")
    quote(result)
    return 0


def measure(participants: Sequence[Contender], sizes_mib: Sequence[int], repeats: int) -> Seconds:
    """The seconds of every timed transfer, by contender and size."""
    seconds: Seconds = {
        participant.name: {size: [] for size in sizes_mib if size <= participant.max_mib}
        for participant in participants
    }
    with ExitStack() as stack:
        pairs: dict[AgentOptions, TransferPair] = {}
        for participant in participants:
            if participant.agents not in pairs:
                pairs[participant.agents] = stack.enter_context(
                    TransferPair(participant.agents, max(sizes_mib) * MIB)
                )
                pairs[participant.agents].pause()
        for size_mib in sizes_mib:
            for _ in range(repeats):
                for participant in (
                    participant for participant in participants if size_mib <= participant.max_mib
                ):
                    seconds[participant.name][size_mib] += measure_contender(
                        participant, pairs[participant.agents], size_mib
                    )
            say(format_size(seconds, size_mib))
    return seconds


def measure_contender(contender: Contender, pair: TransferPair, size_mib: int) -> list[float]:
    """Let one contender run alone."""
    operation = contender.make_operation(size_mib * MIB)
    pair.resume()
    try:
        return [pair.run(operation) for _ in range(1 + _TIMED_PULLS)][1:]
    finally:
        pair.pause()


if __name__ == "__main__":
    sys.exit(main())
