"""vLLM's Rust frontend over a real engine: what one says is what the other understands."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from baton.domain.commands import Delivery
from baton.domain.errors import EngineStartFailed
from baton.domain.fleet import Role
from baton.engine.vllm.frontend.rust_frontend import find_rust_frontend
from tests.contracts.engine_contract import EngineListener, running_engine
from tests.engine.test_rust_frontend import Fleet, Real, running, settings
from tests.engine.vllm_engines import VllmEngine, engine_settings
from tests.fakes.scripted_engine import make_leg

pytestmark = [
    pytest.mark.real,
    pytest.mark.thorough,
    pytest.mark.timeout(420),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: Path) -> AsyncIterator[EngineListener]:
    try:
        find_rust_frontend(os.environ)
    except EngineStartFailed as missing:
        pytest.skip(str(missing))
    async with running_engine(VllmEngine(engine_settings(model, Role.MIXED))) as made:
        yield made


async def answered(real: Real, engine: EngineListener, **body: object) -> httpx.Response:
    """Have the engine run what comes, and the frontend told what it gave."""
    asked, request = await real.asked(**body)
    leg = make_leg(
        request.request_id,
        prompt=request.prompt_token_ids,
        max_tokens=request.max_tokens,
        payload=request.payload,
    )
    tokens = await engine.run(leg)
    finish = engine.outputs(leg.leg_id)[-1].finish
    real.rust.deliver([Delivery(request.request_id, tokens, finish, cached_tokens=0)])
    return await asked


@pytest.mark.parametrize(
    ("constraint", "answers"),
    [
        ({"choice": ["yes", "no"]}, {"yes", "no"}),
        ({"regex": "ab"}, {"ab"}),
        ({"grammar": 'root ::= "x" | "y"'}, {"x", "y"}),
    ],
)
async def test_an_answer_keeps_the_requested_form(
    model: Path, engine: EngineListener, constraint: dict[str, object], answers: set[str]
) -> None:
    asked = {"structured_outputs": constraint, "max_tokens": 8, "temperature": 0}
    async with running(Fleet(), settings(str(model))) as real:
        answer = await answered(real, engine, **asked)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] in answers
