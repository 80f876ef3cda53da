"""How the front is guarded: what is said together, and what a path may be."""

from __future__ import annotations

import pytest

from baton.config.diff import Reload, reload_class
from tests.config.conftest import MINIMAL_CONFIG, Load, Refuse


def tls(what: str) -> str:
    return f"{MINIMAL_CONFIG}security: {{tls: {{{what}}}}}\n"


def test_nothing_is_encrypted_for_clients_unless_told(load: Load) -> None:
    said = load(MINIMAL_CONFIG).config.security.tls
    assert (said.cert_file, said.key_file, said.client_ca_file) == (None, None, None)
    assert not said.required


def test_a_certificate_and_its_key_are_said_together(load: Load) -> None:
    assert load(tls("cert_file: a.pem, key_file: b.pem")).config.security.tls.key_file == "b.pem"


@pytest.mark.parametrize("path", ["'a\"b'", '"a\'b"', "'a\\b'", "'a$b'", "'a#b'"])
def test_a_path_cannot_say_more_to_haproxy_than_a_path(load_invalid: Refuse, path: str) -> None:
    (finding,) = load_invalid(tls(f"cert_file: {path}, key_file: b.pem"))
    assert "security.tls.cert_file: has a quote" in finding


def test_it_is_read_when_the_front_starts() -> None:
    assert reload_class(("security", "tls", "cert_file")) is Reload.RESTART


def test_where_tls_was_expected_it_is_said_where_it_is(load_invalid: Refuse) -> None:
    (finding,) = load_invalid(f"{MINIMAL_CONFIG}server: {{tls: {{cert: a}}}}\n")
    assert "security.tls" in finding
