"""Whether simulated engines could work with what a configuration says of them in several places."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from baton.config.checks.check_context import Seen
from baton.config.derive.options import sim_settings
from baton.config.language.fields import fields_of
from baton.config.language.tree import Finding, Path
from baton.config.schema.deployment import EngineConfig, PoolConfig, SimTimings, TransferConfig
from baton.simulator.engine.settings import BadSetting

_KEYS: Mapping[str, Path] = {
    "block_size_tokens": ("block_size",),
    "max_running_requests": ("max_num_seqs",),
    "max_batched_tokens": ("max_num_batched_tokens",),
    "decode_step_tokens": ("decode_step_tokens",),
    **{field.attribute: ("sim", key) for key, field in fields_of(SimTimings).items()},
}
"""Keys under `engine` of an engine's settings."""

_BOUND = re.compile(r"\w+(?==)")
"""A setting in what was wanted, as in `max_running_requests=256`."""


def check_sim(seen: Seen, owner: Path, engine: EngineConfig) -> Iterator[Finding]:
    """What is wrong with the simulated engines of a model or a pool: the first thing only."""
    pool = seen.get(PoolConfig, *owner)
    name = owner[-1] if pool is None else pool.model
    model, transfer = seen.models().get(name), seen.get(TransferConfig, "transfer")
    if model is None or transfer is None:
        return
    if model.max_len_tokens is None:
        what = "missing, wanted a number: a simulated engine cannot ask the model"
        yield seen.wrong(("models", name, "max_len"), what)
        return
    try:
        sim_settings(engine, model, transfer)
    except BadSetting as error:
        yield _finding(seen, owner, ("models", name), error)


def _finding(seen: Seen, owner: Path, model: Path, error: BadSetting) -> Finding:
    """At the setting's key; where nobody wrote that, at the key of a bound that somebody wrote."""

    def path(setting: str) -> Path:
        if setting == "max_len_tokens":
            return (*model, "max_len")
        return (*owner, "engine", *_KEYS.get(setting, ("sim", setting)))

    own, bounds = path(error.name), [path(bound) for bound in _BOUND.findall(error.wanted)]
    wanted = _BOUND.sub(lambda bound: path(bound[0])[-1], error.wanted)
    written = next((one for one in (own, *bounds) if seen.said(*one)), own)
    got = f"got {error.got}" if written == own else f"{own[-1]} is {error.got} unless set"
    return seen.wrong(written, f"{got}, wanted {wanted}")
