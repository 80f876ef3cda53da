"""What is done about replicas that fail: keys, defaults and bounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.config import coordinator_limits
from baton.control.state.limits import RecoveryOptions
from baton.policy.resilience.circuit_breakers import BreakerOptions
from baton.policy.resilience.hedging import HedgeOptions
from baton.policy.resilience.retry_budget import RetryOptions
from tests.config.conftest import MINIMAL_CONFIG, Load

Refuse = Callable[..., tuple[str, ...]]


def recovery(keys: str) -> str:
    return MINIMAL_CONFIG + f"admission: {{recovery: {{{keys}}}}}\n"


def test_unless_told_coordinators_go_by_their_own_defaults(load: Load) -> None:
    assert coordinator_limits(load(MINIMAL_CONFIG).config).recovery == RecoveryOptions()


def test_coordinators_go_by_what_is_said(load: Load) -> None:
    text = recovery("silence: 2s, failures: 5, pause: 3s, retries: 0.1, hedge: 8")
    assert coordinator_limits(load(text).config).recovery == RecoveryOptions(
        heartbeat_timeout_s=2.0,
        breaker=BreakerOptions(failure_threshold=5, open_duration_s=3.0),
        retries=RetryOptions(budget_ratio=0.1),
        hedge=HedgeOptions(latency_multiple=8.0),
    )


def test_hedges_can_be_switched_off(load: Load) -> None:
    limits = coordinator_limits(load(recovery("hedge: null")).config)
    assert limits.recovery.hedge.latency_multiple is None


@pytest.mark.parametrize(
    "wrong", ["silence: 100ms", "failures: 0", "pause: 31s", "retries: -1", "hedge: 1"]
)
def test_senseless_bounds_are_refused(load_invalid: Refuse, wrong: str) -> None:
    (finding,) = load_invalid(recovery(wrong))
    assert f"admission.recovery.{wrong.partition(':')[0]}" in finding
