"""What may be seen from outside: defaults, and what cannot be."""

from __future__ import annotations

import pytest

from baton.config import render
from baton.config.language.addresses import is_host
from baton.config.language.tree import is_secret_name
from baton.config.write.render import render_redacted
from baton.domain.names.addresses import is_any_address, is_loopback
from tests.config.conftest import MINIMAL_CONFIG, Load, Refuse

HUSH = "hunter2"
EVERYWHERE = "0.0.0.0"  # noqa: S104 - what is to be refused


def metrics(what: str, more: str = "") -> str:
    return f"{MINIMAL_CONFIG}observability: {{metrics: {{{what}}}{more}}}\n"


def test_metrics_and_console_are_for_this_machine_unless_told_otherwise(load: Load) -> None:
    said = load(MINIMAL_CONFIG).config.observability
    assert (said.metrics.enabled, said.metrics.host, said.metrics.port) == (True, "127.0.0.1", 9400)
    assert (said.console.enabled, said.token_file, said.tracing.otlp) == (True, None, None)


@pytest.mark.parametrize("host", [EVERYWHERE, '"::"', "10.0.0.1", "node7.example"])
def test_others_are_let_in_only_with_a_token(load: Load, load_invalid: Refuse, host: str) -> None:
    (finding,) = load_invalid(metrics(f"host: {host}"))
    assert "observability.metrics.host: got" in finding
    assert "set observability.token_file" in finding
    assert "or host to 127.0.0.1" in finding
    said = load(metrics(f"host: {host}", ", token_file: /run/token")).config.observability
    assert said.token_file is not None


@pytest.mark.parametrize("host", ["127.0.0.1", '"::1"', "localhost", "127.0.0.2"])
def test_this_machine_alone_needs_none(load: Load, host: str) -> None:
    assert load(metrics(f"host: {host}")).config.observability.token_file is None


def test_without_an_endpoint_no_token_is_accepted(load: Load) -> None:
    text = metrics("enabled: false, host: 0.0.0.0", ", console: {enabled: false}")
    assert not load(text).config.observability.metrics.enabled


@pytest.mark.parametrize(
    ("server", "refused"),
    [("127.0.0.1", True), ("localhost", True), (EVERYWHERE, True), ("10.0.0.1", False)],
)
def test_the_port_is_not_that_of_the_api(
    load: Load, load_invalid: Refuse, server: str, *, refused: bool
) -> None:
    text = f"{metrics('port: 8000')}server: {{host: {server}, port: 8000}}\n"
    if not refused:
        assert load(text).config.server.port == 8000
        return
    (finding,) = load_invalid(text)
    assert "observability.metrics.port: got 8000, which is server.port" in finding


def test_the_port_is_not_one_that_engines_may_take(load: Load, load_invalid: Refuse) -> None:
    base = load(MINIMAL_CONFIG).config.transfer.side_channel.port_base
    (finding,) = load_invalid(metrics(f"port: {base}"))
    assert f"got {base}, which is one of the side channel's" in finding
    assert load(metrics("port: 0")).config.observability.metrics.port == 0


def test_possible_secrets_are_hidden_from_viewers(load: Load) -> None:
    text = MINIMAL_CONFIG.replace(
        "{main: {role: mixed}}",
        "{main: {role: mixed, engine: {extra: {hf_token: 987654321, seed: 7}}}}",
    )
    config = load(text).config
    shown = render_redacted(config)
    assert "987654321" in render(config)
    assert "987654321" not in shown
    assert 'hf_token: "(not shown)"' in shown
    assert "seed: 7" in shown


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("return_tokens_as_token_ids", False),
        ("long_prefill_token_threshold", False),
        ("long-prefill-token-threshold", False),
        ("encoder_cudagraph_token_budgets", False),
        ("first_token", False),
        ("num_experts_per_token", False),
        ("token_identity", True),
        ("per_token_key", True),
        ("hf_token", True),
        ("HF_TOKEN_2", True),
        ("token", True),
    ],
)
def test_an_argument_about_the_tokens_of_a_text_is_no_secret(name: str, *, secret: bool) -> None:
    assert is_secret_name(name) is secret


def test_possible_secrets_of_the_api_server_are_hidden_too(load: Load) -> None:
    text = MINIMAL_CONFIG.replace("4096", "4096, api: {hf_overrides: {some_token: 12345678}}")
    shown = render_redacted(load(text).config)
    assert "12345678" not in shown
    assert 'some_token: "(not shown)"' in shown


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("collector:4318", "expected a URL"),
        ("not a url at all", "expected a URL"),
        ("ftp://collector", "expected a URL"),
        ("http://", "expected a URL"),
        ("http://collector:port", "expected a URL"),
        ("http://[::1", "expected a URL"),
        ("http://me@collector:4318", "would be shown"),
        (f"http://me:{HUSH}@collector:4318", "would be shown"),
    ],
)
def test_a_collector_is_named_by_a_url_that_holds_no_secret(
    load_invalid: Refuse, url: str, why: str
) -> None:
    (finding,) = load_invalid(f"{MINIMAL_CONFIG}observability: {{tracing: {{otlp: '{url}'}}}}\n")
    assert "observability.tracing.otlp: " in finding
    assert why in finding
    assert HUSH not in finding


@pytest.mark.parametrize(
    "url", ["http://collector:4318", "http://otel_collector:4318", "https://[::1]:4318/v1/traces"]
)
def test_a_collector_may_be_anywhere(load: Load, url: str) -> None:
    text = f"{MINIMAL_CONFIG}observability: {{tracing: {{otlp: '{url}'}}}}\n"
    assert load(text).config.observability.tracing.otlp == url


def test_a_configuration_without_secrets_is_shown_as_it_is(load: Load) -> None:
    config = load(MINIMAL_CONFIG).config
    assert render_redacted(config) == render(config)


@pytest.mark.parametrize(
    ("host", "loopback", "everywhere", "valid"),
    [
        ("127.0.0.1", True, False, True),
        ("::1", True, False, True),
        ("::ffff:127.0.0.1", True, False, True),
        ("::ffff:0.0.0.0", False, True, True),
        ("fd00::2", False, False, True),
        ("fe80::1%eth0", False, False, False),
        ("fe80::1", False, False, False),
        ("[::1]", False, False, False),
        ("LocalHost", True, False, True),
        (EVERYWHERE, False, True, True),
        ("::", False, True, True),
        ("localhost.example", False, False, True),
        ("node-1.svc.example", False, False, True),
        ("a b", False, False, False),
        ("a..b", False, False, False),
        ("-a.example", False, False, False),
        ("10.0.0.300", False, False, False),
        ("", False, False, False),
    ],
)
def test_loopback_any_and_invalid_addresses_are_distinguished(
    host: str, *, loopback: bool, everywhere: bool, valid: bool
) -> None:
    assert (is_loopback(host), is_any_address(host), is_host(host)) == (loopback, everywhere, valid)
