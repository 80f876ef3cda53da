"""`baton scale`, `baton usage`: what is asked for, and what a person reads."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from typer.testing import Result

from baton.cli.backend import Report
from baton.cli.inspect.usage import text_report as usage_readable
from baton.cli.run.scale import report_line
from baton.control.accounting.usage import UsageRow
from baton.domain.errors import ScalingRejected
from tests.cli.invoked import invoke

SCALED: Report = {
    "pool": "decode",
    "had": 2,
    "target": 3,
    "ready": 2,
    "override": {"replicas": 3, "remaining_s": 1800.0},
    "autoscaler": "slo",
}


class Asked:
    """The two commands of this verb; remembers what they were asked."""

    def __init__(self, answer: Report | Exception) -> None:
        self.answer = answer
        self.words: list[object] = []

    def scale(
        self, pool: str, replicas: int, *, for_s: float | None, address: str | None
    ) -> Report:
        return self._told(pool, replicas, for_s, address)

    def scale_auto(self, pool: str, *, address: str | None) -> Report:
        return self._told(pool, address)

    def _told(self, *words: object) -> Report:
        self.words = list(words)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def run(*arguments: str, answer: Report | Exception = SCALED) -> tuple[Result, Asked]:
    asked = Asked(answer)
    return invoke(asked, "scale", *arguments), asked


def test_a_number_is_asked_for_with_how_long_it_holds() -> None:
    result, asked = run("decode", "3", "--for", "30m")
    assert (result.exit_code, asked.words) == (0, ["decode", 3, 1800.0, None])
    assert result.stdout == "decode: 2 -> 3 replicas, 1 starting; stays so for 30 min\n"


def test_without_a_time_it_holds_for_good() -> None:
    result, asked = run("decode", "0", "--address", "h:1")
    assert (result.exit_code, asked.words) == (0, ["decode", 0, None, "h:1"])


def test_auto_clears_the_override() -> None:
    _, asked = run("decode", "--auto")
    assert asked.words == ["decode", None]


@pytest.mark.parametrize(
    "arguments",
    [("decode",), ("decode", "3", "--auto"), ("decode", "--auto", "--for", "5m"), ("decode", "-1")],
)
def test_a_senseless_argument_is_a_usage_error(arguments: tuple[str, ...]) -> None:
    result, asked = run(*arguments)
    assert (result.exit_code, asked.words) == (2, [])


def test_a_refusal_has_a_reason_and_a_remedy() -> None:
    result, _ = run("decode", "9", answer=ScalingRejected("there are at most 8", "raise it"))
    assert result.exit_code == 1
    assert result.stderr == "error: there are at most 8\nnext: raise it\n"


def test_fewer_replicas_drain_and_the_way_back_is_named() -> None:
    told = report_line({**SCALED, "target": 1, "override": {"replicas": 1, "remaining_s": None}})
    assert told == (
        "decode: 2 -> 1 replica, 1 draining before they stop; "
        "stays so until 'baton scale decode --auto'"
    )


def test_a_cleared_override_names_the_policy_that_scales_again() -> None:
    told = report_line({**SCALED, "target": 2, "override": None})
    assert told == "decode: 2 replicas; from now on slo"


def test_usage_is_one_table_of_tenants() -> None:
    row = asdict(UsageRow(tenant="acme", requests=3, device_s=12.345, cost=0.1234))
    shown = usage_readable({"since_s": 90.0, "unpriced_pools": ["decode"], "tenants": [row]})
    assert shown["since"] == "90 s ago"
    assert shown["tenants"] == [row | {"device_s": "12.3", "cost": "$0.12"}]


@pytest.mark.parametrize(
    ("cost", "text"),
    [(0, "$0.00"), (0.0, "$0.00"), (0.004, "< $0.01"), (1234.5, "$1,234.50"), (None, "-")],
)
def test_money_is_written_one_way_also_where_there_is_none(cost: float | None, text: str) -> None:
    row = asdict(UsageRow(tenant="lab", cost=cost))
    shown = usage_readable({"since_s": 600.0, "unpriced_pools": [], "tenants": [row]})
    assert shown["since"] == "10 min ago"
    assert shown["tenants"] == [row | {"device_s": "0.0", "cost": text}]
