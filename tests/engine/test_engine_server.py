"""The seam against the very sockets and codecs that vLLM's client uses; no API server here.

All that holds of a client behind sockets holds of one that is met in the same event loop.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from baton.domain.commands import Delivery
from baton.domain.errors import EngineFailed, LinkFailed, NoCapacity
from baton.domain.request import FinishReason, Request
from baton.engine.vllm.frontend.settings import FrontendHooks
from baton.engine.vllm.gate.errors import Problem
from tests.fakes.frontends import engine_request, fleet_facts, open_hooks

with warnings.catch_warnings():
    # The vendors' modules warn while they are imported.
    warnings.simplefilter("ignore")
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import (
        EngineCoreOutputs,
        EngineCoreReadyResponse,
        EngineCoreRequest,
        EngineCoreRequestType,
    )
    from vllm.v1.engine import FinishReason as EngineFinishReason
    from vllm.v1.engine.exceptions import EngineDeadError
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    from baton.engine.vllm.frontend import engine_server as seam_module
    from baton.engine.vllm.frontend.engine_server import FleetEngineServer
    from baton.engine.vllm.wire.codec import pack_frames

FACTS = fleet_facts(512, kv_blocks=64)


class FixedClock:
    def now_s(self) -> float:
        return 12.5


class Frontend:
    """The other end: binds as vLLM's client does."""

    meets = False
    """Whether it is of the seam's own event loop."""

    def __init__(self, folder: Path) -> None:
        self.addresses = (f"ipc://{folder}/i", f"ipc://{folder}/o")
        self._context = zmq.asyncio.Context()
        self._outbox: Any = self._context.socket(zmq.ROUTER)
        self._inbox: Any = self._context.socket(zmq.PULL)
        self._encoder, self._decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        self._identity = b""

    def bind(self) -> None:
        self._outbox.bind(self.addresses[0])
        self._inbox.bind(self.addresses[1])

    async def ready(self) -> EngineCoreReadyResponse:
        assert await self._outbox.poll(5000)
        self._identity, payload = await self._outbox.recv_multipart()
        response: EngineCoreReadyResponse = msgspec.msgpack.decode(
            payload, type=EngineCoreReadyResponse
        )
        return response

    async def send(self, kind: EngineCoreRequestType, value: object) -> None:
        frames = self._encoder.encode(value)
        await self._outbox.send_multipart([self._identity, kind.value, *frames])

    async def add(self, request_id: str, **changes: object) -> None:
        await self.send(EngineCoreRequestType.ADD, engine_request(request_id, **changes))

    async def abort(self, *request_ids: str) -> None:
        await self.send(EngineCoreRequestType.ABORT, list(request_ids))

    async def utility(self, method: str) -> Any:  # noqa: ANN401 - vllm is not followed
        await self.send(EngineCoreRequestType.UTILITY, (0, 77, method, ()))
        outputs = await self._receive_message()
        assert outputs.utility_output.call_id == 77
        return outputs.utility_output

    async def receive(self) -> Any:  # noqa: ANN401 - vllm is not followed
        return await self._receive_message()

    async def waits_for_a_message(self) -> bool:
        return bool(await self._inbox.poll(200))

    async def _receive_message(self) -> Any:  # noqa: ANN401 - vllm is not followed
        assert await self._inbox.poll(5000)
        return self._decoder.decode(await self._inbox.recv_multipart(copy=False))

    async def nothing_more(self) -> bool:
        """Whether nothing was sent before the answer to a last question."""
        return (await self.utility("is_sleeping")).result.result is False

    def close(self) -> None:
        self._context.destroy(linger=0)


class MetFrontend(Frontend):
    """The other end in this event loop, with what the seam takes of vLLM's client."""

    meets = True
    add_request_async: Callable[[EngineCoreRequest], Awaitable[None]] | None = None
    abort_requests_async: Callable[[list[str]], Awaitable[None]] | None = None

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.outputs_queue: asyncio.Queue[Any] = asyncio.Queue()

    async def add(self, request_id: str, **changes: object) -> None:
        assert self.add_request_async is not None
        await self.add_request_async(engine_request(request_id, **changes))

    async def abort(self, *request_ids: str) -> None:
        assert self.abort_requests_async is not None
        await self.abort_requests_async(list(request_ids))

    async def receive(self) -> Any:  # noqa: ANN401 - vllm is not followed
        return await asyncio.wait_for(self.outputs_queue.get(), 5.0)

    async def nothing_more(self) -> bool:
        return await super().nothing_more() and self.outputs_queue.empty()


ONLY_SOCKETS = pytest.mark.parametrize("frontend", [Frontend], indirect=True)
ONLY_MET = pytest.mark.parametrize("frontend", [MetFrontend], indirect=True)


class HookCalls:
    """What the hooks were told."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.aborts: list[tuple[str, ...]] = []
        self.on_request: Callable[[Request], None] = self.requests.append

    def _tell(self, request: Request) -> None:
        self.on_request(request)

    def hooks(self) -> FrontendHooks:
        return open_hooks(self._tell, self.aborts.append)


@pytest.fixture
def told() -> HookCalls:
    return HookCalls()


@pytest.fixture(params=[Frontend, MetFrontend])
async def frontend(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Frontend]:
    end: Frontend = request.param(tmp_path_factory.mktemp("z"))
    yield end
    end.close()


@pytest.fixture
async def seam(frontend: Frontend, told: HookCalls) -> AsyncIterator[FleetEngineServer]:
    # Bound after the seam has connected, as it happens in a frontend that starts.
    seam = FleetEngineServer(FACTS, told.hooks(), FixedClock())
    await seam.start(*frontend.addresses)
    frontend.bind()
    response = await frontend.ready()
    assert (response.max_model_len, response.num_gpu_blocks) == (512, 64)
    if frontend.meets:
        seam.attach_inprocess(frontend)
    yield seam
    await seam.close()
    assert not seam.is_running


async def test_an_added_request_reaches_the_hook(
    seam: FleetEngineServer, frontend: Frontend, told: HookCalls
) -> None:
    await frontend.add("a")
    assert await frontend.nothing_more()
    (request,) = told.requests
    assert request.request_id == "a"
    assert request.prompt_token_ids == (1, 2, 3)
    assert request.max_tokens == 9
    assert request.arrived_at_s == 12.5
    assert seam.open_requests == 1


async def test_adapters_are_taken_in_without_a_word_to_any_engine(
    frontend: Frontend, told: HookCalls
) -> None:
    seam = FleetEngineServer(replace(FACTS, adapters=2), told.hooks(), FixedClock())
    await seam.start(*frontend.addresses)
    frontend.bind()
    response = await frontend.ready()
    assert (response.supports_lora, response.max_loras) == (True, 2)
    assert (await frontend.utility("add_lora")).result.result is True
    assert not told.requests
    await seam.close()


async def test_deliveries_of_one_step_are_one_message(
    seam: FleetEngineServer, frontend: Frontend
) -> None:
    await frontend.add("a")
    await frontend.add("b")
    assert await frontend.nothing_more()
    seam.deliver(
        [
            Delivery("a", (5, 6), cached_tokens=2),
            Delivery("gone", (1,)),
            Delivery("b", (7,), FinishReason.STOP, stop_reason=7),
        ]
    )
    first, second = (await frontend.receive()).outputs
    assert (first.request_id, first.new_token_ids, first.finish_reason) == ("a", [5, 6], None)
    assert first.prefill_stats.num_cached_tokens == 2
    assert (second.request_id, second.new_token_ids) == ("b", [7])
    assert (second.finish_reason, second.stop_reason) == (EngineFinishReason.STOP, 7)
    assert seam.open_requests == 1


async def test_an_output_that_cannot_be_read_ends_its_own_request_only(
    seam: FleetEngineServer, frontend: Frontend, told: HookCalls
) -> None:
    """An engine of another vLLM has written it, as in the midst of an upgrade."""
    for request_id in "abc":
        await frontend.add(request_id)
    assert await frontend.nothing_more()
    unreadable = pack_frames([msgspec.msgpack.encode(["", "a field more", [], None])])
    seam.deliver(
        [
            Delivery("a", (5,)),
            Delivery("b", (6,), engine_payload=unreadable),
            Delivery("c", (7,), FinishReason.STOP),
        ]
    )
    outputs = {output.request_id: output for output in (await frontend.receive()).outputs}
    if "b" not in outputs:  # behind sockets it comes in a message of its own
        outputs |= {output.request_id: output for output in (await frontend.receive()).outputs}
    assert (outputs["a"].new_token_ids, outputs["c"].new_token_ids) == ([5], [7])
    assert outputs["c"].finish_reason == EngineFinishReason.STOP
    assert outputs["b"].finish_reason == EngineFinishReason.ERROR
    assert told.aborts == [("b",)]
    assert seam.open_requests == 1


async def test_a_failure_rides_on_the_last_output(
    seam: FleetEngineServer, frontend: Frontend
) -> None:
    await frontend.add("a")
    assert await frontend.nothing_more()
    error = NoCapacity("a", 2.0, "no replica")
    seam.fail("a", error)
    seam.fail("a", error)
    seam.deliver([Delivery("a", (5,))])
    (output,) = (await frontend.receive()).outputs
    assert output.finish_reason == EngineFinishReason.ERROR
    assert Problem.unpack(output.stop_reason) == Problem.from_error(error)
    assert await frontend.nothing_more()
    assert seam.open_requests == 0


async def test_an_abort_tells_the_hook_once_and_ends_the_stream(
    seam: FleetEngineServer, frontend: Frontend, told: HookCalls
) -> None:
    await frontend.add("a")
    await frontend.abort("a", "never-heard-of")
    await frontend.abort("a")
    assert await frontend.nothing_more()
    seam.deliver([Delivery("a", (5,))])
    assert await frontend.nothing_more()
    assert told.aborts == [("a",)]
    assert seam.open_requests == 0


async def test_questions_are_answered_and_unknown_ones_refused(
    seam: FleetEngineServer, frontend: Frontend
) -> None:
    assert seam.is_running
    assert (await frontend.utility("get_supported_tasks")).result.result == ["generate"]
    assert (await frontend.utility("reset_prefix_cache")).result.result is False
    refused = await frontend.utility("self_destruct")
    assert refused.result is None
    assert "self_destruct" in refused.failure_message


@pytest.mark.parametrize("changes", [{"sampling_params": None}, {"resumable": True}])
async def test_a_request_that_cannot_be_run_is_answered_with_an_error(
    seam: FleetEngineServer, frontend: Frontend, told: HookCalls, *, changes: dict[str, object]
) -> None:
    await frontend.add("a", **changes)
    (output,) = (await frontend.receive()).outputs
    assert (output.request_id, output.finish_reason) == ("a", EngineFinishReason.ERROR)
    assert told.requests == []
    assert seam.open_requests == 0


@ONLY_SOCKETS
async def test_a_request_that_cannot_be_read_is_answered_with_an_error(
    seam: FleetEngineServer, frontend: Frontend
) -> None:
    await frontend.send(EngineCoreRequestType.ADD, ["a", "not a prompt"])
    (output,) = (await frontend.receive()).outputs
    assert (output.request_id, output.finish_reason) == ("a", EngineFinishReason.ERROR)
    await frontend.add("b")
    assert await frontend.nothing_more()
    assert seam.open_requests == 1


async def test_a_request_that_the_hook_chokes_on_is_answered_with_an_error(
    seam: FleetEngineServer, frontend: Frontend, told: HookCalls
) -> None:
    def choke(_request: Request) -> None:
        raise RuntimeError("full")

    told.on_request = choke
    await frontend.add("a")
    (output,) = (await frontend.receive()).outputs
    assert output.finish_reason == EngineFinishReason.ERROR
    assert seam.open_requests == 0


async def test_noise_does_not_stop_the_reading(seam: FleetEngineServer, frontend: Frontend) -> None:
    await frontend.send(EngineCoreRequestType.UTILITY, "not a call")
    await frontend.send(EngineCoreRequestType.START_DP_WAVE, (0, 0))
    assert await frontend.nothing_more()
    assert seam.is_running


async def test_steps_that_arrive_together_are_one_message_and_a_requests_own_stay_apart(
    seam: FleetEngineServer, frontend: Frontend
) -> None:
    for name in "abc":
        await frontend.add(name)
    assert await frontend.nothing_more()
    seam.deliver([Delivery("a", (5,))])
    seam.deliver([Delivery("b", (6,))])
    seam.deliver([Delivery("a", (7,), FinishReason.LENGTH)])
    seam.deliver([Delivery("c", (8,))])
    told = [
        [(output.request_id, output.new_token_ids) for output in (await frontend.receive()).outputs]
        for _ in range(2)
    ]
    assert told == [[("a", [5]), ("b", [6])], [("a", [7]), ("c", [8])]]
    assert await frontend.nothing_more()


async def test_a_failure_comes_after_the_tokens_before_it(
    seam: FleetEngineServer, frontend: Frontend
) -> None:
    await frontend.add("a")
    assert await frontend.nothing_more()
    seam.deliver([Delivery("a", (5,))])
    seam.fail("a", EngineFailed("a", "it died"))
    (tokens,) = (await frontend.receive()).outputs
    (failure,) = (await frontend.receive()).outputs
    assert tokens.new_token_ids == [5]
    assert failure.new_token_ids == []
    assert str(failure.finish_reason) == "error"


async def test_a_frontend_that_stops_reading_is_not_buffered_for_without_end(
    told: HookCalls, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seam_module, "_MAX_UNSENT_MESSAGES", 4)
    folder = tmp_path_factory.mktemp("z")
    seam = FleetEngineServer(FACTS, told.hooks(), FixedClock())
    await seam.start(f"ipc://{folder}/i", f"ipc://{folder}/o")
    seam._prompt_tokens["a"] = 3

    def deliver_without_end() -> None:
        for _ in range(20):
            seam.deliver([Delivery("a", (5,))])

    with pytest.raises(LinkFailed, match="frontend"):
        deliver_without_end()
    await seam.close()


async def test_after_a_missed_message_a_frontend_gets_nothing_and_is_broken(
    told: HookCalls, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that goes on after a hole would end as if it were whole."""
    monkeypatch.setattr(seam_module, "_MAX_UNSENT_MESSAGES", 4)
    slow = Frontend(tmp_path_factory.mktemp("z"))
    seam = FleetEngineServer(FACTS, told.hooks(), FixedClock())
    await seam.start(*slow.addresses)
    slow.bind()
    await slow.ready()
    seam._prompt_tokens |= {"a": 3, "b": 3}

    def deliver_without_end() -> None:
        for number in range(10_000):
            seam.deliver([Delivery("a", (number,)), Delivery("b", (number,))])
            seam._flush()

    with pytest.raises(LinkFailed):
        deliver_without_end()  # nobody reads meanwhile
    assert not seam.is_running
    assert sorted(told.aborts) == [("a", "b")]
    assert seam.open_requests == 0
    with pytest.raises(LinkFailed):
        seam.deliver([Delivery("a", (10_000,))])
    received = []
    while await slow.waits_for_a_message():
        received += (await slow.receive()).outputs[0].new_token_ids
    assert received == list(range(len(received))), "tokens without a hole"
    await seam.close()
    slow.close()


async def test_messages_to_a_slow_frontend_arrive_in_order_once_it_reads(
    told: HookCalls, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seam_module, "_MAX_UNSENT_MESSAGES", 4)
    slow = Frontend(tmp_path_factory.mktemp("z"))
    seam = FleetEngineServer(FACTS, told.hooks(), FixedClock())
    await seam.start(*slow.addresses)
    seam._prompt_tokens["a"] = 3
    for number in range(8):
        seam.deliver([Delivery("a", (number,))])
    slow.bind()
    await slow.ready()
    messages = [await slow.receive() for _ in range(8)]
    assert [message.outputs[0].new_token_ids for message in messages] == [[n] for n in range(8)]
    await seam.close()
    slow.close()


@ONLY_MET
async def test_the_request_of_a_client_that_is_met_stays_as_it_was(
    seam: FleetEngineServer, frontend: MetFrontend, told: HookCalls
) -> None:
    own = engine_request(
        "a",
        sampling_params=SamplingParams(max_tokens=9, extra_args={"kv_transfer_params": {"x": 1}}),
        cache_salt="mine",
    )
    before = MsgpackEncoder().encode(own)
    assert frontend.add_request_async is not None
    await frontend.add_request_async(own)
    assert MsgpackEncoder().encode(own) == before
    await asyncio.sleep(0)
    assert [request.request_id for request in told.requests] == ["a"]


@ONLY_MET
async def test_a_request_of_a_client_that_is_met_which_no_message_can_carry_is_refused_to_it(
    seam: FleetEngineServer, frontend: MetFrontend, told: HookCalls
) -> None:
    with pytest.raises(OverflowError):
        await frontend.add("a", sampling_params=SamplingParams(seed=2**70))
    await frontend.add("b")
    await asyncio.sleep(0)
    assert [request.request_id for request in told.requests] == ["b"]
    assert seam.open_requests == 1


@ONLY_MET
async def test_a_client_that_is_met_and_stops_reading_is_not_buffered_for_without_end(
    seam: FleetEngineServer, frontend: MetFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seam_module, "_MAX_UNSENT_MESSAGES", 4)
    await frontend.add("a")
    await asyncio.sleep(0)

    def deliver_without_end() -> None:
        for _ in range(20):
            seam.deliver([Delivery("a", (5,))])

    with pytest.raises(LinkFailed, match="left 4 messages unread"):
        deliver_without_end()
    assert not seam.is_running
    assert seam.open_requests == 0
    with pytest.raises(EngineDeadError):
        await frontend.add("b")
