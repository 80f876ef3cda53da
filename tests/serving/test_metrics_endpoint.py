"""One process' metrics over HTTP: in which format, for whom, and what happens when it cannot."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as plain_text

from baton.serving.http import side_server
from baton.serving.http.access import TokenAuthMiddleware, TokenFile
from baton.serving.http.metrics_endpoint import MetricsEndpoint, MetricsRenderer, metrics_app
from baton.telemetry.catalogue import RESUMES, SLO_GOOD
from baton.telemetry.families import Families

OPEN_METRICS = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.4"
TOKEN = "a-token-that-nobody-guesses"  # noqa: S105 - of this test


def some_numbers() -> Iterator[Family]:
    families = Families()
    families.add(RESUMES, 3)
    families.add(SLO_GOOD, 7, "chat", 'a"b\\c\nd', "m", "p", "goodput")
    return families.collect()


def client(metrics: MetricsRenderer, token: Callable[[], str] | None = None) -> httpx.AsyncClient:
    app = TokenAuthMiddleware(metrics_app(metrics), token, open_paths=["/healthz"])
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://here")


async def scraped(endpoint: MetricsEndpoint) -> httpx.Response:
    async with httpx.AsyncClient() as http:
        return await http.get(f"http://{endpoint.address}/metrics")


# ------------------------------------------------------------------------------------- text


async def test_a_scraper_that_names_no_format_gets_plain_text() -> None:
    async with client(MetricsRenderer(some_numbers)) as http:
        answer = await http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    [resumes, good] = plain_text(answer.text)
    assert [sample.value for sample in resumes.samples] == [3]
    assert good.samples[0].labels["tenant"] == 'a"b\\c\nd'


async def test_a_scraper_that_asks_for_openmetrics_gets_it() -> None:
    async with client(MetricsRenderer(some_numbers)) as http:
        answer = await http.get("/metrics", headers={"accept": OPEN_METRICS})
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    told = open_metrics(answer.text)  # type: ignore[no-untyped-call]
    assert {family.name for family in told} == {"baton_resumes", "baton_slo_good_requests"}


async def test_metrics_of_another_registry_are_exported_too() -> None:
    registry = CollectorRegistry()
    Counter("vllm:swaps", "Of an engine.", registry=registry).inc(5)
    async with client(MetricsRenderer(some_numbers, extra=registry)) as http:
        for accept in ("", OPEN_METRICS):
            text = (await http.get("/metrics", headers={"accept": accept})).text
            assert "vllm:swaps_total 5.0" in text
            assert "baton_resumes_total 3.0" in text


async def test_numbers_are_read_on_the_loop_and_put_together_elsewhere() -> None:
    threads: dict[str, int] = {}

    class Others(CollectorRegistry):
        def collect(self) -> Iterator[Family]:
            threads["others"] = threading.get_ident()
            return iter(())

    def put_together() -> Iterator[Family]:
        threads["put together"] = threading.get_ident()
        yield from some_numbers()

    def collect() -> Iterator[Family]:
        threads["read"] = threading.get_ident()
        return put_together()

    await MetricsRenderer(collect, extra=Others()).render("")
    here = threading.get_ident()
    assert threads["read"] == here
    assert here not in {threads["others"], threads["put together"]}


@pytest.mark.parametrize("where", ["read", "put together"])
async def test_numbers_that_cannot_be_read_are_an_error_that_is_logged_once(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> Iterator[Family]:
        yield from ()
        raise RuntimeError("no numbers")

    def broken() -> Iterator[Family]:
        return fail() if where == "put together" else iter(tuple(fail()))

    async with client(MetricsRenderer(broken)) as http:
        answers = [await http.get("/metrics") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [500] * 3
    assert [record.message for record in caplog.records] == ["metrics cannot be rendered"]


async def test_nothing_but_metrics_is_there_and_nothing_can_be_written() -> None:
    async with client(MetricsRenderer(some_numbers)) as http:
        assert (await http.get("/")).status_code == 404
        assert (await http.post("/metrics")).status_code == 405


# ------------------------------------------------------------------------------------- token


def basic(user: str, password: str) -> str:
    return "Basic " + b64encode(f"{user}:{password}".encode()).decode()


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (f"Bearer {TOKEN}", 200),
        (f"bearer  {TOKEN}", 200),
        (basic("anybody", TOKEN), 200),
        (basic("", TOKEN), 200),
        (None, 401),
        ("", 401),
        ("Bearer", 401),
        (f"Bearer {TOKEN}x", 401),
        (f"Bearer {TOKEN[:-1]}", 401),
        (TOKEN, 401),
        (basic(TOKEN, ""), 401),
        (basic(TOKEN, "wrong"), 401),
        ("Basic !!!", 401),
        ("Basic é", 401),
        (f"Digest {TOKEN}", 401),
    ],
)
async def test_only_requests_with_the_token_get_metrics(
    authorization: str | None, status: int
) -> None:
    headers = [] if authorization is None else [(b"authorization", authorization.encode())]
    async with client(MetricsRenderer(some_numbers), lambda: TOKEN) as http:
        answer = await http.get("/metrics", headers=headers)
    assert answer.status_code == status
    assert ("baton_resumes_total" in answer.text) == (status == 200)
    assert ("www-authenticate" in answer.headers) == (status == 401)


async def test_two_credentials_at_once_are_none() -> None:
    headers = [("authorization", f"Bearer {TOKEN}"), ("authorization", "Bearer wrong")]
    async with client(MetricsRenderer(some_numbers), lambda: TOKEN) as http:
        assert (await http.get("/metrics", headers=headers)).status_code == 401


async def test_without_the_endpoint_no_process_is_asked() -> None:
    async with client(MetricsRenderer(some_numbers), lambda: TOKEN) as http:
        assert (await http.get("/healthz")).status_code == 404
        assert (await http.get("/healthzz")).status_code == 401


@pytest.mark.parametrize("error", [OSError("gone"), ValueError("empty")])
async def test_an_unreadable_token_rejects_all_and_is_logged_once(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def token() -> str:
        raise error

    async with client(MetricsRenderer(some_numbers), token) as http:
        headers = {"authorization": "Bearer "}
        answers = [await http.get("/metrics", headers=headers) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [503, 503]
    assert [record.message for record in caplog.records] == ["token_not_read"]


def test_a_token_file_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("one\n")
    path.chmod(0o600)
    token = TokenFile(path)
    assert token() == "one"
    path.write_text("another\n")
    assert token() == "another"


def test_an_unchanged_token_file_is_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("one")
    token = TokenFile(path)
    first = token(), path.stat()
    path.write_text("two")
    os.utime(path, ns=(first[1].st_atime_ns, first[1].st_mtime_ns))
    assert token() == "one"


def test_an_empty_token_file_holds_no_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(" \n")
    with pytest.raises(ValueError, match="is empty, expected a token"):
        TokenFile(path)()


@pytest.mark.parametrize(("mode", "said"), [(0o600, 0), (0o640, 1), (0o604, 1)])
def test_a_token_file_that_others_can_read_is_said(
    mode: int, said: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(mode)
    token = TokenFile(path)
    token()
    token()
    told = [r for r in caplog.records if r.message == "token_file_readable_by_others"]
    assert len(told) == said
    assert TOKEN not in str([vars(record) for record in told])


# ------------------------------------------------------------------------------------- server


async def test_an_endpoint_says_where_it_is_until_it_is_closed() -> None:
    # Others may take a port of 127.0.0.1 as soon as it is free; nobody else has this address.
    endpoint = MetricsEndpoint(MetricsRenderer(some_numbers), host="127.83.5.9")
    addresses = [endpoint.address]
    await endpoint.start()
    addresses.append(endpoint.address)
    assert "baton_resumes_total 3.0" in (await scraped(endpoint)).text
    await endpoint.close()
    await endpoint.close()
    addresses.append(endpoint.address)
    before, address, after = addresses
    assert before is after is None
    async with httpx.AsyncClient() as http:
        with pytest.raises(httpx.ConnectError):
            await http.get(f"http://{address}/metrics")


async def test_an_address_that_is_not_ours_is_said_and_not_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    endpoint = MetricsEndpoint(MetricsRenderer(some_numbers), host="192.0.2.1")  # of no machine
    await endpoint.start()
    await endpoint.close()
    assert endpoint.address is None
    [said] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert said.message == "metrics_not_served"
    assert "192.0.2.1" in str(vars(said))


async def test_a_port_that_is_taken_is_tried_again_until_it_is_free(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    port, tries, bind = taken.getsockname()[1], [0], side_server._bind

    def third_time_lucky(host: str, port: int) -> socket.socket:
        tries[0] += 1
        if tries[0] == 3:
            taken.close()
        return bind(host, port)

    monkeypatch.setattr(side_server, "_bind", third_time_lucky)
    endpoint = MetricsEndpoint(MetricsRenderer(some_numbers), host="127.0.0.1", port=port)
    endpoint._server._retry_interval_s = 0.0
    await endpoint.start()
    addresses = {endpoint.address}
    async with asyncio.timeout(10):
        while len(addresses) == 1:
            await asyncio.sleep(0)
            addresses.add(endpoint.address)
        assert (await scraped(endpoint)).status_code == 200
    await endpoint.close()
    told = [record.message for record in caplog.records]
    assert addresses == {None, f"127.0.0.1:{port}"}
    assert told.count("metrics_not_served") == 1
    assert told.count("metrics_served") == 1


async def test_a_scraper_that_stays_connected_does_not_keep_an_endpoint_from_closing() -> None:
    endpoint = MetricsEndpoint(MetricsRenderer(some_numbers), host="127.0.0.1")
    await endpoint.start()
    host, _, port = (endpoint.address or "").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(3):
        await endpoint.close()
        assert await reader.read() == b""
    writer.close()


async def test_signals_stay_with_the_owner_of_the_process() -> None:
    import signal

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    endpoint = MetricsEndpoint(MetricsRenderer(some_numbers), host="127.0.0.1")
    await endpoint.start()
    assert (await scraped(endpoint)).status_code == 200
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    await endpoint.close()
