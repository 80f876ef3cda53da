"""Where pools go and how they reach each other: labels, limits, networks, variables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config import engine_env, render
from baton.config.derive.selectors import matches_labels
from tests.config.conftest import MINIMAL_CONFIG, Load, Refuse

LABELS = st.dictionaries(st.sampled_from("pqr"), st.sampled_from("abc"), max_size=3)


def main_pool(keys: str) -> str:
    return MINIMAL_CONFIG.replace("{role: mixed}", f"{{role: mixed, {keys}}}")


@pytest.mark.parametrize("selector", ["h100", "!spot", "in(a, b)", "!in(a,b)", "a.b_c-d"])
def test_a_label_may_be_chosen_in_each_of_rays_ways(load: Load, selector: str) -> None:
    text = main_pool(f"placement: {{labels: {{ray.io/rack: '{selector}'}}}}")
    config = load(text).config
    assert config.pools["main"].placement.labels == {"ray.io/rack": selector}
    assert load(render(config)).config == config


@pytest.mark.parametrize(
    "key", ["server: {host", "observability: {metrics: {host", "cluster: {node_address",
            "transfer: {side_channel: {bind"]
)  # fmt: skip
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[fd00::2]", "got '[fd00::2]', expected it without brackets: 'fd00::2'"),
        ("[::1]", "got '[::1]', expected it without brackets: '::1'"),
        ("fe80::1%eth0", "got 'fe80::1%eth0', a link-local address: expected a global"),
        ("fe80::1", "got 'fe80::1', a link-local address: expected a global"),
        ("[fd00::2]:8000", "got '[fd00::2]:8000', expected "),
        ("fd00::2:z", "got 'fd00::2:z', expected "),
    ],
)
def test_an_ipv6_address_that_cannot_stand_alone_is_refused(
    load_invalid: Refuse, key: str, text: str, why: str
) -> None:
    (found,) = load_invalid(f'{MINIMAL_CONFIG}{key}: "{text}"{"}" * key.count("{")}\n')
    assert why in found


def test_addresses_of_ipv6_are_taken_where_addresses_are(load: Load) -> None:
    text = (
        f'{MINIMAL_CONFIG}server: {{host: "::"}}\ncluster: {{node_address: "fd00::2"}}\n'
        'transfer: {side_channel: {bind: "fd00::/64"}}\n'
        'observability: {metrics: {host: "::1"}}\n'
    )
    config = load(text).config
    assert (config.server.host, config.cluster.node_address) == ("::", "fd00::2")


def test_a_pools_variables_win_over_those_of_all(load: Load) -> None:
    text = main_pool("env: {UCX_TLS: rc, MINE: {env: M}}") + "transfer: {env: {UCX_TLS: tcp, A: b}}"
    found = engine_env(load(text).config, "main", {"M": "1"})
    assert found == {"UCX_TLS": "rc", "A": "b", "MINE": "1"}


@pytest.mark.parametrize(
    ("selector", "passes"),
    [
        ("a", "a"),
        ("!a", "bc-"),
        ("in(a, b)", "ab"),
        ("!in(a,b)", "c-"),
    ],
)
def test_a_selector_chooses_what_ray_would(selector: str, passes: str) -> None:
    labels = {value: {} if value == "-" else {"p": value} for value in "abc-"}
    assert {v for v, entry in labels.items() if matches_labels({"p": selector}, entry)} == set(
        passes
    )


@given(labels=LABELS, wanted=LABELS)
def test_a_node_must_pass_every_selector(labels: dict[str, str], wanted: dict[str, str]) -> None:
    each = [matches_labels({name: value}, labels) for name, value in wanted.items()]
    assert matches_labels(wanted, labels) == all(each)
