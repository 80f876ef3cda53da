from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from baton.simulator.network.network import Network

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


def test_a_flow_that_is_taken_out_leaves_its_share_to_the_others() -> None:
    net = network("a", "b")
    for key in ("stays", "goes"):
        net.begin(key, source_id="a", target_id="b", moved_bytes=100, now_s=0.0)
    assert net.end("goes", 1.0)
    assert not net.end("goes", 1.0)
    assert run(net) == pytest.approx({"stays": 1.5})


def test_a_flow_without_bytes_is_done_at_once() -> None:
    net = network("a", "b")
    net.begin("f", source_id="a", target_id="b", moved_bytes=0, now_s=3.0)
    assert net.pop_done(3.0) == ["f"]


def test_a_look_that_comes_late_finds_flows_ended_when_they_would_have() -> None:
    net = network("a", "b")
    net.begin("short", source_id="a", target_id="b", moved_bytes=50, now_s=0.0)
    net.begin("long", source_id="a", target_id="b", moved_bytes=150, now_s=0.0)
    # Together until 1 s; the other 100 bytes of the long one then have the way to themselves.
    assert net.pop_done(1.9) == ["short"]
    assert net.next_done_at_s() == pytest.approx(2.0)


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
