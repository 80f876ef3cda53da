from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from baton.simulator.network.network import Network
from baton.simulator.network.timeline import Timeline
from baton.simulator.network.transfers import Pull, Transfers

FAST = 100.0


def network(*names: str, share: bool = True, bytes_per_s: float = FAST) -> Network:
    made = Network(share=share)
    for name in names:
        made.connect(name, bytes_per_s)
    return made


def run(net: Network) -> dict[str, float]:
    """When each flow is done, with nothing else happening."""
    done: dict[str, float] = {}
    while (at_s := net.next_done_at_s()) is not None:
        done |= dict.fromkeys(net.pop_done(at_s), at_s)
    return done


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        (("a", "c"), ("b", "c"), True),  # into one engine
        (("a", "b"), ("a", "c"), True),  # out of one engine
        (("a", "b"), ("b", "c"), False),  # in and out of one engine: two ways
        (("a", "b"), ("c", "d"), False),
    ],
)
def test_flows_share_the_interfaces_that_they_have_in_common(
    first: tuple[str, str], second: tuple[str, str], *, shared: bool
) -> None:
    net = network("a", "b", "c", "d")
    for key, (source, target) in (("one", first), ("two", second)):
        net.begin(key, source_id=source, target_id=target, moved_bytes=100, now_s=0.0)
    assert run(net) == pytest.approx(dict.fromkeys(("one", "two"), 2.0 if shared else 1.0))


def test_without_sharing_every_flow_has_the_whole_interface() -> None:
    net = network("a", "b", share=False)
    for key in ("one", "two"):
        net.begin(key, source_id="a", target_id="b", moved_bytes=100, now_s=0.0)
    assert run(net) == pytest.approx({"one": 1.0, "two": 1.0})


def test_a_flow_without_bytes_is_done_at_once() -> None:
    net = network("a", "b")
    net.begin("f", source_id="a", target_id="b", moved_bytes=0, now_s=3.0)
    assert net.pop_done(3.0) == ["f"]


@dataclass(eq=False)
class SlowFlow:
    source: str
    target: str
    starts_s: float
    left: float


def in_small_steps(flows: list[SlowFlow], step_s: float) -> list[float]:
    """When flows are done, found by letting a little time pass again and again."""
    now_s, done = 0.0, [0.0] * len(flows)
    while any(flow.left > 0 for flow in flows):
        live = [flow for flow in flows if flow.left > 0 and flow.starts_s <= now_s]
        rates = [
            FAST
            / max(sum(o.source == f.source for o in live), sum(o.target == f.target for o in live))
            for f in live
        ]
        now_s += step_s
        for flow, rate in zip(live, rates, strict=True):
            flow.left -= rate * step_s
            if flow.left <= 0:
                done[flows.index(flow)] = now_s
    return done


@given(
    flows=st.lists(
        st.tuples(
            st.sampled_from("ab"), st.sampled_from("cd"), st.integers(0, 20), st.integers(1, 40)
        ),
        min_size=1,
        max_size=6,
    )
)
@hypothesis_settings(deadline=None, max_examples=30)
def test_flows_end_when_small_steps_of_time_say(flows: list[tuple[str, str, int, int]]) -> None:
    step_s = 0.004
    slow = [SlowFlow(s, t, start / 20, float(size)) for s, t, start, size in flows]
    wanted = in_small_steps(slow, step_s)
    net = network(*"abcd")
    found: dict[str, float] = {}
    for index in sorted(range(len(flows)), key=lambda i: flows[i][2]):
        source, target, start, size = flows[index]
        while (at_s := net.next_done_at_s()) is not None and at_s <= start / 20:
            found |= dict.fromkeys(net.pop_done(at_s), at_s)
        net.begin(
            str(index), source_id=source, target_id=target, moved_bytes=size, now_s=start / 20
        )
    found |= run(net)
    for index, at_s in enumerate(wanted):
        assert found[str(index)] == pytest.approx(at_s, abs=8 * step_s)


def test_an_interface_that_changes_changes_its_flows_and_no_others() -> None:
    network = Network()
    for name in ("a", "b", "c", "d"):
        network.connect(name, 100.0)
    network.begin("x", source_id="a", target_id="b", moved_bytes=100.0, now_s=0.0)
    network.begin("y", source_id="c", target_id="d", moved_bytes=100.0, now_s=0.0)
    network.set_bandwidth("b", 25.0, 0.5)
    assert network.pop_done(1.0) == ["y"]
    assert network.next_done_at_s() == pytest.approx(0.5 + 50 / 25)
    network.set_bandwidth("a", 10.0, 1.5)
    assert network.next_done_at_s() == pytest.approx(1.5 + 25 / 10)
    network.set_bandwidth("a", 50.0, 2.0)
    assert network.next_done_at_s() == pytest.approx(2.0 + 20 / 25)


# --------------------------------------------------------------------------- timeline
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


def test_time_stops_at_the_awaited_event() -> None:
    line, seen = Timeline(), []
    for at_s in (1.0, 2.0, 3.0):
        line.call_at(at_s, lambda at_s=at_s: seen.append(at_s))  # type: ignore[misc]
    line.call_at(2.0, line.stop)
    assert line.run()
    assert (line.now_s, line.event_count, seen) == (2.0, 3, [1.0, 2.0])
    assert not line.run()
    assert (line.event_count, seen) == (4, [1.0, 2.0, 3.0])


# --------------------------------------------------------------------------- transfers
class TransferLog:
    """Transfers between three engines, and what was said of them when."""

    def __init__(self, *, share: bool = True) -> None:
        self.line = Timeline()
        self.transfers = Transfers(self.line, share=share)
        for name in "abc":
            self.transfers.network.connect(name, 100.0)
        self.said: list[tuple[str, str, float]] = []

    def pull(
        self, key: str, source: str, target: str, moved_bytes: int = 100, setup_s: float = 0.5
    ) -> None:
        def say(what: str) -> None:
            self.said.append((key, what, self.line.now_s))

        self.transfers.begin(
            Pull(
                key=key,
                source_id=source,
                target_id=target,
                moved_bytes=moved_bytes,
                setup_s=setup_s,
                on_done=lambda: say("done"),
                on_failed=lambda: say("failed"),
            )
        )


def test_a_pull_takes_its_set_up_and_its_bytes() -> None:
    story = TransferLog()
    story.pull("x", "a", "b")
    story.line.run()
    ((key, what, at_s),) = story.said
    assert (key, what) == ("x", "done")
    assert at_s == pytest.approx(1.5)
    assert len(story.transfers) == 0


def test_a_short_pull_that_begins_later_is_not_waited_for_until_the_long_one_is_done() -> None:
    story = TransferLog()
    story.pull("long", "a", "b", 400)
    story.line.call_at(1.0, lambda: story.pull("short", "c", "b", 50))
    story.line.run()
    # Alone 0.5 to 1.5 s: 100 bytes. Together at 50 a second until 2.5 s. 250 bytes are left.
    assert [key for key, _, _ in story.said] == ["short", "long"]
    assert [at_s for _, _, at_s in story.said] == pytest.approx([2.5, 5.0])


@pytest.mark.parametrize("at_s", [0.2, 1.0])
def test_a_cancelled_pull_is_not_reported_again(at_s: float) -> None:
    story = TransferLog()
    story.pull("x", "a", "b")
    story.line.call_at(at_s, lambda: story.transfers.cancel("x"))
    story.line.run()
    assert story.said == []
    assert (len(story.transfers), len(story.transfers.network)) == (0, 0)


@pytest.mark.parametrize("at_s", [0.2, 1.0])
def test_pulls_from_an_engine_that_dies_fail_and_those_into_it_are_forgotten(at_s: float) -> None:
    story = TransferLog()
    story.pull("from", "a", "b")
    story.pull("into", "c", "a")
    story.pull("other", "c", "b")
    story.line.call_at(at_s, lambda: story.transfers.on_engine_died("a"))
    story.line.run()
    assert story.said[0] == ("from", "failed", at_s)
    assert [(key, what) for key, what, _ in story.said[1:]] == [("other", "done")]
    assert (len(story.transfers), len(story.transfers.network)) == (0, 0)


def test_pulls_that_are_done_at_one_moment_are_told_in_order() -> None:
    story = TransferLog(share=False)
    for key in "xyz":
        story.pull(key, "a", "b")
    story.line.run()
    assert [key for key, _, _ in story.said] == ["x", "y", "z"]
