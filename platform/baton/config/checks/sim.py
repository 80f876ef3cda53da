"""Whether simulated engines could work with what a configuration says of them in several places."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from baton.config.checks.check_context import CheckContext
from baton.config.derive.options import sim_settings
from baton.config.language.fields import fields_of
from baton.config.language.tree import Finding, Path
from baton.config.schema.deployment import EngineConfig, PoolConfig, SimTimings, TransferConfig
from baton.simulator.engine.settings import SettingInvalid

_SETTING_KEYS: Mapping[str, Path] = {
    "block_size_tokens": ("block_size",),
    "max_running_requests": ("max_num_seqs",),
    "max_batched_tokens": ("max_num_batched_tokens",),
    "decode_step_tokens": ("decode_step_tokens",),
    **{field.attribute: ("sim", key) for key, field in fields_of(SimTimings).items()},
}
"""Keys under `engine` of an engine's settings."""

_SETTING_NAME = re.compile(r"\w+(?==)")
"""A setting in what was wanted, as in `max_running_requests=256`."""


def check_sim(context: CheckContext, owner: Path, engine: EngineConfig) -> Iterator[Finding]:
    """What is wrong with the simulated engines of a model or a pool: the first thing only."""
    pool = context.get(PoolConfig, *owner)
    name = owner[-1] if pool is None else pool.model
    model, transfer = context.models().get(name), context.get(TransferConfig, "transfer")
    if model is None or transfer is None:
        return
    if model.max_len_tokens is None:
        message = "missing, wanted a number: a simulated engine cannot ask the model"
        yield context.finding(("models", name, "max_len"), message)
        return
    try:
        sim_settings(engine, model, transfer)
    except SettingInvalid as error:
        yield _setting_finding(context, owner, ("models", name), error)


def _setting_finding(
    context: CheckContext, owner: Path, model: Path, error: SettingInvalid
) -> Finding:
    """At the setting's key; where nobody wrote that, at the key of a bound that somebody wrote."""

    def path(setting: str) -> Path:
        if setting == "max_len_tokens":
            return (*model, "max_len")
        return (*owner, "engine", *_SETTING_KEYS.get(setting, ("sim", setting)))

    setting_path, bound_paths = (
        path(error.name),
        [path(bound) for bound in _SETTING_NAME.findall(error.expected)],
    )
    expected = _SETTING_NAME.sub(lambda bound: path(bound[0])[-1], error.expected)
    reported_path = next(
        (
            bound_path
            for bound_path in (setting_path, *bound_paths)
            if context.is_explicit(*bound_path)
        ),
        setting_path,
    )
    got = (
        f"got {error.got}"
        if reported_path == setting_path
        else f"{setting_path[-1]} is {error.got} unless set"
    )
    return context.finding(reported_path, f"{got}, wanted {expected}")
