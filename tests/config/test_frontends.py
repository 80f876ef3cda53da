"""What can be configured with vLLM's Rust frontend, and what is refused before anything starts."""

from __future__ import annotations

import re

import pytest

from baton.config import render
from baton.config.load import load_text
from baton.config.schema.deployment import ApiServerKind, ListenerKind
from tests.config.conftest import MINIMAL_CONFIG, Load, Refuse

RUST = MINIMAL_CONFIG + "server: {api_server: rust}\n"


def test_the_rust_frontend_is_taken_with_nothing_else_said(load: Load) -> None:
    assert load(RUST).config.server.api_server is ApiServerKind.RUST


def test_the_gate_is_the_front_where_that_is_said(load: Load) -> None:
    assert load(RUST).config.server.listener is ListenerKind.RAY_SERVE
    config = load(MINIMAL_CONFIG + "server: {api_server: rust, listener: ingress}\n").config
    assert config.server.listener is ListenerKind.INGRESS


def test_without_the_rust_frontend_there_is_no_gate_to_be_the_front(load_invalid: Refuse) -> None:
    (finding,) = load_invalid(MINIMAL_CONFIG + "server: {listener: ingress}\n")
    assert re.match(r"\S+:\d+: server\.listener: got 'ingress', ", finding), finding
    assert "expected server.api_server 'rust'" in finding


def test_a_configuration_that_was_completed_is_taken_again(load: Load) -> None:
    config = load(RUST).config
    assert load_text(render(config)) == config


def test_routes_that_it_has_may_be_listed(load: Load) -> None:
    config = load(MINIMAL_CONFIG + "server: {api_server: rust, routes: [chat, health]}\n").config
    assert config.server.routes == ("chat", "health")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            MINIMAL_CONFIG + "server: {api_server: rust, routes: [chat, messages, responses]}\n",
            "server.routes: the Rust frontend has no messages, responses",
        ),
        (RUST + "admission: {max_messages: 8}\n", "admission.max_messages:"),
        (
            MINIMAL_CONFIG + "server: {api_server: rust, allow: {media_domains: [a.example]}}\n",
            "server.allow.media_domains:",
        ),
        (
            MINIMAL_CONFIG + "server: {api_server: rust, allow: {prompt_embeds: true}}\n",
            "server.allow.prompt_embeds:",
        ),
        (
            RUST + "observability: {tracing: {otlp: 'http://collector:4318'}}\n",
            "observability.tracing.otlp: traces do not come through",
        ),
    ],
)
def test_unsupported_settings_are_refused(load_invalid: Refuse, text: str, said: str) -> None:
    (finding,) = load_invalid(text)
    assert said in finding
    assert "use server.api_server 'python'" in finding


def test_one_model_is_served(load_invalid: Refuse) -> None:
    two = RUST.replace(
        "model: {source: tiny, max_len: 4096}", "models: {a: {source: s}, b: {source: s}}"
    )
    assert any("server.api_server: serves one model" in finding for finding in load_invalid(two))
