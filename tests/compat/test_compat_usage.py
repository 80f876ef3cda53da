"""A client's usage is its request's, whichever way that takes through a fleet of simulated engines.

That plain vLLM says the same is tried in `test_compat_usage_real`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from baton.domain.commands import RequestRecord
from baton.domain.fleet import Role
from tests.compat.usage_rig import (
    BLOCK_TOKENS,
    DECODE,
    MAX_LEN_TOKENS,
    PREFILL,
    Api,
    RequestPath,
    UsageIngress,
    expected_usage,
    parse_usage,
    text,
)
from tests.fakes.fleet_rig import ENGINE

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    # vLLM warns of its own deprecated fields.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
WAYS = [way for way in RequestPath if way is not RequestPath.FETCHED]
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def baton(model_dir: Path) -> AsyncIterator[UsageIngress]:
    made = UsageIngress(model_dir, log_stats=True)
    settings = replace(
        ENGINE, block_size_tokens=BLOCK_TOKENS, max_len_tokens=MAX_LEN_TOKENS, kv_blocks=8192
    )
    try:
        await made.start()
        await made.fleet.add(PREFILL, Role.PREFILL, settings)
        await made.fleet.add(DECODE, Role.DECODE, settings)
        yield made
    finally:
        await made.close()


@STREAMED
@pytest.mark.parametrize("api", Api)
@pytest.mark.parametrize("way", WAYS)
async def test_a_cold_prompt_is_not_cached_and_a_warm_one_is(
    baton: UsageIngress, way: RequestPath, api: Api, *, stream: bool
) -> None:
    prompt = text(f"{api} {way} {stream}")
    cold, cold_records = await baton.usage(api, prompt, way, stream=stream)
    warm, warm_records = await baton.usage(api, prompt, way, stream=stream)
    tokens = parse_usage(api, cold[-1]).prompt_tokens
    assert parse_usage(api, cold[-1]) == expected_usage(api, tokens, cached_tokens=0)
    assert parse_usage(api, warm[-1]) == expected_usage(api, tokens, cached_tokens=tokens)
    for told, (record,) in ((cold, cold_records), (warm, warm_records)):
        assert record.cached_tokens == parse_usage(api, told[-1]).cached_tokens, (
            "what baton charges by"
        )


@STREAMED
@pytest.mark.parametrize("api", Api)
async def test_a_prefix_that_another_replica_held_is_cached(
    baton: UsageIngress, api: Api, *, stream: bool
) -> None:
    prompt = text(f"{api} {stream}")
    await baton.warm(Api.COMPLETIONS if api is Api.COMPLETIONS else Api.CHAT, prompt[:200], PREFILL)
    told, (record,) = await baton.usage(api, prompt, RequestPath.FETCHED, stream=stream)
    front = record.legs[0].prompt_tokens - 1
    assert front % BLOCK_TOKENS == 0
    assert front > 0
    assert parse_usage(api, told[-1]) == expected_usage(
        api, record.prompt_tokens, cached_tokens=front
    )
    assert record.cached_tokens == front


@STREAMED
@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS])
@pytest.mark.parametrize("where", [(DECODE,), (DECODE, PREFILL)], ids=["together", "apart"])
async def test_answers_to_one_prompt_are_told_as_of_one_engine_wherever_they_run(
    baton: UsageIngress, where: tuple[str, ...], api: Api, *, stream: bool
) -> None:
    prompt = text(f"{api} {stream} {where}")
    baton.placer.local_replicas = where
    try:
        told, records = await baton.usage(api, prompt, RequestPath.LOCAL, stream=stream, n=2)
        warm, _ = await baton.usage(api, prompt, RequestPath.LOCAL, stream=stream, n=2)
    finally:
        baton.placer.local_replicas = (DECODE,)
    assert {record.legs[0].replica_id for record in records} == set(where)
    tokens = records[0].prompt_tokens
    new, found = (expected_usage(api, tokens, cached_tokens=held) for held in (0, tokens))
    # vLLM tells what the first says in a stream, and otherwise what the last to end says: on one
    # engine that is another one, on two it is whoever took longer.
    first = min(records, key=first_token_at_s)
    last = records[-1]
    assert len(where) > 1 or last is not first
    assert parse_usage(api, told[-1]) == (new if stream or last is first else found)
    assert parse_usage(api, warm[-1]) == found


def first_token_at_s(record: RequestRecord) -> float:
    assert record.first_token_at_s is not None
    return record.first_token_at_s


# ---------------------------------------------------------------- vLLM's own series
async def prompt_series(baton: UsageIngress) -> Counter[str]:
    """The series of vLLM's frontend about prompt tokens."""
    told: Counter[str] = Counter()
    for line in (await baton.http.get("/metrics")).text.splitlines():
        if line.startswith(("vllm:prompt_tokens", "vllm:request_prefill_kv_computed_tokens_sum")):
            name, value = line.rsplit(" ", 1)
            labels = name.partition("{")[2]
            source = [part for part in labels.rstrip("}").split(",") if part.startswith("source=")]
            told["".join([name.partition("{")[0], *source])] += int(float(value))
    return told


@pytest.mark.parametrize("way", WAYS)
async def test_vllms_series_count_each_prompt_token_once_and_by_its_source(
    baton: UsageIngress, way: RequestPath
) -> None:
    prompt = text(f"series {way}")
    for warm in (False, True):
        before = await prompt_series(baton)
        _, (record,) = await baton.usage(Api.COMPLETIONS, prompt, way, stream=False)
        tokens = record.prompt_tokens
        cached = expected_usage(Api.CHAT, tokens, cached_tokens=tokens * warm).cached_tokens
        assert cached is not None
        assert await prompt_series(baton) - before == +Counter(
            {
                "vllm:prompt_tokens_total": tokens,
                "vllm:prompt_tokens_cached_total": cached,
                'vllm:prompt_tokens_by_source_totalsource="local_compute"': tokens - cached,
                'vllm:prompt_tokens_by_source_totalsource="local_cache_hit"': cached,
                "vllm:request_prefill_kv_computed_tokens_sum": tokens - cached,
            }
        )
