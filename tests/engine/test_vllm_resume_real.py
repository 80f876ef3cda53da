"""Runs that break off and go on in another real engine, against runs that do not break off."""

from __future__ import annotations

import asyncio
import math
import warnings
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from random import Random

import msgspec
import pytest
import pytest_asyncio

from baton.domain.fleet import Role
from baton.domain.handoff import KvHandle, Leg, LegKind, LegOutput
from baton.domain.request import FinishReason
from baton.domain.value import evolve
from tests.contracts.engine_contract import EngineListener, RunningPair, running_pair
from tests.engine.vllm_engines import engine_settings, engine_with_checks
from tests.fakes.free_ports import free_port
from tests.fakes.frontends import engine_request
from tests.fakes.tiny_model import tiny_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch and vLLM deprecate each other's parts on import
    from vllm.sampling_params import (
        RepetitionDetectionParams,
        SamplingParams,
        StructuredOutputsParams,
    )
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    from baton.engine.vllm.wire.codec import pack_frames, unpack_frames

pytestmark = [
    pytest.mark.real,
    pytest.mark.thorough,
    pytest.mark.timeout(420),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

MAX_TOKENS = 48
CUTS = (1, 40)
PULLED_CUT = 17
PROMPT_TOKENS = 60
"""With what is generated before the last two cuts, blocks of 32 end within the answer."""
FEW = list(range(300, 316))
"""Tokens that repeat soon where nothing else is allowed, so that penalties tell."""
MANY = list(range(300, 700))
HOT = {"temperature": 2.0, "seed": 7}
"""Draws decide, where the tiny model's one favourite is not among what is allowed."""
LOGPROB_TOLERANCE = 1e-3


def guided(**constraint: object) -> StructuredOutputsParams:
    params = StructuredOutputsParams(**constraint)
    params._backend = "xgrammar"  # what vLLM's frontend settles
    return params


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 30}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, object]] = {
    "greedy": {},
    "seed": {**HOT, "allowed_token_ids": MANY},
    "seed_top_k_top_p_min_p": {
        **HOT,
        "allowed_token_ids": MANY,
        "top_k": 100,
        "top_p": 0.9,
        "min_p": 0.001,
    },
    "presence_penalty": {"presence_penalty": 2.0, "allowed_token_ids": FEW},
    "frequency_penalty": {"frequency_penalty": 2.0, "allowed_token_ids": FEW},
    "repetition_penalty": {"repetition_penalty": 1.9, "allowed_token_ids": FEW},
    "penalties_and_seed": {
        **HOT,
        "presence_penalty": 1.0,
        "frequency_penalty": 1.0,
        "repetition_penalty": 1.3,
        "allowed_token_ids": FEW,
    },
    "bad_words": {
        **HOT,
        "allowed_token_ids": FEW[:4],
        "bad_words": ["words"],
        "_bad_words_token_ids": [FEW[:2], FEW[1:4], [FEW[3], FEW[3]]],
    },
    "logit_bias": {**HOT, "logit_bias": dict.fromkeys(FEW, 90.0)},
    "logprobs": {**HOT, "allowed_token_ids": MANY, "logprobs": 5},
    "greedy_logprobs_under_a_penalty": {
        "logprobs": 5,
        "frequency_penalty": 2.0,
        "allowed_token_ids": FEW,
    },
    "min_tokens_and_stop_tokens": {
        **HOT,
        "allowed_token_ids": FEW,
        "min_tokens": 30,
        "stop_token_ids": FEW[:8],
        "_all_stop_token_ids": set(FEW[:8]),
    },
    "repetition_detection": {
        "allowed_token_ids": FEW[:3],
        "repetition_detection": RepetitionDetectionParams(
            max_pattern_size=3, min_pattern_size=1, min_count=12
        ),
    },
    "regex": {**HOT, "structured_outputs": guided(regex="([a-z]{3}[0-9]{2}-){30}")},
    "json_schema": {**HOT, "structured_outputs": guided(json=SCHEMA)},
    "grammar_and_penalties": {
        "frequency_penalty": 1.5,
        "structured_outputs": guided(regex="[abc]{60}"),
    },
}


def payload(salt: str | None, sampling: Mapping[str, object]) -> bytes:
    """What the frontend would have sealed."""
    fields = {"temperature": 0.0, "ignore_eos": True, "max_tokens": MAX_TOKENS} | dict(sampling)
    params = SamplingParams(**fields)
    request = engine_request("", prompt_token_ids=None, sampling_params=params, cache_salt=salt)
    return pack_frames(MsgpackEncoder().encode(request))


@dataclass(frozen=True)
class Run:
    """What came of a leg."""

    tokens: tuple[int, ...]
    finish: FinishReason | None
    stop_reason: int | str | None
    logprobs: tuple[tuple[tuple[int, float], ...], ...]
    """For each token, those of the likeliest ones."""


class Legs:
    """Legs of one request, each under its own id and with its own corner of prefix caches."""

    _made = 0

    def __init__(self, kind: str) -> None:
        self.sampling = KINDS[kind]
        self.prompt = tuple(Random(kind).randrange(400, 8000) for _ in range(PROMPT_TOKENS))

    def leg(
        self,
        kind: LegKind,
        before: tuple[int, ...] = (),
        *,
        salt: str | None = None,
        ticket: KvHandle | None = None,
        gives_token: bool = False,
    ) -> Leg:
        Legs._made += 1
        min_tokens = int(str(self.sampling.get("min_tokens", 0)))
        return Leg(
            leg_id=f"leg-{Legs._made}",
            request_id=f"request-{Legs._made}",
            kind=kind,
            prompt_token_ids=self.prompt + before,
            resumed_tokens=len(before),
            max_tokens=MAX_TOKENS - len(before),
            min_tokens=max(0, min_tokens - len(before)),
            kv_handle=ticket,
            cache_salt=salt,
            emits_first_token=gives_token,
            payload=payload(salt, self.sampling),
        )

    async def pulled(
        self, pair: RunningPair, before: tuple[int, ...], *, salt: str, lost: bool = False
    ) -> Run:
        """Prefilled by one engine, and pulled by the other, as far as its KV handle is good."""
        prefill = self.leg(LegKind.PREFILL, before, salt=salt)
        await pair.prefill.run(prefill)
        ticket = pair.prefill.outputs(prefill.leg_id)[-1].kv_handle
        assert ticket is not None
        used = to_nowhere(ticket) if lost else ticket
        decode = self.leg(LegKind.DECODE, before, salt=salt, ticket=used)
        result = await run(pair.decode, decode)
        if lost:
            await pair.decode.engine.release(ticket)
        return result

    async def early(self, pair: RunningPair, before: tuple[int, ...], *, salt: str) -> Run:
        """Given its next token by the engine that prefills, and the rest by the one that pulls."""
        prefill = self.leg(LegKind.PREFILL, before, salt=salt, gives_token=True)
        first = await run(pair.prefill, prefill)
        ticket = pair.prefill.outputs(prefill.leg_id)[-1].kv_handle
        assert ticket is not None
        decode = self.leg(LegKind.DECODE, before + first.tokens, salt=salt, ticket=ticket)
        rest = await run(pair.decode, decode)
        return replace(
            rest, tokens=first.tokens + rest.tokens, logprobs=first.logprobs + rest.logprobs
        )


def to_nowhere(ticket: KvHandle) -> KvHandle:
    """The KV handle, but issued by an engine that is not there."""
    params = msgspec.msgpack.decode(ticket.params)
    params |= {"remote_engine_id": "nobody", "remote_port": free_port()}
    return evolve(ticket, params=msgspec.msgpack.encode(params))


async def run(listener: EngineListener, leg: Leg) -> Run:
    tokens = await listener.run(leg)
    outputs = listener.outputs(leg.leg_id)
    logprobs = tuple(logprob for output in outputs for logprob in logprobs_of(output))
    return Run(tokens, outputs[-1].finish, outputs[-1].stop_reason, logprobs)


def logprobs_of(output: LegOutput) -> list[tuple[tuple[int, float], ...]]:
    if output.engine_payload is None:
        return []
    told: EngineCoreOutput = MsgpackDecoder(EngineCoreOutput).decode(
        unpack_frames(output.engine_payload)
    )
    if told.new_logprobs is None:
        return []
    ids, values = told.new_logprobs[:2]
    return [
        tuple((int(i), float(v)) for i, v in zip(row, their, strict=True))
        for row, their in zip(ids, values, strict=True)
    ]


def check(rest: Run, whole: Run, cut: int) -> None:
    """What came after the break is what would have come without it."""
    assert rest.tokens == whole.tokens[cut:]
    assert (rest.finish, rest.stop_reason) == (whole.finish, whole.stop_reason)
    wanted = whole.logprobs[cut:]
    assert len(rest.logprobs) == len(wanted)
    for found_row, wanted_row in zip(rest.logprobs, wanted, strict=True):
        assert [token for token, _ in found_row] == [token for token, _ in wanted_row]
        for (_, found), (_, value) in zip(found_row, wanted_row, strict=True):
            assert math.isclose(found, value, abs_tol=LOGPROB_TOLERANCE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningPair]:
    model = tiny_model(tmp_path_factory.mktemp("models"))
    # Rounding has no say: prompts and single tokens are computed by different kernels.
    whole, broken = (
        replace(engine_settings(model, role), dtype="float32", max_running_requests=32)
        for role in (Role.DECODE, Role.PREFILL)
    )
    # What was generated before a break is computed again in parts.
    prefill = engine_with_checks(replace(broken, max_batched_tokens=PROMPT_TOKENS + 10))
    decode = engine_with_checks(whole)
    async with running_pair(prefill, decode) as both:
        yield both


@pytest.mark.parametrize("kind", KINDS)
async def test_output_after_an_interruption_equals_uninterrupted_output(
    pair: RunningPair, kind: str
) -> None:
    legs = Legs(kind)
    whole = await run(pair.decode, legs.leg(LegKind.LOCAL))
    assert len(whole.tokens) > 2
    last = len(whole.tokens) - 1
    for cut in (min(value, last) for value in CUTS):
        before = whole.tokens[:cut]
        check(await run(pair.prefill, legs.leg(LegKind.LOCAL, before)), whole, cut)
    cut = min(PULLED_CUT, last)
    before = whole.tokens[:cut]
    check(await legs.pulled(pair, before, salt="pulled"), whole, cut)
    check(await legs.pulled(pair, before, salt="lost", lost=True), whole, cut)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_first_token_of_prefill_changes_no_other_token(
    pair: RunningPair, kind: str
) -> None:
    legs = Legs(kind)
    whole = await run(pair.decode, legs.leg(LegKind.LOCAL))
    check(await legs.early(pair, (), salt="early"), whole, 0)
    cut = min(PULLED_CUT, len(whole.tokens) - 2)
    check(await legs.early(pair, whole.tokens[:cut], salt="resumed-early"), whole, cut)


async def test_a_first_token_may_be_the_last(pair: RunningPair) -> None:
    legs = Legs("greedy")
    whole = await run(pair.decode, legs.leg(LegKind.LOCAL))
    stop = whole.tokens[0]
    legs.sampling = {"stop_token_ids": [stop], "_all_stop_token_ids": {stop}}
    prefill = legs.leg(LegKind.PREFILL, salt="stops", gives_token=True)
    found = await run(pair.prefill, prefill)
    assert (found.tokens, found.finish, found.stop_reason) == ((stop,), FinishReason.STOP, stop)
    if (ticket := pair.prefill.outputs(prefill.leg_id)[-1].kv_handle) is not None:
        await pair.decode.engine.release(ticket)  # vLLM keeps the blocks all the same


@pytest.mark.parametrize(
    ("kind", "without"),
    [
        ("seed", ("seed",)),
        ("presence_penalty", ("presence_penalty",)),
        ("frequency_penalty", ("frequency_penalty",)),
        ("repetition_penalty", ("repetition_penalty",)),
        ("bad_words", ("bad_words", "_bad_words_token_ids")),
        ("logit_bias", ("logit_bias",)),
        ("min_tokens_and_stop_tokens", ("min_tokens",)),
        ("repetition_detection", ("repetition_detection",)),
        ("grammar_and_penalties", ("frequency_penalty",)),
    ],
)
async def test_each_kind_of_request_is_known_by_its_output(
    pair: RunningPair, kind: str, without: tuple[str, ...]
) -> None:
    legs, other = Legs(kind), Legs(kind)
    other.sampling = {name: value for name, value in KINDS[kind].items() if name not in without}
    found = await run(pair.decode, legs.leg(LegKind.LOCAL))
    assert found != await run(pair.decode, other.leg(LegKind.LOCAL))


async def test_interruptions_in_a_full_batch_change_nothing(pair: RunningPair) -> None:
    # Each row of a batch has its own past, and rows change places as others end.
    legs = {kind: Legs(kind) for kind in KINDS}
    runs = (run(pair.decode, leg.leg(LegKind.LOCAL)) for leg in legs.values())
    whole = dict(zip(KINDS, await asyncio.gather(*runs), strict=True))
    cuts = {kind: (5 + 3 * n) % len(whole[kind].tokens) for n, kind in enumerate(KINDS)}
    rests = await asyncio.gather(
        *(
            run(pair.prefill, legs[kind].leg(LegKind.LOCAL, whole[kind].tokens[: cuts[kind]]))
            for kind in KINDS
        )
    )
    for kind, rest in zip(KINDS, rests, strict=True):
        check(rest, whole[kind], cuts[kind])
