"""The tools of abuse themselves: what comes over a socket, what a difference in time is worth."""

from __future__ import annotations

from random import Random

import pytest

from baton.config import load_config
from baton.domain.value import evolve
from baton.engine.vllm.gate.access import MAX_REQUEST_ID_CHARS
from baton.engine.vllm.gate.limits import MAX_NAME_CHARS, bad_request_id
from baton.engine.vllm.wire.identity import Caller, salt_name, scoped_salt, tenant_session_id
from baton.runtime.link import codec, frames
from baton.serving.ingress.auth import frontend_limits
from tests.abuse import targets
from tests.abuse.canaries import CanarySearch
from tests.abuse.fuzz import Target, fuzz, mutate
from tests.abuse.messages import messages
from tests.abuse.raw import closing_request, parse_responses, request
from tests.abuse.timing import compare, probe
from tests.fakes.scripted_engine import make_leg


def test_answers_differ_though_their_finish_reasons_have_other_words() -> None:
    data = (
        b"HTTP/1.1 100 Continue\r\n\r\n"
        b"HTTP/1.1 400 Bad Request\r\nContent-Length: 3\r\n\r\nbad"
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n3;x\r\ncde\r\n0\r\n\r\n"
        b"HTTP/1.1 404 Not Found\r\n\r\nto the end"
    )
    answers = list(parse_responses(data))
    assert [answer.status for answer in answers] == [400, 200, 404]
    assert [answer.body for answer in answers] == [b"bad", b"abcde", b"to the end"]


def test_no_message_has_the_name_of_another_and_each_carries_the_key() -> None:
    made = list(messages())
    assert len({message.name for message in made}) == len(made) > 100
    keyed = [message for message in made if b"good-key" in message.make("good-key")]
    assert len(keyed) > len(made) - 5
    assert closing_request("k").endswith(b"Connection: close\r\nAuthorization: Bearer k\r\n\r\n")
    assert request(body=b"x").endswith(b"\r\n\r\nx")


def test_a_difference_that_is_there_is_found_and_one_that_is_not_is_not() -> None:
    rng = Random(1)
    cold = [0.1 + rng.gauss(0, 0.01) for _ in range(200)]
    same = [0.1 + rng.gauss(0, 0.01) for _ in range(200)]
    faster = [time_s - 0.005 for time_s in same]
    assert compare(cold, same).low_s < 0 < compare(cold, same).high_s
    assert compare(cold, faster).low_s > 0
    assert compare(cold, faster).detectable_s < 0.005
    # A machine that pauses now and then does not hide it.
    assert compare([*cold[:-3], 3.0, 3.0, 3.0], faster).low_s > 0


def test_a_cache_probe_repeats_the_other_tenants_prompt_then_sends_a_new_one() -> None:
    asked: list[str] = []
    known: set[str] = set()

    def first(prompt: str) -> float:
        known.add(prompt)
        return 1.0

    def second(prompt: str) -> float:
        asked.append(prompt)
        return 0.1 if prompt in known else 0.5

    told = probe(first, second, pairs=40, rng=Random(2), words=3)
    assert (told.pairs, len(asked), len(set(asked))) == (40, 80, 80)
    assert round(told.saved_s, 6) == 0.4
    assert told.saved_fraction > 0.7


def test_a_canary_is_found_however_it_is_written() -> None:
    found = CanarySearch()
    found.plant("a key", "ab/cd ef+gh")
    found.plant_ids("tokens", [1, 22, 333, 4, 5, 6, 7])
    for where, data in {
        "plain": b"x ab/cd ef+gh y",
        "url": b"?k=ab/cd%20ef%2Bgh",
        "base64": b"YWIvY2QgZWYrZ2g=",
        "json": b'"prompt_token_ids": [1, 22, 333, 4, 5, 6, 7]',
        "tight": b"[1,22,333,4,5,6]",
    }.items():
        found.search("files", where, data)
    assert len(found.hits) == 5
    found.search("files", "clean", b"ab/cd 1, 22, 333, 4, 5, 7")
    assert (len(found.hits), found.searched) == (5, 6)
    found.kinds["traces"] = 0
    assert found.empty_kinds == ["nothing of traces"]


# -------------------------------------------------------------------- fuzzing


def test_an_error_of_a_check_is_kept_with_the_request_that_causes_it() -> None:
    def check_number(number: int) -> str:
        if number == 3:
            raise KeyError("three")
        return "even" if number % 2 == 0 else "odd"

    target = Target(make=lambda rng: rng.randrange(5), check=check_number)
    found = fuzz(target, seconds=5, seed=1, inputs=200)
    assert found.inputs == 200
    assert found.failures == 200 - sum(found.outcomes.values()) > 10
    assert set(found.outcomes) == {"even", "odd"}
    number = int(found.first_failures[0].split()[1])
    assert target.make(Random(f"1 {number}")) == 3
    assert "KeyError: 'three'" in found.first_failures[0]


def test_a_check_that_hangs_is_ended() -> None:
    def check_number(_made: int) -> str:
        while True:
            pass

    target = Target(make=lambda _rng: 1, check=check_number, timeout_s=0.02)
    found = fuzz(target, seconds=5, seed=1, inputs=1)
    assert found.failures == 1
    assert "Hangs" in found.first_failures[0]


def test_mutations_are_the_same_for_a_seed_and_mostly_change_something() -> None:
    data = bytes(range(100))
    made = [mutate(data, Random(seed)) for seed in range(50)]
    assert made == [mutate(data, Random(seed)) for seed in range(50)]
    assert sum(other != data for other in made) > 40


def test_a_codec_that_lets_anything_out_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    target = targets.link(10)
    assert fuzz(target, seconds=0.3, seed=2).failures == 0

    def broken(parts: object) -> object:
        raise ValueError("not one of ours")

    monkeypatch.setattr("tests.abuse.targets._DECODERS", (broken,))
    assert fuzz(target, seconds=5, seed=2, inputs=10).failures == 10


def test_a_reader_of_events_that_minds_where_they_are_cut_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = targets.sse()
    assert fuzz(target, seconds=0.2, seed=2).failures == 0
    monkeypatch.setattr("tests.abuse.targets._read", lambda pieces: [len(pieces)])
    assert fuzz(target, seconds=5, seed=2, inputs=10).failures > 5


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["link", "config", "sse"])
def test_for_seconds_nothing_is_found(name: str) -> None:
    found = fuzz(getattr(targets, name)(), seconds=5, seed=3)
    assert found.first_failures == []
    assert len(found.outcomes) >= 2


# -------------------------------------------------------------------- bounds


LONGEST_TENANT = "t" * 64


def test_the_longest_name_that_a_client_gives_is_one_that_the_fleet_link_takes() -> None:
    """A frame that a replica refuses ends the session, and with it the streams of everybody."""
    assert bad_request_id("x" * MAX_NAME_CHARS) is None
    assert bad_request_id("x" * (MAX_NAME_CHARS + 1)) is not None
    # A child's index, vLLM's own eight letters, and the number of a resume.
    name = "16383_" + "x" * MAX_NAME_CHARS + "-0123abcd" + "~1000000"
    salt = salt_name(scoped_salt(LONGEST_TENANT, "s" * 1_000_000))
    leg = evolve(make_leg(name), request_id=name, cache_salt=salt)
    assert codec.decode_from_coordinator(codec.encode(frames.Submit(leg))) == frames.Submit(leg)
    assert len("chatcmpl-") + MAX_REQUEST_ID_CHARS < MAX_NAME_CHARS


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31m", "a\x00", "\u202e", "\ud800"])
def test_a_name_is_printable(name: str) -> None:
    assert bad_request_id(name) is not None


def test_the_session_id_that_placement_keeps_is_short() -> None:
    session = tenant_session_id(Caller(LONGEST_TENANT), "s" * 4_000_000)
    assert session is not None
    assert len(session) < 150


def test_by_default_a_request_is_bounded_in_all_that_it_may_ask_for() -> None:
    limits = frontend_limits(load_config(["configs/sim.yaml"]).config)
    assert limits.default_output_tokens is not None
    assert limits.too_many_answers(129) is not None
    assert limits.too_many_answers(128) is None
    assert limits.max_body_bytes <= 4 * 1024 * 1024
    assert limits.max_body_s <= 60
