"""Classes, tenants, limits and scaling: what is read, what follows, and what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.config import (
    admission_options,
    allows_anonymous,
    autoscaler_options,
    key_files,
    predicted_options,
    price_per_hour,
    render,
    scaling_policy_name,
    service_rules,
    slo_classes,
    tenants,
)
from baton.control.state.service_rules import ServiceRules
from baton.domain.slo import NO_SLO, Slo
from baton.domain.tenant import CacheSharing, RateLimit, Tenant
from baton.policy.admission.decision import AdmissionOptions, AdmissionPolicy
from baton.policy.admission.slo_classes import Comparison, SloRule
from baton.policy.scaling.options import AutoscalerOptions, PoolBounds, StepLimits
from tests.config.conftest import MINIMAL_CONFIG, Load

PD = MINIMAL_CONFIG.replace(
    "{main: {role: mixed}}",
    "{p: {role: prefill, replicas: {min: 1, initial: 2, max: 4}},"
    " d: {role: decode, replicas: {min: 2, max: 8}}}",
)


def test_an_empty_file_means_no_objectives_no_tenants_and_no_scaling(
    load: Load,
) -> None:
    config = load(MINIMAL_CONFIG).config
    assert service_rules(config) == ServiceRules()
    assert autoscaler_options(config) is None
    assert scaling_policy_name(config) == "static"
    assert key_files(config) == {}
    assert allows_anonymous(config)


def test_a_class_has_what_it_says_and_inherits_nothing(load: Load) -> None:
    book = slo_classes(
        load(
            MINIMAL_CONFIG
            + "slo:\n"
            + "  default: {ttft: 500ms, tpot: 30ms, attainment: 0.9, window: 1d, priority: 2}\n"
            + "  classes: {batch: {ttft: 10s, itl_p99: 1s, priority: -1}}\n"
        ).config
    )
    assert book.classes["default"] == Slo(
        ttft_s=0.5, tpot_s=0.03, attainment_target=0.9, window_s=86_400, priority=2
    )
    assert book.classes["batch"] == Slo(
        name="batch",
        ttft_s=10,
        itl_p99_s=1,
        attainment_target=NO_SLO.attainment_target,
        window_s=NO_SLO.window_s,
        priority=-1,
    )


def test_conditions_become_rules_in_the_order_of_the_file(load: Load) -> None:
    text = MINIMAL_CONFIG + (
        "slo:\n  classes:\n"
        "    huge: {match: ' prompt_tokens>=32000 '}\n"
        "    batch: {ttft: 10s}\n"
        "    long: {match: prompt_tokens > 8000}\n"
    )
    config = load(text).config
    assert slo_classes(config).rules == (
        SloRule(slo_class="huge", comparison=Comparison.AT_LEAST, prompt_tokens=32_000),
        SloRule(slo_class="long", comparison=Comparison.ABOVE, prompt_tokens=8_000),
    )
    assert 'match: "prompt_tokens >= 32000"' in render(config)


def test_a_tenant_has_what_is_said_of_it(load: Load) -> None:
    config = load(
        MINIMAL_CONFIG
        + "slo: {classes: {gold: {ttft: 1s}}}\n"
        + "tenants:\n"
        + "  acme:\n"
        + "    {priority: 1, weight: 4, slo: gold, classes: [gold, default], max_in_flight: 9,\n"
        + "     rate: {requests: 10/s, tokens: 60k/min, burst: 5s}, keys_file: secrets/a.keys}\n"
    ).config
    assert tenants(config) == {
        "acme": Tenant(
            name="acme",
            priority=1,
            weight=4,
            slo="gold",
            classes=("gold", "default"),
            rate=RateLimit(requests_per_s=10, tokens_per_s=1000, burst_s=5),
            max_in_flight=9,
            cache=CacheSharing.ISOLATED,
        )
    }
    assert key_files(config) == {"acme": Path("secrets/a.keys")}


@pytest.mark.parametrize(
    ("tenant", "cache"),
    [
        ("{}", CacheSharing.SHARED),
        ("{keys_file: a.keys}", CacheSharing.ISOLATED),
        ("{keys_file: a.keys, cache: shared}", CacheSharing.SHARED),
        ("{cache: isolated}", CacheSharing.ISOLATED),
    ],
)
def test_a_tenant_with_keys_has_its_own_cache_unless_configured(
    load: Load, tenant: str, cache: CacheSharing
) -> None:
    assert tenants(load(MINIMAL_CONFIG + f"tenants: {{a: {tenant}}}").config)["a"].cache is cache


@pytest.mark.parametrize(
    ("section", "allowed"),
    [
        ("{}", True),
        ("{a: {weight: 2}}", True),
        ("{a: {keys_file: k}}", False),
        ("{a: {keys_file: k}, default: {}}", False),
        ("{a: {keys_file: k}, default: {anonymous: true}}", True),
        ("{default: {anonymous: false}}", False),
    ],
)
def test_callers_without_a_key_are_served_without_tenants_or_when_allowed(
    load: Load, section: str, *, allowed: bool
) -> None:
    assert allows_anonymous(load(MINIMAL_CONFIG + f"tenants: {section}").config) is allowed


def test_admission_is_read(load: Load) -> None:
    config = load(
        MINIMAL_CONFIG
        + "admission: {policy: bounded, max_engine_queue_delay: 200ms,"
        + " slo_safety_margin: 0.25, max_n: 8}\n"
    ).config
    assert admission_options(config) == AdmissionOptions(
        policy=AdmissionPolicy.BOUNDED,
        max_engine_queue_delay_s=0.2,
        slo_safety_margin_fraction=0.25,
    )
    assert (config.admission.max_n, config.admission.max_messages) == (8, None)


def test_how_far_pools_do_each_others_work_is_read(load: Load) -> None:
    config = load(
        MINIMAL_CONFIG + "router: {overflow: {decode_on_prefill: 0.5, prefill_on_decode: 0}}\n"
    ).config
    options = predicted_options(config)
    assert (options.decode_on_prefill_fraction, options.prefill_on_decode_fraction) == (0.5, 0)


def test_the_autoscaler_keeps_within_the_bounds_of_the_pools(load: Load) -> None:
    config = load(
        PD
        + "autoscaler:\n"
        + "  {policy: static, interval: 500ms, gpu_budget: 12, dry_run: true,\n"
        + "   scale_up: {cooldown: 1s, max_step: 2},\n"
        + "   scale_down: {cooldown: 1m, max_step: 3, headroom: 0.1}}\n"
    ).config
    assert autoscaler_options(config) == AutoscalerOptions(
        interval_s=0.5,
        gpu_budget=12,
        scale_up=StepLimits(cooldown_s=1, max_step=2),
        scale_down=StepLimits(cooldown_s=60, max_step=3, headroom_fraction=0.1),
        dry_run=True,
        bounds={
            "p": PoolBounds(min=1, initial=2, max=4),
            "d": PoolBounds(min=2, initial=2, max=8),
        },
    )


def test_an_empty_autoscaler_section_scales_by_the_defaults_and_null_does_not(load: Load) -> None:
    scaled = autoscaler_options(load(MINIMAL_CONFIG + "autoscaler: {}").config)
    assert scaled is not None
    assert scaled == AutoscalerOptions(bounds=scaled.bounds)
    assert autoscaler_options(load(MINIMAL_CONFIG + "autoscaler: null").config) is None


def test_a_scaling_policy_may_be_the_users_own(load: Load) -> None:
    config = load(MINIMAL_CONFIG + "autoscaler: {policy: 'own.scaling:make'}").config
    assert scaling_policy_name(config) == "own.scaling:make"
    assert autoscaler_options(config) is not None


def test_a_replica_counts_its_gpus_or_its_workers(load: Load) -> None:
    config = load(
        "version: 1\nmodel: {source: tiny}\n"
        "pools: {g: {role: mixed, parallel: {tp: 4}, resources: {gpus: 4}},"
        " c: {role: mixed, parallel: {tp: 2}}}\nautoscaler: {}\n"
    ).config
    options = autoscaler_options(config)
    assert options is not None
    assert {name: bounds.gpus_per_replica for name, bounds in options.bounds.items()} == {
        "g": 4,
        "c": 2,
    }


@pytest.mark.parametrize(
    ("resources", "price"),
    [
        ("{cpus: 1}", None),
        ("{cpus: 1, price_per_hour: 0.5}", 0.5),
        ("{gpus: 1, accelerator: L4}", 0.43),
        ("{gpus: 1, accelerator: L4, price_per_hour: 0.3}", 0.3),
        ("{gpus: 1, accelerator: NoSuchThing}", None),
    ],
)
def test_a_price_is_the_one_given_or_that_of_the_data_sheet(
    load: Load, resources: str, price: float | None
) -> None:
    config = load(MINIMAL_CONFIG.replace("mixed", f"mixed, resources: {resources}")).config
    assert price_per_hour(config.pools["main"]) == price


@pytest.mark.parametrize(
    "text",
    [
        "autoscaler: {gpu_budget: 4}",
        "autoscaler: {scale_to_zero: true}\ntenants: {default: {anonymous: true}}",
        "admission: {default_max_tokens: 9, max_tokens: 8}",
        "admission: {default_max_tokens: null, max_n: null}",
        "server: {allow: {media_domains: [a.example, 10.0.0.1]}}",
        "tenants: {a: {slo: default, classes: [default]}}",
    ],
)
def test_a_value_that_just_fits_is_accepted(load: Load, text: str) -> None:
    load(
        PD.replace("{min: 1, initial", "{min: 0, initial" if "zero" in text else "{min: 1, initial")
        + text
    )
