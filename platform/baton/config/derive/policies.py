"""Creates the configured placement policy: baton's own, a plain one, or the user's."""

from __future__ import annotations

import inspect
from importlib import import_module
from random import Random
from typing import cast

from baton.config.derive.options import predicted_options
from baton.config.schema.deployment import DeploymentConfig
from baton.config.schema.routing import Policy
from baton.domain.errors import ConfigInvalid
from baton.policy.placement.chooser import Chooser, ChooserPlacer
from baton.policy.placement.port import Placer

_CHOOSER_PARAMETERS = ("query", "kind", "candidates", "rng")


def router_rng(config: DeploymentConfig, coordinator_id: str) -> Random:
    """Reproducible random numbers of one coordinator, different for each."""
    return Random(f"{config.router.seed}/{coordinator_id}")  # noqa: S311 - guards nothing


def build_placer(config: DeploymentConfig, rng: Random) -> Placer:
    """The configured placement policy.

    Raises:
        ConfigInvalid: the user's policy cannot be loaded.
    """
    from baton.policy.placement.predicted import PredictedPlacer
    from baton.policy.placement.simple import POLICIES

    name, disaggregate = str(config.router.policy), config.router.disaggregate
    if name == Policy.PREDICTED:
        return PredictedPlacer(predicted_options(config), seed=rng.getrandbits(63))
    chooser = POLICIES[name]() if name in POLICIES else load_chooser(name)
    return ChooserPlacer(name, chooser, disaggregate=disaggregate, rng=rng)


def load_chooser(path: str) -> Chooser:
    """The chooser at `module:function`; a class is instantiated without arguments.

    Raises:
        ConfigInvalid: it does not exist, or has the wrong signature.
    """
    module_name, _, attribute = path.partition(":")
    try:
        loaded: object = getattr(import_module(module_name), attribute)
        chooser = loaded() if isinstance(loaded, type) else loaded
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise _unusable_policy(
            path, f"{reason}, expected a module that every ingress can import"
        ) from error
    if not callable(chooser) or not _has_chooser_signature(chooser):
        got = f"got {type(chooser).__name__} {attribute!r}"
        raise _unusable_policy(
            path, f"{got}, expected a function of ({', '.join(_CHOOSER_PARAMETERS)})"
        )
    return cast(Chooser, chooser)


def _has_chooser_signature(chooser: object) -> bool:
    """Whether it is synchronous and takes a chooser's parameters."""
    assert callable(chooser), "the caller has checked it"
    if inspect.iscoroutinefunction(chooser):
        return False
    try:
        inspect.signature(chooser).bind(*_CHOOSER_PARAMETERS)
    except TypeError:
        return False
    except ValueError:
        return True  # a built-in without a signature fails at its first call, if at all
    return True


def _unusable_policy(path: str, reason: str) -> ConfigInvalid:
    return ConfigInvalid((f"router.policy: cannot use {path!r}: {reason}",))
