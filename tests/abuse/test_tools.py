"""The tools of abuse themselves: what comes over a socket, what a difference in time is worth."""

from __future__ import annotations

from random import Random

from tests.abuse.canaries import CanarySearch
from tests.abuse.messages import messages
from tests.abuse.raw import closing_request, parse_responses, request
from tests.abuse.timing import compare, probe


def test_answers_are_told_apart_whatever_way_their_ends_are_said() -> None:
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


def test_a_probe_asks_first_what_the_other_asks_then_and_something_new_besides() -> None:
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
