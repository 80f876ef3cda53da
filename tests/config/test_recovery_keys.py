"""What is done about replicas that fail: keys, defaults and bounds."""

from __future__ import annotations

from baton.config import coordinator_limits
from baton.control.state.limits import RecoveryOptions
from baton.policy.resilience.circuit_breakers import BreakerOptions
from baton.policy.resilience.hedging import HedgeOptions
from baton.policy.resilience.retry_budget import RetryOptions
from tests.config.conftest import MINIMAL_CONFIG, Load


def recovery(keys: str) -> str:
    return MINIMAL_CONFIG + f"recovery: {{{keys}}}\n"


def test_unless_told_coordinators_go_by_their_own_defaults(load: Load) -> None:
    assert coordinator_limits(load(MINIMAL_CONFIG).config).recovery == RecoveryOptions()


def test_coordinators_go_by_what_is_said(load: Load) -> None:
    text = recovery(
        "heartbeat_timeout: 2s, circuit_breaker: {failure_threshold: 5, open_duration: 3s},"
        " retry_budget: {ratio: 0.1}, hedging: {latency_multiple: 8}"
    )
    assert coordinator_limits(load(text).config).recovery == RecoveryOptions(
        heartbeat_timeout_s=2.0,
        circuit_breaker=BreakerOptions(failure_threshold=5, open_duration_s=3.0),
        retry_budget=RetryOptions(ratio=0.1),
        hedging=HedgeOptions(latency_multiple=8.0),
    )


def test_hedges_can_be_switched_off(load: Load) -> None:
    limits = coordinator_limits(load(recovery("hedging: {latency_multiple: null}")).config)
    assert limits.recovery.hedging.latency_multiple is None
