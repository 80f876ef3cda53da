"""Rules name what there is, are what is committed, and each alert is tested and can be acted on."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from baton.policy.scaling.actions import AutoscalerTick, ScalingDecision
from baton.policy.scaling.desired import ScalingReason
from baton.telemetry import rules
from baton.telemetry.catalogue import (
    CATALOGUE,
    DESIRED,
    REQUESTS,
    SCALING_INPUT,
    SLACK,
    TTFT,
    UNMET,
)
from baton.telemetry.metrics.controller import ControllerState, controller_families
from baton.telemetry.metrics.usage_meter import UsageMeter
from baton.telemetry.rules import render
from baton.telemetry.rules.__main__ import main
from baton.telemetry.rules.promql import buckets, observations, series
from baton.telemetry.rules.rule import Severity
from baton.telemetry.rules.slo import FAST_BURN, SLOW_BURN
from tests.rules.rule_files import (
    RULES,
    expressions,
    promtool_tests,
    unknown_labels,
    unknown_names,
)

ALERTS = {alert.name: alert for alert in render.alerts()}


def seconds(duration: str) -> float:
    """`1h30m` and the like."""
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    return sum(float(n) * units[unit] for n, unit in re.findall(r"([\d.]+)([smhd])", duration))


# ------------------------------------------------------------------ files


def test_committed_rules_equal_the_generated_ones() -> None:
    committed = {path.name: path.read_bytes() for path in RULES.iterdir()}
    assert committed == rules.files(), (
        "run: python -m baton.telemetry.rules --write dashboards/rules"
    )


def test_the_module_writes_the_files_it_makes(tmp_path: Path) -> None:
    assert (
        main(["--write", str(tmp_path / "rules"), "--runbook-base", "https://docs.example/x/"]) == 0
    )
    written = {path.name: path.read_bytes() for path in (tmp_path / "rules").iterdir()}
    assert written == rules.files(runbook_base="https://docs.example/x")
    url = b"runbook_url: https://docs.example/x/BatonNoDecode.md\n"
    assert url in written["baton-capacity.yaml"]


@pytest.mark.parametrize("base", ["docs/operations/runbooks", "", 'https://a"b', "https://"])
def test_a_base_of_runbooks_that_is_no_url_is_refused(base: str) -> None:
    with pytest.raises(render.InvalidRunbookBase, match="expected a URL"):
        rules.files(runbook_base=base)


def test_without_a_base_alerts_name_the_page_and_have_no_link() -> None:
    text = b"".join(rules.files().values())
    assert b"runbook_url" not in text
    assert b"runbook: docs/operations/runbooks/BatonNoDecode.md\n" in text


def test_written_rules_are_read_back_with_their_meaning() -> None:
    read = {
        rule["alert"]: rule
        for content in rules.files().values()
        for group in YAML(typ="safe").load(content)["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    assert read.keys() == ALERTS.keys()
    for name, alert in ALERTS.items():
        assert read[name]["expr"].split() == alert.expr.split()
        assert read[name]["annotations"]["description"] == alert.description
        assert read[name]["annotations"]["summary"] == alert.summary
        assert read[name]["labels"] == {"severity": str(alert.severity), **alert.labels}


# ------------------------------------------------------------------ names


@pytest.mark.parametrize("name", expressions())
def test_a_rule_names_only_metrics_and_labels_that_there_are(name: str) -> None:
    expression = expressions()[name]
    assert unknown_names(expression) == set()
    assert unknown_labels(expression) == set()


def test_a_metric_that_was_renamed_is_noticed_in_a_rule() -> None:
    renamed = expressions()["BatonRequestsLate"].replace(SLACK.name, "baton_slack_seconds")
    assert unknown_names(renamed) == {"baton_slack_seconds"}
    assert unknown_labels("sum by (job, tennant) (x)") == {"tennant"}
    assert unknown_labels('x{poool="a"}') == {"poool"}


def test_an_expression_with_a_label_that_a_metric_lacks_cannot_be_made() -> None:
    with pytest.raises(ValueError, match=r"baton_requests_total has no label \['reason'\]"):
        series(REQUESTS, reason="x")


def test_a_histogram_is_asked_for_by_its_parts_and_nothing_else_has_parts() -> None:
    with pytest.raises(ValueError, match="use `buckets`"):
        series(TTFT)
    for part in (buckets, observations):
        with pytest.raises(ValueError, match="expected a histogram"):
            part(REQUESTS, "5m")
    assert buckets(TTFT, "5m", slo_class=("a", "b")) == (
        'baton_time_to_first_token_seconds_bucket{slo_class=~"a|b"}[5m]'
    )


def test_names_of_rules_are_their_own() -> None:
    counted = Counter([*(record.name for record in render.records()), *ALERTS])
    assert [name for name, count in counted.items() if count > 1] == []
    assert not counted.keys() & {metric.name for metric in CATALOGUE}


# ------------------------------------------------------------------ what alerts need


def test_only_failures_that_clients_notice_at_once_page() -> None:
    pages = {name for name, alert in ALERTS.items() if alert.severity is Severity.PAGE}
    assert pages == {
        "BatonCredentialsExpireSoon",
        "BatonGoodputBurnsFast",
        "BatonNoDecode",
        "BatonNoIngress",
    }


def test_lost_decode_pages_within_half_a_minute_of_being_seen() -> None:
    [group] = [
        group
        for groups in render.groups().values()
        for group in groups
        if ALERTS["BatonNoDecode"] in group.rules
    ]
    assert seconds(ALERTS["BatonNoDecode"].for_) + 2 * seconds(group.interval) <= 30


def test_burn_rates_are_those_of_the_shares_that_they_stand_for() -> None:
    assert [burn.factor for burn in (*FAST_BURN, *SLOW_BURN)] == [14.4, 6, 3, 1]


def test_an_alert_is_called_batons_own() -> None:
    with pytest.raises(ValueError, match="starts with 'Baton'"):
        replace(ALERTS["BatonNoDecode"], name="NoDecode")


@pytest.mark.parametrize("name", ALERTS)
def test_each_alert_has_tests_without_firing_with_firing_and_with_resolving(name: str) -> None:
    silent = resolves = False
    for test in promtool_tests():
        seen = [
            (seconds(look["eval_time"]), len(look.get("exp_alerts") or ()))
            for look in test.get("alert_rule_test", ())
            if look["alertname"] == name
        ]
        most = max((count for _, count in seen), default=0)
        first_s = min((at_s for at_s, count in seen if count), default=math.inf)
        silent |= any(at_s < first_s for at_s, _ in seen)
        resolves |= any(at_s > first_s and count < most for at_s, count in seen)
    assert silent, "no test says when it is silent"
    assert resolves, "no test sees it fire and resolve"


# ------------------------------------------------------------------ what they read


def test_the_controller_tells_what_a_policy_asked_for() -> None:
    decision = ScalingDecision(
        pool="decode",
        current_replicas=2,
        target_replicas=4,
        desired_replicas=9,
        reason=ScalingReason.DEMAND,
        inputs={"unmet": 5.0},
    )
    state = ControllerState(
        version="1",
        model="m",
        generation=1,
        tick=AutoscalerTick(at_s=1.0, policy="slo", decisions=(decision,)),
    )
    told = {
        sample.labels["input"]: sample.value
        for family in controller_families(state, UsageMeter())
        for sample in family.samples
        if sample.name == SCALING_INPUT.name
    }
    assert told == {DESIRED: 9.0, UNMET: 5.0}
