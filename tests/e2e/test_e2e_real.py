"""A whole baton on Ray with real vLLM engines on the CPU and real NIXL transfers."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from baton.engine.tiny_model import write_tiny_model
from baton.serving.replica.engines import tiny_model_folder
from tests.e2e.deployments import Deployment, running_deployment
from tests.fakes.otlp_receiver import OtlpReceiver, running_receiver, span_paths
from tests.fakes.processes import descendants, find_alive, start_process
from tests.fakes.scaled_deadline import ScaledDeadline

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]
PROMPTS = 20
MAX_TOKENS = 24
ROOT = Path(__file__).parents[2]


class PlainEngine:
    """One plain vLLM engine in a process of its own: answers all prompts and ends."""

    def __init__(self, folder: Path) -> None:
        asked, self.answered = folder / "asked.json", folder / "answered.json"
        self.log = folder / "plain.log"
        asked.write_text(json.dumps(prompts()))
        program = Path(__file__).parent / "programs" / "plain_vllm.py"
        model = write_tiny_model(tiny_model_folder())
        environment = {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        files = (asked, self.answered)
        command = (sys.executable, program, model, str(MAX_TOKENS), *files)
        self.process = start_process(command, self.log, os.environ | environment)

    def wait(self) -> None:
        """Until it has answered: what is tested then has the machine for itself."""
        deadline = ScaledDeadline(240)
        while self.process.poll() is None:
            assert not deadline.is_expired(), self.log.read_text()
            time.sleep(0.2)
        assert self.process.returncode == 0, self.log.read_text()

    def end(self) -> None:
        """With every process that it started."""
        if self.process.poll() is None:
            for process in descendants(self.process.pid):
                process.kill()
            self.process.kill()
            self.process.wait(timeout=30)


@pytest.fixture(scope="module")
def plain_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainEngine]:
    engine = PlainEngine(tmp_path_factory.mktemp("plain"))
    try:
        yield engine
    finally:
        engine.end()


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpReceiver]:
    with running_receiver() as found:
        yield found


@pytest.fixture(scope="module")
def baton(
    tmp_path_factory: pytest.TempPathFactory, collector: OtlpReceiver, plain_engine: PlainEngine
) -> Iterator[Deployment]:
    """Starts beside the plain engine: either alone would leave a core idle for a minute."""
    folder = tmp_path_factory.mktemp("real")
    settings = {"pools.decode.replicas.max": 2, "observability.tracing.otlp": collector.url}
    with running_deployment("quickstart.yaml", folder, **settings) as deployment:
        plain_engine.wait()
        yield deployment


def prompts() -> list[list[int]]:
    """Prompts of 5 to 1,500 tokens, no two with a common beginning."""
    chance = random.Random(7)
    lengths = [5, 31, 32, 33, 64, 65, *(chance.randrange(70, 1500) for _ in range(PROMPTS - 6))]
    return [[chance.randrange(300, 8000) for _ in range(length)] for length in lengths]


def ask(baton: Deployment, prompt: list[int], **headers: str) -> list[int]:
    """The token ids that baton generates greedily."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    url = f"{baton.url}/v1/completions"
    answer = httpx.post(url, json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


def decoded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    (row,) = [row for row in rows if row["role"] == "decode"]
    return row


@pytest.fixture(scope="module")
def plain(baton: Deployment, plain_engine: PlainEngine) -> list[list[int]]:
    """What one plain vLLM engine says."""
    answers: list[list[int]] = json.loads(plain_engine.answered.read_text())
    return answers


def test_tokens_equal_those_of_one_plain_engine_and_the_blocks_were_pulled_by_nixl(
    baton: Deployment, plain: list[list[int]]
) -> None:
    before = decoded(baton.replicas())
    answers = [ask(baton, prompt) for prompt in prompts()]
    assert answers == plain
    blocks = sum(-(-len(prompt) // 32) for prompt in prompts())
    # The engine's own counter of bytes; a block of the tiny model's cache, keys and values:
    block_bytes = 4 * 2 * 32 * 2 * 64 * 2

    def moved(status: dict[str, Any]) -> tuple[int, float]:
        row = decoded(status["ingresses"][0]["replicas"])
        pulls, moved_bytes = (row[name] - before[name] for name in ("pulls", "moved_bytes"))
        return pulls, moved_bytes / block_bytes

    after = baton.wait_for(lambda s: moved(s)[0] >= PROMPTS and moved(s)[1] >= blocks, 10)
    pulls, moved_blocks = moved(after)
    # A busy machine makes a link look slow: then its pair is probed, by a block and a token.
    probes = pulls - PROMPTS
    assert 0 <= probes <= 3
    assert blocks + probes <= moved_blocks <= blocks + 2 * probes
    assert decoded(after["ingresses"][0]["replicas"])["transfer_failures"] == 0


def test_a_callers_trace_has_the_spans_of_both_engines_and_they_fill_its_time(
    baton: Deployment, collector: OtlpReceiver
) -> None:
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    ask(baton, prompts()[14], traceparent=f"00-{trace_id}-{parent_id}-01", tracestate="v=1")
    spans = collector.trace(trace_id, bool)
    root, rest = spans[0], sorted(span_paths(spans)[1:])
    assert rest == [
        "text_completion tiny/admission",
        "text_completion tiny/leg decode",
        "text_completion tiny/leg decode/decode",
        "text_completion tiny/leg decode/decode",
        "text_completion tiny/leg decode/transfer",
        "text_completion tiny/leg prefill",
        "text_completion tiny/leg prefill/prefill",
        "text_completion tiny/leg prefill/queue",
        "text_completion tiny/route",
    ]
    assert (root.name, root.parent_id, root.ok) == ("text_completion tiny", parent_id, True)
    engines = [span for span in spans if span.resource["service.name"] == "baton-engine"]
    pools = {span.name: span.resource["service.instance.id"].split("-")[0] for span in engines}
    assert pools == {
        "queue": "prefill",
        "prefill": "prefill",
        "transfer": "decode",
        "decode": "decode",
    }
    assert not any(span.attributes["baton.guessed"] for span in engines), "engines say their times"
    (admission,) = [span for span in spans if span.name == "admission"]
    filled_ns = sum(span.end_ns - span.start_ns for span in [admission, *engines])
    assert filled_ns == pytest.approx(root.end_ns - root.start_ns, rel=0.01)
    (record,) = baton.run_json("explain", "route", root.attributes["baton.request_id"])["requests"]
    assert record["trace_id"] == trace_id
    assert [leg["kind"] for leg in record["legs"]] == ["prefill", "decode"]
    assert all(leg["engine_compute_s"] > 0 for leg in record["legs"])


def test_a_killed_decode_replica_leaves_no_orphan_and_its_stream_goes_on(
    baton: Deployment,
) -> None:
    prompt = [token % 7000 + 300 for token in range(200)]
    undisturbed = baton.stream(prompt, max_tokens=400)
    (victim,) = [pid for name, pid in baton.pids().items() if name.startswith("decode-")]
    family = [psutil.Process(victim), *descendants(victim)]
    assert len(family) > 1, "the engine runs in a process of its own"

    def kill(chunks: int) -> None:
        if chunks == 30:
            os.kill(victim, signal.SIGKILL)

    assert baton.stream(prompt, max_tokens=400, on_chunk=kill) == undisturbed
    assert find_alive(family) == []
    status = baton.status()["ingresses"][0]
    assert status["ended"]["resumes"] >= 1
    assert status["in_flight"] == {}


@pytest.mark.thorough
def test_the_killed_replica_is_replaced_and_pulls_again(baton: Deployment) -> None:
    baton.wait_for(
        lambda s: {row["role"] for row in s["ingresses"][0]["replicas"]} == {"prefill", "decode"},
        120,
    )
    # The first pull of a new pair is its probe's.
    baton.wait_for(lambda s: decoded(s["ingresses"][0]["replicas"])["pulls"] == 1, 30)
    ask(baton, prompts()[10])
    baton.wait_for(lambda s: decoded(s["ingresses"][0]["replicas"])["pulls"] == 2, 10)


@pytest.mark.thorough
def test_scaling_decode_under_load_fails_nothing_and_changes_no_token(baton: Deployment) -> None:
    asked = prompts()[2:6]
    undisturbed = [baton.stream(prompt, max_tokens=150) for prompt in asked]
    over, streams = threading.Event(), list[tuple[int, str]]()

    def keep_asking(number: int) -> None:
        while not over.is_set():
            streams.append((number, baton.stream(asked[number], max_tokens=150)))

    with ThreadPoolExecutor(len(asked)) as pool:
        asking = [pool.submit(keep_asking, number) for number in range(len(asked))]
        try:
            baton.run_json("scale", "decode", "2")
            grown = baton.wait_for(lambda status: len(used(status)) == 2, 180)
            report = baton.run_json("scale", "decode", "1")
            baton.wait_for(lambda status: len(decoding(status)) == 1, 180)
        finally:
            over.set()
        for stream in asking:
            stream.result(timeout=120)
    assert (report["had"], report["target"]) == (2, 1)
    assert all(text == undisturbed[number] for number, text in streams)
    (left,) = decoding(baton.status())
    assert left in decoding(grown)
    ended = baton.status()["ingresses"][0]["ended"]
    assert ended.get("failed", 0) == ended.get("evicted", 0) == 0


def decoding(status: dict[str, Any]) -> set[str]:
    """The decode replicas that there are, those that drain among them."""
    rows = status["ingresses"][0]["replicas"]
    return {row["replica_id"] for row in rows if row["role"] == "decode"}


def used(status: dict[str, Any]) -> set[str]:
    """The decode replicas that generate something now."""
    rows = status["ingresses"][0]["replicas"]
    return {row["replica_id"] for row in rows if row["role"] == "decode" and row["inflight_legs"]}


@pytest.mark.parametrize(
    "tests",
    [
        pytest.param(["tests/compat"], marks=pytest.mark.thorough),
        # What simulated engines cannot; the rest is held there.
        ["tests/compat/test_compat_openai.py", "-k", "logprobs or json_schema"],
    ],
    ids=["all", "what only real engines can"],
)
def test_the_openai_and_anthropic_sdks_are_served(baton: Deployment, tests: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        env=os.environ | {"BATON_TEST_URL": baton.url},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]


def test_all_blocks_are_free_in_the_end(baton: Deployment) -> None:
    status = baton.wait_for(
        lambda s: all(row["kv_used_fraction"] == 0 for row in s["ingresses"][0]["replicas"]), 45
    )
    for row in status["ingresses"][0]["replicas"]:
        assert row["expired_leases"] == 0, row
        assert row["inflight_legs"] == 0, row
