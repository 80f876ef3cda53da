"""What is said before a start about certificates, and about what would be open."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.config import DeploymentConfig
from baton.serving.checks.configuration import check_exposure, check_ray_auth
from baton.serving.checks.facts import secret_files
from baton.serving.checks.named_files import tls_findings
from baton.serving.checks.result import CheckStatus, UnknownFact
from tests.fakes.certificates import KeyPair, make_key_pair
from tests.serving.configs import written

PUBLIC = "server.host=0.0.0.0"
KEYED = "tenants.acme.keys_file=acme.keys"


def config(folder: Path, *sets: str) -> DeploymentConfig:
    text = "version: 1\nmodel: {source: tiny, max_len: 4096}\npools: {main: {role: mixed}}\n"
    return written(folder, text, *sets)


def with_tls(folder: Path, cert: Path, key: Path, *sets: str) -> DeploymentConfig:
    files = (f"security.tls.cert_file={cert}", f"security.tls.key_file={key}")
    return config(folder, *files, *sets)


@pytest.fixture
def pair(tmp_path: Path) -> KeyPair:
    return make_key_pair(tmp_path, "server")


def test_a_certificate_with_its_key_is_good(tmp_path: Path, pair: KeyPair) -> None:
    authorities = f"security.tls.client_ca_file={pair.cert}"
    assert tls_findings(with_tls(tmp_path, pair.cert, pair.key, authorities)) == ()
    assert tls_findings(config(tmp_path)) == ()


def test_a_file_that_is_not_there_is_named_by_its_key(tmp_path: Path, pair: KeyPair) -> None:
    (finding,) = tls_findings(with_tls(tmp_path, pair.cert, tmp_path / "none.pem"))
    assert finding.found.startswith(f"security.tls.key_file: {tmp_path}/none.pem cannot be read")
    authorities = f"security.tls.client_ca_file={tmp_path}/no-ca.pem"
    (finding,) = tls_findings(with_tls(tmp_path, pair.cert, pair.key, authorities))
    assert finding.found.startswith(
        f"security.tls.client_ca_file: {tmp_path}/no-ca.pem cannot be read"
    )


def test_the_key_of_another_certificate_is_refused(tmp_path: Path, pair: KeyPair) -> None:
    other = make_key_pair(tmp_path, "other")
    (finding,) = tls_findings(with_tls(tmp_path, pair.cert, other.key))
    assert "no certificate and its key" in finding.found


def test_an_invalid_certificate_is_refused_and_not_shown(tmp_path: Path, pair: KeyPair) -> None:
    text = tmp_path / "text.pem"
    text.write_text("the-merger-closes-on-friday")
    (finding,) = tls_findings(with_tls(tmp_path, text, pair.key))
    assert "no certificate and its key" in finding.found
    authorities = f"security.tls.client_ca_file={text}"
    (finding,) = tls_findings(with_tls(tmp_path, pair.cert, pair.key, authorities))
    assert "holds no certificates" in finding.found
    assert "merger" not in str(finding)


def test_a_private_key_that_others_may_read_is_found(tmp_path: Path, pair: KeyPair) -> None:
    pair.key.chmod(0o644)
    found = secret_files(with_tls(tmp_path, pair.cert, pair.key))
    assert [(file_fact.purpose, file_fact.mode) for file_fact in found] == [
        ("security.tls.key_file", 0o644)
    ]


def test_an_endpoint_for_this_machine_alone_may_be_as_it_is(tmp_path: Path) -> None:
    for local in (config(tmp_path), config(tmp_path, KEYED)):
        assert check_exposure(local).status is CheckStatus.PASS


def test_an_endpoint_without_keys_serves_every_client_and_says_so(
    tmp_path: Path,
) -> None:
    found = check_exposure(config(tmp_path, PUBLIC))
    assert found.status is CheckStatus.WARN
    assert "0.0.0.0:8000 serves every client, without a key" in found.detail
    assert "baton keys create" in found.fix


def test_keys_in_clear_are_said_unless_they_are_refused_or_encrypted(
    tmp_path: Path, pair: KeyPair
) -> None:
    found = check_exposure(config(tmp_path, PUBLIC, KEYED))
    assert (found.status, "in clear" in found.detail) == (CheckStatus.WARN, True)
    for closed in (
        config(tmp_path, PUBLIC, KEYED, "security.tls.required=true"),
        with_tls(tmp_path, pair.cert, pair.key, PUBLIC, KEYED),
    ):
        assert check_exposure(closed).status is CheckStatus.PASS


@pytest.mark.parametrize(
    ("auth", "address", "status"),
    [
        ("open", "10.0.0.7:6379", CheckStatus.FAIL),
        ("open", "127.0.0.1:6379", CheckStatus.WARN),
        ("guarded", "10.0.0.7:6379", CheckStatus.PASS),
        ("RpcError: unavailable", "10.0.0.7:6379", CheckStatus.SKIP),
        (UnknownFact("nothing came"), "10.0.0.7:6379", CheckStatus.SKIP),
    ],
)
def test_a_ray_without_authentication_is_not_deployed_on(
    auth: str | UnknownFact, address: str, status: CheckStatus
) -> None:
    running = check_ray_auth(auth, address)
    refused = check_ray_auth(auth, address, is_allowed=False)
    assert running.status is refused.status is status
    assert ("RAY_AUTH_MODE=token" in running.fix) is (auth == "open")
    assert ("cluster.allow_open: true" in refused.fix) is (auth == "open")
    allowed = check_ray_auth(auth, address, is_allowed=True)
    assert allowed.status is (CheckStatus.WARN if auth == "open" else status)
