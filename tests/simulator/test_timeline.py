from __future__ import annotations

from baton.simulator.network.timeline import Timeline


def test_things_happen_in_order_and_those_of_one_moment_in_the_order_they_were_said() -> None:
    line, story = Timeline(), []
    for at_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        line.call_at(at_s, lambda name=name: story.append((line.now_s, name)))  # type: ignore[misc]
    assert not line.run()
    assert story == [(1.0, "a"), (1.0, "b"), (2.0, "c")]


def test_a_time_that_is_past_means_now() -> None:
    line, seen = Timeline(5.0), []
    line.call_at(1.0, lambda: seen.append(line.now_s))
    line.run()
    assert seen == [5.0]


def test_time_stops_where_it_was_told_to_and_goes_on_from_there() -> None:
    line, seen = Timeline(), []
    line.call_at(1.0, lambda: seen.append(1))
    line.call_at(3.0, lambda: seen.append(3))
    assert not line.run(until_s=2.0)
    assert (line.now_s, seen) == (2.0, [1])
    line.call_later(0.5, lambda: seen.append(25))
    line.run()
    assert seen == [1, 25, 3]


def test_time_stops_at_what_was_waited_for() -> None:
    line, seen = Timeline(), []
    for at_s in (1.0, 2.0, 3.0):
        line.call_at(at_s, lambda at_s=at_s: seen.append(at_s))  # type: ignore[misc]
    line.call_at(2.0, line.stop)
    assert line.run()
    assert (line.now_s, line.event_count, seen) == (2.0, 3, [1.0, 2.0])
    assert not line.run()
    assert (line.event_count, seen) == (4, [1.0, 2.0, 3.0])
