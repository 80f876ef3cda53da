"""Two models in one deployment, simulated engines: one endpoint, and nothing else shared."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.e2e.deployments import Deployment, running_deployment

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(400)]
PROMPT = list(range(300, 900))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with running_deployment("models-example.yaml", tmp_path_factory.mktemp("models")) as deployment:
        yield deployment


def ask(two: Deployment, model: str | None, path: str = "/v1/completions") -> httpx.Response:
    body: dict[str, object] = {"max_tokens": 8, "temperature": 0}
    if path == "/v1/completions":
        body |= {"prompt": PROMPT}
    elif path == "/v1/responses":
        body = {"input": "hello", "max_output_tokens": 8}
    else:
        body |= {"messages": [{"role": "user", "content": "hello"}]}
    body |= {} if model is None else {"model": model}
    return httpx.post(f"{two.url}{path}", json=body, timeout=60)


def test_both_models_are_listed(two: Deployment) -> None:
    listed = httpx.get(f"{two.url}/v1/models", timeout=30).json()["data"]
    assert [row["id"] for row in listed] == ["small", "large"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("model", ["small", "large"])
def test_each_api_serves_each_model(two: Deployment, model: str, path: str) -> None:
    answer = ask(two, model, path)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model


@pytest.mark.parametrize(
    ("model", "prefilled", "decoded"),
    [("small", "small", "small"), ("large", "large-prefill", "large-decode")],
)
def test_a_request_runs_in_the_pools_of_its_model(
    two: Deployment, model: str, prefilled: str, decoded: str
) -> None:
    two.stream(PROMPT, model=model, max_tokens=4, request_id=f"of-{model}")
    (record,) = two.run_json("explain", "route", f"of-{model}")["requests"]
    pools = [record[f"{leg}_replica"].rpartition("-")[0] for leg in ("prefill", "decode")]
    assert pools == [prefilled, decoded]


def test_a_model_without_replicas_refuses_and_the_other_serves_on(two: Deployment) -> None:
    (pid,) = [pid for name, pid in two.pids().items() if name.startswith("small-")]
    victim = psutil.Process(pid)
    victim.suspend()
    try:
        assert ask(two, "large").status_code == 200
    finally:
        victim.resume()
    two.wait_for(lambda status: status["ingresses"][0]["models"]["small"]["healthy"], 60)


def test_pools_of_each_model_are_scaled_by_hand(two: Deployment) -> None:
    two.run_json("scale", "small", "2")
    two.wait_for(
        lambda status: (
            sum(
                row["replica_id"].startswith("small-") for row in status["ingresses"][0]["replicas"]
            )
            == 2
        ),
        90,
    )
