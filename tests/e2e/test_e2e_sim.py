"""A whole baton on Ray with simulated engines, from HTTP to tokens and back."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.deployments import MAX_TOKENS, SERVING, Deployment, running_deployment
from tests.fakes.free_ports import free_port
from tests.fakes.processes import descendants

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
TOKENS = 300
_OWN_LINE = re.compile(r"\[ *\d+\.\ds\] \S.*|endpoint: \S+|ended: yes|stopping .* takes over .*")
"""A line of `baton up` itself, and of no library."""
_INGRESS = "ray::ServeReplica:baton:ingress"


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secrets") / "token"
    path.write_text("a-token-that-nobody-guesses\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def baton(tmp_path_factory: pytest.TempPathFactory, token_file: Path) -> Iterator[Deployment]:
    settings = {"observability.token_file": token_file}
    with running_deployment("sim.yaml", tmp_path_factory.mktemp("sim"), **settings) as deployment:
        yield deployment


def prompt(number: int) -> str:
    return f"stream {number}: " + "pass the baton on " * (number + 5)


def test_a_stream_is_prefilled_and_decoded_apart(baton: Deployment) -> None:
    before = sum(row["pulls"] for row in baton.replicas())
    assert len(baton.stream(prompt(0))) > 0
    after = baton.wait_for(
        lambda s: sum(row["pulls"] for row in s["ingresses"][0]["replicas"]) > before, 10
    )
    pulled = [row for row in after["ingresses"][0]["replicas"] if row["pulls"]]
    assert {row["role"] for row in pulled} == {"decode"}


def test_a_request_is_explained_by_the_name_that_its_client_gave_it(baton: Deployment) -> None:
    baton.stream(prompt(1), request_id="why-there")
    (record,) = baton.run_json("explain", "route", "why-there")["requests"]
    assert (record["outcome"], record["mode"]) == ("finished", "pull")
    assert record["output_tokens"] == MAX_TOKENS
    (decision,) = record["decisions"]
    assert decision["policy"] == "predicted"
    assert {option["prefill_replica"] for option in decision["options"] if option["chosen"]} == {
        record["prefill_replica"]
    }
    assert decision["predicted_ttft_s"] > 0
    assert decision["actual_ttft_s"] > 0


def test_every_pair_of_replicas_is_found_to_work(baton: Deployment) -> None:
    found = baton.wait_for(
        lambda answer: all(row["state"] == "ok" for row in answer["links"]), 20, "links"
    )
    pools = Counter(
        (row["source_id"].partition("-")[0], row["target_id"].partition("-")[0])
        for row in found["links"]
    )
    assert pools == {("prefill", "decode"): 4}


def test_an_operator_can_look_at_it_from_a_terminal(baton: Deployment) -> None:
    baton.stream(prompt(2), request_id="looked-at")
    top = baton.run_json("top", "--once")
    assert (top["links"]["pairs"], {row["pool"] for row in top["pools"]}) == (
        4,
        {"prefill", "decode"},
    )
    assert "looked-at" in " ".join(row["request_id"] for row in top["slowest"])
    (record,) = baton.run_json("trace", "looked-at")["requests"]
    bars_s = sum(bar["to_s"] - bar["from_s"] for bar in record["waterfall"])
    assert bars_s == pytest.approx(record["ended_s"], rel=0.05)
    ended = baton.run_json("logs", "--event", "request_ended", "--request", "looked-at")
    assert ended["source"].startswith("ingress-")
    assert ended["decode_replica"] == record["decode_replica"]


@pytest.mark.thorough
def test_a_deployment_that_is_well_has_a_clean_bill_of_health(baton: Deployment) -> None:
    baton.assert_healthy(pairs=4)


def test_prometheus_finds_every_process_at_one_address_that_needs_a_token(
    baton: Deployment, token_file: Path
) -> None:
    baton.stream(prompt(2))
    url = baton.status()["observability"]["url"]
    assert f"console and metrics at {url}" in baton.log.read_text()
    assert httpx.get(f"{url}/healthz").status_code == 200
    assert [httpx.get(url + path).status_code for path in ("/", "/sd", "/metrics")] == [401] * 3
    reader = httpx.Client(auth=("prometheus", token_file.read_text().strip()), timeout=10)
    with reader:
        targets = {item["targets"][0]: item["labels"] for item in reader.get(f"{url}/sd").json()}
        kinds = Counter((of["component"], of.get("pool")) for of in targets.values())
        own = {("controller", None): 1, ("ingress", None): 1}
        assert kinds == own | {("replica", "prefill"): 2, ("replica", "decode"): 2}
        texts: dict[str, str] = {}
        for target, of in targets.items():
            page = f"http://{target}{of['__metrics_path__']}"
            assert httpx.get(page).status_code == 401, target
            texts[of["component"]] = texts.get(of["component"], "") + reader.get(page).text
        assert "<title>baton</title>" in reader.get(url).text
        config = reader.get(f"{url}/api/config")
    assert 'baton_pool_replicas{pool="decode",state="ready"} 2.0' in texts["controller"]
    assert 'outcome="finished"' in texts["ingress"]
    assert 'baton_transfer_pulls_total{source="prefill-' in texts["replica"]
    assert token_file.read_text().strip() not in config.text


def test_the_policy_that_places_requests_is_told(baton: Deployment) -> None:
    assert baton.status()["ingresses"][0]["policy"] == {"name": "predicted"}


@pytest.mark.thorough
def test_serve_replaces_a_killed_replica_and_it_gets_work(baton: Deployment) -> None:
    def whole(status: dict[str, object]) -> bool:
        rows = status["ingresses"][0]["replicas"]  # type: ignore[index]
        return Counter(row["pool"] for row in rows) == {"prefill": 2, "decode": 2}

    baton.wait_for(whole, 60)
    assert len(baton.stream(prompt(3))) > 0


def test_a_client_that_leaves_frees_its_replicas(baton: Deployment) -> None:
    before = baton.status()["ingresses"][0]["ended"].get("cancelled", 0)
    body = {"model": "tiny", "prompt": prompt(9), "max_tokens": 3000, "stream": True}
    with httpx.stream("POST", f"{baton.url}/v1/completions", json=body, timeout=60) as answer:
        next(answer.iter_lines())
    ended = baton.wait_for(lambda s: s["ingresses"][0]["in_flight"] == {}, 10)["ingresses"][0]
    assert all(row["inflight_legs"] == 0 for row in ended["replicas"])
    assert ended["ended"]["cancelled"] == before + 1, "it ran to its end instead"


def test_a_configuration_is_applied_while_streams_flow_and_a_bad_one_changes_nothing(
    baton: Deployment, tmp_path: Path
) -> None:
    file = baton.options
    live = tmp_path / "live.yaml"
    live.write_text(
        "slo: {default: {ttft: 20s}, classes: {batch: {ttft: 60s, priority: -1}}}\n"
        "tenants: {default: {weight: 2, rate: {requests: 10k/s}, max_in_flight: 500}}\n"
        "admission: {max_queued_requests: 500, max_n: 4}\n"
        "transfer: {early_first_token: true}\n"
        "pools: {decode: {replicas: {initial: 3}}}\n"
    )
    bad = tmp_path / "bad.yaml"
    bad.write_text("slo:\n  default: {ttft: soon}\n")
    unloadable = tmp_path / "unloadable.yaml"
    unloadable.write_text("router: {policy: 'no_such_module:choose', disaggregate: always}\n")
    flows, over = threading.Event(), threading.Event()

    def keep_asking(number: int) -> int:
        asked = 0
        while not over.is_set():
            baton.stream(prompt(number), max_tokens=40, on_chunk=lambda _count: flows.set())
            asked += 1
        return asked

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(keep_asking, number) for number in range(4)]
        try:
            assert flows.wait(60)
            applied = baton.run_json("apply", *file, "-c", str(live))
            again = baton.run_json("apply", *file, "-c", str(live))
            assert "bad.yaml:2:19: slo.default.ttft: got 'soon'" in baton.run_failing(
                "apply", *file, "-c", str(bad)
            )
            assert "no_such_module" in baton.run_failing("apply", *file, "-c", str(unloadable))
            assert "transfer.lease" in baton.run_failing(
                "apply", *file, "--set", "transfer.lease=2m"
            )
            grown = baton.wait_for(lambda status: decoding(status) == 3, 30)
            back = baton.run_json("apply", *file)
        finally:
            over.set()
        assert all(stream.result(timeout=90) for stream in asking)
    assert (applied["generation"], applied["resized"]) == (1, {"decode": [2, 3]})
    assert applied["replaced"] == []
    assert (again["changes"], grown["generation"]) == ([], 1)
    assert (back["generation"], back["resized"]) == (2, {"decode": [3, 2]})
    baton.wait_for(lambda status: decoding(status) == 2, 30)


def test_an_applied_timeout_is_an_edge_of_new_series_and_the_old_ones_stay_as_they_are(
    baton: Deployment, token_file: Path
) -> None:
    baton.stream(prompt(3))
    before = worst_gaps(baton, token_file)
    sets = ("--set", "admission.timeouts.stall=11s")
    shown = baton.run_json("apply", *baton.options, *sets, "--diff")["histograms"]
    assert baton.run_json("apply", *baton.options, *sets)["histograms"] == shown
    try:
        assert "baton_worst_token_gap_seconds: +11 s" in shown
        baton.stream(prompt(3))
        after = worst_gaps(baton, token_file)
    finally:
        baton.run_json("apply", *baton.options)
    (new,) = after.keys() - before.keys()
    assert before.items() <= after.items()
    assert after[new]["11.0"] == after[new]["600.0"] == after[new]["+Inf"] == 1
    assert all("11.0" not in buckets for buckets in before.values())


def worst_gaps(baton: Deployment, token_file: Path) -> dict[tuple[str, ...], dict[str, float]]:
    """The histogram of the requests' longest gaps: counts by edge, by model, pool and edges."""
    found: dict[tuple[str, ...], dict[str, float]] = {}
    url = baton.status()["observability"]["url"]
    with httpx.Client(auth=("prometheus", token_file.read_text().strip()), timeout=10) as reader:
        for target in reader.get(f"{url}/sd").json():
            if target["labels"]["component"] != "ingress":
                continue
            page = f"http://{target['targets'][0]}{target['labels']['__metrics_path__']}"
            for family in text_string_to_metric_families(reader.get(page).text):
                for sample in family.samples:
                    if sample.name == "baton_worst_token_gap_seconds_bucket":
                        of = sample.labels
                        whose = (of["slo_class"], of["model"], of["pool"], of["edges"])
                        found.setdefault(whose, {})[of["le"]] = sample.value
    return found


def decoding(status: dict[str, object]) -> int:
    """Decode replicas that the ingress sends work to."""
    rows = status["ingresses"][0]["replicas"]  # type: ignore[index]
    return sum(row["pool"] == "decode" and not row["draining"] for row in rows)


@pytest.mark.thorough
def test_a_pool_is_scaled_by_hand_for_a_while_and_a_new_controller_keeps_to_it(
    baton: Deployment,
) -> None:
    undisturbed = [baton.stream(prompt(number), max_tokens=60) for number in range(4)]
    with flowing(baton, 4, max_tokens=60) as streams:
        report = baton.run_json("scale", "decode", "3", "--for", "5m")
        grown = baton.wait_for(lambda status: decoding(status) == 3, 30)
        assert (report["had"], report["target"], report["override"]["replicas"]) == (2, 3, 3)
        os.kill(pid_of_controller(baton), signal.SIGKILL)
        again = baton.wait_for(lambda status: is_known_after_restart(status, grown), 40)
        assert again["autoscaler"]["overrides"][0]["remaining_s"] < 300
        baton.run_json("scale", "decode", "3", "--for", "2s")
        baton.wait_for(lambda status: decoding(status) == 2, 40)
    assert {text for text, _ in streams} == set(undisturbed)
    (row,) = [row for row in baton.status()["pools"] if row["pool"] == "decode"]
    assert (row["desired"], row["draining"]) == (2, 0)
    assert "expected 0 to 8" in baton.run_failing("scale", "decode", "99")
    assert "pool 'missing'" in baton.run_failing("scale", "missing", "1")


@pytest.mark.thorough
def test_pools_follow_a_load_that_rises_and_falls(baton: Deployment, tmp_path: Path) -> None:
    file = baton.options
    scaled = tmp_path / "scaled.yaml"
    scaled.write_text(
        "slo: {default: {ttft: 2s, tpot: 500ms, attainment: 0.9}}\n"
        "autoscaler: {interval: 500ms, scale_down: {cooldown: 2s, max_step: 4}}\n"
        "pools: {prefill: {replicas: {initial: 1}}, decode: {replicas: {initial: 1}}}\n"
    )
    assert baton.run_json("apply", *file, "-c", str(scaled))["changes"]
    chance, over = random.Random(5), threading.Event()
    outcomes: Counter[int] = Counter()

    def send() -> None:
        body = {"model": "tiny", "prompt": unlike(chance, 3000), "max_tokens": 8, "stream": True}
        answer = httpx.post(f"{baton.url}/v1/completions", json=body, timeout=60)
        whole = answer.status_code != httpx.codes.OK or answer.text.rstrip().endswith("[DONE]")
        outcomes[answer.status_code if whole else 0] += 1

    def rising(pool: ThreadPoolExecutor) -> None:
        while not over.wait(1 / 16):  # a replica prefills six or seven of these in a second
            pool.submit(send)

    with ThreadPoolExecutor(64) as pool:
        load = threading.Thread(target=rising, args=(pool,))
        load.start()
        try:
            baton.wait_for(lambda status: prefilling(status) >= 3, 60)
            served = baton.wait_for(lambda status: attains(status, 0.9), 60)
        finally:
            over.set()
            load.join()
    assert outcomes.keys() <= {200, 429, 503}, "an admitted request failed"
    assert served["autoscaler"]["last_action"] is not None
    ticks = baton.run_json("explain", "scale", "-n", "300")["ticks"]
    grew = [item for tick in ticks for item in tick["actions"] if item.startswith("start")]
    assert grew, "nothing says why there are more"
    baton.wait_for(lambda status: prefilling(status) == 1, 90)
    assert baton.stream(prompt(5))
    usage = {row["tenant"]: row for row in baton.run_json("usage")["tenants"]}
    assert usage["default"]["requests"] > 0
    assert usage["(idle)"]["device_s"] > 0


def is_known_after_restart(status: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether another controller answers, and knows of an override."""
    return status["up_s"] < before["up_s"] and bool(status["autoscaler"]["overrides"])


def unlike(chance: random.Random, tokens: int) -> list[int]:
    """A prompt that shares nothing with any other."""
    return [chance.randrange(300, 8000) for _ in range(tokens)]


def prefilling(status: dict[str, Any]) -> int:
    """Replicas of the prefill pool, once Serve has as many as it should."""
    (row,) = [row for row in status["pools"] if row["pool"] == "prefill"]
    return int(row["desired"]) if row["desired"] == row["ready"] else 0


def attains(status: dict[str, Any], share: float) -> bool:
    """Whether recent requests have met their objectives."""
    (row,) = status["classes"]
    return row["attainment"] is not None and row["attainment"] >= share


def pid_of_controller(baton: Deployment) -> int:
    """The process of baton's own controller; Ray names it after the deployment."""
    (found,) = [
        descendant.pid
        for descendant in descendants(baton.process.pid)
        if " ".join(descendant.cmdline()).startswith("ray::ServeReplica:baton:controller")
    ]
    return found


@contextmanager
def flowing(baton: Deployment, streams: int, *, max_tokens: int) -> Iterator[list[tuple[str, int]]]:
    """Streams that follow each other while something is done; their texts, with their numbers."""
    over, done = threading.Event(), list[tuple[str, int]]()

    def keep_asking(number: int) -> None:
        while not over.is_set():
            done.append((baton.stream(prompt(number), max_tokens=max_tokens), number))

    with ThreadPoolExecutor(streams) as pool:
        asking = [pool.submit(keep_asking, number) for number in range(streams)]
        try:
            yield done
        finally:
            over.set()
        for stream in asking:
            stream.result(timeout=90)


def test_one_ingress_carries_many_streams_at_once(baton: Deployment) -> None:
    with ThreadPoolExecutor(32) as pool:
        texts = list(pool.map(lambda n: baton.stream(prompt(n % 4), max_tokens=50), range(64)))
    assert [texts[n] for n in range(4)] * 16 == texts


def test_no_token_waits_until_an_ordinary_client_has_acknowledged_the_one_before(
    baton: Deployment,
) -> None:
    """With Nagle's algorithm anywhere on the way, four or five of them would come together."""
    body = json.dumps(
        {"model": "tiny", "prompt": prompt(5), "max_tokens": TOKENS, "ignore_eos": True}
        | {"stream": True, "return_token_ids": True}
    )
    url = httpx.URL(baton.url)
    request = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {url.netloc.decode()}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    )
    with socket.create_connection((url.host, url.port or 80), timeout=60) as client:
        client.sendall(request.encode())
        parts = [client.recv(65536)]
        while b"[DONE]" not in parts[-1]:
            parts.append(client.recv(65536))
            assert parts[-1], "the server closed the connection"
    # Tokens, not events: on a busy machine a step that comes late shares the next one's.
    report = re.findall(rb'"token_ids":\[([^]]*)\]', b"".join(parts))
    assert sum(len(ids.split(b",")) for ids in report if ids) == TOKENS
    assert len(parts) > TOKENS / 2


@pytest.mark.thorough
def test_the_openai_and_anthropic_sdks_are_served(baton: Deployment) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/compat"],
        env=os.environ | {"BATON_TEST_URL": baton.url, "BATON_TEST_LACKS": "logprobs,json_schema"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.thorough
def test_an_ingress_is_replaced_while_streams_flow_and_none_is_lost(baton: Deployment) -> None:
    before, over, flows = ingresses(baton), threading.Event(), threading.Event()

    def keep_asking(max_tokens: int) -> int:
        asked = 0
        while not over.is_set():
            baton.stream(prompt(asked), max_tokens=max_tokens, on_chunk=lambda _count: flows.set())
            asked += 1
        return asked

    # Some are sure to be in the middle of it when the old ingress drains, some to come just then.
    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(keep_asking, tokens) for tokens in (1500, 1500, 40, 1)]
        try:
            assert flows.wait(60)
            options = (*baton.options, "--set", "model.revision=two", "--bake", "1s")
            baton.run_json("apply", *options, timeout_s=300)
            baton.wait_for(lambda _: bool(now := ingresses(baton)) and not now & before, 120)
        finally:
            over.set()
        assert all(stream.result(timeout=90) for stream in asking)


def ingresses(baton: Deployment) -> set[int]:
    """The processes of its ingresses."""
    found = set()
    for process in descendants(baton.process.pid):
        with contextlib.suppress(psutil.Error):
            if "".join(process.cmdline()[:1]).startswith(_INGRESS):
                found.add(process.pid)
    return found


def test_when_the_only_ingress_is_killed_clients_wait_or_are_told_when_to_come_back(
    baton: Deployment,
) -> None:
    (pid,) = ingresses(baton)
    os.kill(pid, signal.SIGKILL)
    until_s, seen = time.monotonic() + 180, Counter[int]()
    body = {"model": "tiny", "prompt": prompt(1), "max_tokens": 1}
    while not seen[200] or pid in ingresses(baton):
        assert time.monotonic() < until_s, seen
        try:
            answer = httpx.post(f"{baton.url}/v1/completions", json=body, timeout=60)
        except httpx.RemoteProtocolError:  # it was with the ingress when that died
            seen[0] += 1
            continue
        assert answer.status_code in {200, 502, 503}, answer.text
        seen[answer.status_code] += 1
        if answer.status_code != 200:
            kinds = {502: "InternalServerError", 503: "ServiceUnavailableError"}
            assert answer.headers["content-type"] == "application/json"
            assert answer.json()["error"]["type"] == kinds[answer.status_code]
            assert int(answer.headers["retry-after"]) > 0
    assert seen[0] + seen[502] <= 1, "only the one that was under way is cut off"


def test_a_taken_port_is_said_before_anything_starts(baton: Deployment) -> None:
    port = baton.url.rpartition(":")[2]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "baton.cli.main", "up"),
            *("-c", "configs/sim.yaml", "--set", f"server.port={port}"),
        ],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert f"port {port}" in done.stderr or f":{port}" in done.stderr
    assert "starting" not in done.stderr


def test_a_start_that_is_late_says_what_it_waited_for_and_keeps_its_logs(
    tmp_path: Path, baton: Deployment
) -> None:
    del baton  # its cluster runs beside
    done = subprocess.run(
        [
            *(sys.executable, "-m", "baton.cli.main", "up", "-c", "configs/sim.yaml", "--detach"),
            *("--set", f"server.port={free_port()}", "--set", "observability.metrics.port=0"),
            *("--timeout", "1s"),
        ],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"XDG_STATE_HOME": str(tmp_path), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode != 0
    assert "after 1 s" in done.stderr
    (where,) = re.findall(r"logs are kept in ([^\s;]+)", done.stderr)
    assert Path(where).parent == tmp_path / "baton" / "failed"
    assert list(Path(where).glob("serve/*"))
    (log,) = re.findall(r"its output is in ([^\s;]+)", done.stderr)
    assert "after 1 s" in Path(log).read_text()


def test_down_ends_the_deployment_and_every_process(tmp_path: Path, baton: Deployment) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "baton.cli.main", "down", "-o", "json"],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["pid"] == baton.process.pid
    assert baton.process.wait(5) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{baton.url}/health")
    output = baton.log.read_text()
    lines = output.splitlines()
    serving = next(number for number, line in enumerate(lines) if SERVING in line)
    ending = next(number for number, line in enumerate(lines) if "draining and stopping" in line)
    assert [
        line for line in lines[:serving] + lines[ending:] if not _OWN_LINE.fullmatch(line)
    ] == []
    assert "\x1b" not in output
