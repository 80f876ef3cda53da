from __future__ import annotations

import pytest

from baton.simulator.network.timeline import Timeline
from baton.simulator.network.transfers import Pull, Transfers


class Story:
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
    story = Story()
    story.pull("x", "a", "b")
    story.line.run()
    ((key, what, at_s),) = story.said
    assert (key, what) == ("x", "done")
    assert at_s == pytest.approx(1.5)
    assert len(story.transfers) == 0


def test_a_short_pull_that_begins_later_is_not_waited_for_until_the_long_one_is_done() -> None:
    story = Story()
    story.pull("long", "a", "b", 400)
    story.line.call_at(1.0, lambda: story.pull("short", "c", "b", 50))
    story.line.run()
    # Alone 0.5 to 1.5 s: 100 bytes. Together at 50 a second until 2.5 s. 250 bytes are left.
    assert [key for key, _, _ in story.said] == ["short", "long"]
    assert [at_s for _, _, at_s in story.said] == pytest.approx([2.5, 5.0])


@pytest.mark.parametrize("at_s", [0.2, 1.0])
def test_a_cancelled_pull_is_not_heard_of_again(at_s: float) -> None:
    story = Story()
    story.pull("x", "a", "b")
    story.line.call_at(at_s, lambda: story.transfers.cancel("x"))
    story.line.run()
    assert story.said == []
    assert (len(story.transfers), len(story.transfers.network)) == (0, 0)


@pytest.mark.parametrize("at_s", [0.2, 1.0])
def test_pulls_from_an_engine_that_dies_fail_and_those_into_it_are_forgotten(at_s: float) -> None:
    story = Story()
    story.pull("from", "a", "b")
    story.pull("into", "c", "a")
    story.pull("other", "c", "b")
    story.line.call_at(at_s, lambda: story.transfers.on_engine_died("a"))
    story.line.run()
    assert story.said[0] == ("from", "failed", at_s)
    assert [(key, what) for key, what, _ in story.said[1:]] == [("other", "done")]
    assert (len(story.transfers), len(story.transfers.network)) == (0, 0)


def test_pulls_that_are_done_at_one_moment_are_told_in_order() -> None:
    story = Story(share=False)
    for key in "xyz":
        story.pull(key, "a", "b")
    story.line.run()
    assert [key for key, _, _ in story.said] == ["x", "y", "z"]
