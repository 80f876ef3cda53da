"""Placers for tests that care about something else."""

from __future__ import annotations

from random import Random

from baton.policy.placement.chooser import ChooserPlacer
from baton.policy.placement.port import Disaggregate, Placer
from baton.policy.placement.simple import choose_least_loaded


def placer(disaggregate: Disaggregate = Disaggregate.ALWAYS) -> Placer:
    """Whoever has least to do; ties go to the smallest id, so that tests can foretell routes."""
    rng = Random(0)
    return ChooserPlacer("least-loaded", choose_least_loaded, disaggregate=disaggregate, rng=rng)
