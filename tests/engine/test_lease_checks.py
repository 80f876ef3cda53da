"""What a source says of the blocks that were read from it, over real sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import pytest
import zmq

from baton.engine.vllm.patches.lease_checks import CompletedRead, KeptLeases, LeaseQueries, reply_to
from tests.fakes.lease_source import METADATA, free_address, serve_leases

DEADLINE_S = 30.0
DEADLINE_MS = 30_000


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def asking(clock: Callable[[], float] | None = None) -> Iterator[LeaseQueries]:
    questions = LeaseQueries(deadline_s=5.0, clock=clock or Clock())
    try:
        yield questions
    finally:
        questions.close()


def request(verb: bytes = b"get_meta_msg", pipeline_rank: int = 0, rank: int = 0) -> bytes:
    return msgspec.msgpack.encode((verb, pipeline_rank, rank))


def asked(address: str, *parts: bytes) -> list[bytes]:
    """What a side channel answers, as any engine would ask."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.connect(address)
        client.send_multipart(parts)
        assert client.poll(DEADLINE_MS)
        return client.recv_multipart()


# ---------------------------------------------------------------------- the answers
def test_blocks_are_kept_from_when_their_leg_ends_until_they_are_freed() -> None:
    with serve_leases() as source, asking() as questions:
        source.leases.add("p1")
        source.leases.add("p2")
        source.leases.remove(["p2", "never-was"])
        for request_id, leg_id in (("a", "p1"), ("b", "p2"), ("c", "p3")):
            questions.query(source.address, CompletedRead(request_id, leg_id))
        assert "a" in questions
        assert questions.poll_replies(wait_s=DEADLINE_S) == {"a": True, "b": False, "c": False}
        assert "a" not in questions
        source.leases.remove(["p1"])
        questions.query(source.address, CompletedRead("a", "p1"))
        assert questions.poll_replies(wait_s=DEADLINE_S) == {"a": False}


def test_each_source_answers_for_itself() -> None:
    with serve_leases() as one, serve_leases() as other, asking() as questions:
        one.leases.add("p1")
        questions.query(one.address, CompletedRead("a", "p1"))
        questions.query(other.address, CompletedRead("b", "p1"))
        found: dict[str, bool] = {}
        while len(found) < 2:
            newly = questions.poll_replies(wait_s=DEADLINE_S)
            assert newly
            found |= newly
        assert found == {"a": True, "b": False}


def test_a_source_that_says_nothing_in_time_has_kept_nothing() -> None:
    clock = Clock()
    with asking(clock) as questions:
        questions.query(free_address(), CompletedRead("a", "p1"))
        assert questions.poll_replies(wait_s=0.0) == {}
        clock.now_s = 4.9
        assert questions.poll_replies(wait_s=0.0) == {}
        clock.now_s = 5.0
        assert questions.poll_replies(wait_s=0.0) == {"a": False}
        assert "a" not in questions


def test_an_answer_that_comes_too_late_changes_nothing() -> None:
    clock, address = Clock(), free_address()
    with asking(clock) as questions:
        questions.query(address, CompletedRead("a", "p1"))
        assert questions.poll_replies(wait_s=0.0) == {}
        clock.now_s = 5.0
        assert questions.poll_replies(wait_s=0.0) == {"a": False}
        with serve_leases(address) as source:  # the question has waited for it
            source.leases.add("p1")
            source.leases.add("p2")
            questions.query(address, CompletedRead("b", "p2"))
            found: dict[str, bool] = {}
            while "b" not in found:
                found |= questions.poll_replies(wait_s=DEADLINE_S)
            assert found == {"b": True}


def test_a_source_of_another_baton_survives_the_question_and_is_not_believed() -> None:
    """It takes the question for a request for metadata, as vLLM's own listener does."""
    clock = Clock()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as old, asking(clock) as questions:
        old.setsockopt(zmq.LINGER, 0)
        port = old.bind_to_random_port("tcp://127.0.0.1")
        questions.query(f"tcp://127.0.0.1:{port}", CompletedRead("a", "p1"))
        assert questions.poll_replies(wait_s=0.0) == {}
        assert old.poll(DEADLINE_MS)
        identity, _, message = old.recv_multipart()
        _, pipeline_rank, rank = msgspec.msgpack.decode(message)
        assert (pipeline_rank, rank) in METADATA
        old.send_multipart((identity, b"", METADATA[(pipeline_rank, rank)], b"\x00"))
        assert questions.poll_replies(wait_s=DEADLINE_S) == {}
        clock.now_s = 5.0
        assert questions.poll_replies(wait_s=0.0) == {"a": False}


# ---------------------------------------------------------------------- the side channel
def test_metadata_is_told_by_rank_with_the_listeners_clock_as_vllm_wants_it() -> None:
    with serve_leases() as source:
        empty, metadata, clock = asked(source.address, b"", request(rank=1))
        assert (empty, metadata) == (b"", b"metadata of rank 1")
        assert isinstance(msgspec.msgpack.decode(clock), float)


@pytest.mark.parametrize(
    "parts",
    [
        (b"garbage",),
        (b"", b""),
        (b"", b"garbage"),
        (b"", b"\x93\xc4"),
        (b"", request(), b"more"),
        (b"", request(rank=7)),
        (b"", request(b"another verb")),
        (b"", request(b"baton_leases:")),
        (b"", request(b"baton_leases:\x92\x01\x91\xa1\xff")),
        (b"", b"\x91" * 5000),
    ],
)
def test_an_unreadable_request_is_ignored_and_the_next_one_answered(
    parts: tuple[bytes, ...],
) -> None:
    with serve_leases() as source, zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 1000)
        client.connect(source.address)
        client.send_multipart(parts)
        client.send_multipart((b"", request()))
        assert client.poll(DEADLINE_MS)
        assert client.recv_multipart()[1] == METADATA[(0, 0)]


def test_a_malformed_message_has_no_answer() -> None:
    leases = KeptLeases()
    assert reply_to(b"", metadata=METADATA, leases=leases) is None
    assert reply_to(request(pipeline_rank=3), metadata=METADATA, leases=leases) is None
    assert reply_to(request(), metadata=METADATA, leases=leases) == METADATA[(0, 0)]
