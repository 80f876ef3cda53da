"""Warnings about keys of a valid configuration that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator

from baton.config.derive.options import scales_from_zero, split_by_model
from baton.config.schema.deployment import DeploymentConfig
from baton.policy.scaling.options import ScalingRule


def contradictions(config: DeploymentConfig) -> tuple[str, ...]:
    """One line each: the key, the key that it contradicts, and the remedy."""
    return tuple(_scale_to_zero(config))


def _scale_to_zero(config: DeploymentConfig) -> Iterator[str]:
    autoscaler = config.autoscaler
    if autoscaler is None or not autoscaler.scale_to_zero:
        return
    if autoscaler.policy == str(ScalingRule.STATIC) or autoscaler.dry_run:
        key = "dry_run: true" if autoscaler.dry_run else f"policy: {autoscaler.policy}"
        yield (
            f"autoscaler.scale_to_zero: no effect with autoscaler.{key}, which stops and starts no"
            " replica; a pool that is at zero stays there; remove one of them"
        )
        return
    if not any(scales_from_zero(part) for part in split_by_model(config).values()):
        return
    admission = config.admission
    wait_key, wait_s = "admission.cold_start_timeout", admission.cold_start_timeout_s
    if admission.timeouts.total_s <= wait_s:
        yield (
            f"admission.timeouts.total: got {admission.timeouts.total_s:g}s, expected more than"
            f" {wait_key}, {wait_s:g}s: a request that waits for a cold start fails before it is"
            " served; raise one or lower the other"
        )
    if wait_s < admission.queue_timeout_s:
        yield (
            f"{wait_key}: got {wait_s:g}s, expected at least admission.queue_timeout,"
            f" {admission.queue_timeout_s:g}s, which counts instead; raise it"
        )
    if wait_s < 2 * autoscaler.interval_s:
        yield (
            f"{wait_key}: got {wait_s:g}s, expected at least two of autoscaler.interval,"
            f" {autoscaler.interval_s:g}s: a request is refused before a replica is asked for;"
            " raise it"
        )
