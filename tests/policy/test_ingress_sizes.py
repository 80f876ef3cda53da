"""How many ingresses there should be, by how busy they are."""

from __future__ import annotations

import pytest

from baton.policy.scaling.ingresses import IngressBounds, IngressSizer

UP_TO_FOUR = IngressBounds(min=1, max=4)


@pytest.mark.parametrize(
    ("busy", "want"),
    [((0.5,), 1), ((0.61,), 2), ((0.9, 0.9), 3), ((1.0, 1.0, 1.0), 4), ((1.0,) * 4, 4)],
)
def test_as_many_come_at_once_as_have_room_for_what_is_done(
    busy: tuple[float, ...], want: int
) -> None:
    assert IngressSizer(UP_TO_FOUR).desired(len(busy), busy, 0.0) == want


def test_one_goes_when_the_rest_had_room_for_a_minute() -> None:
    sizer = IngressSizer(UP_TO_FOUR)
    calm = (0.2, 0.2, 0.2)
    assert [sizer.desired(3, calm, float(now)) for now in (0, 30, 59, 60)] == [3, 3, 3, 2]
    assert sizer.desired(2, (0.3, 0.3), 61.0) == 2


def test_a_burst_begins_the_minute_anew() -> None:
    sizer = IngressSizer(UP_TO_FOUR)
    assert sizer.desired(2, (0.1, 0.1), 0.0) == 2
    assert sizer.desired(2, (0.3, 0.3), 30.0) == 2
    assert sizer.desired(2, (0.1, 0.1), 61.0) == 2
    assert sizer.desired(2, (0.1, 0.1), 121.0) == 1


def test_no_number_is_outside_of_what_there_may_be() -> None:
    sizer = IngressSizer(IngressBounds(min=2, max=3))
    assert sizer.desired(2, (0.0, 0.0), 0.0) == 2
    assert sizer.desired(2, (0.0, 0.0), 1e6) == 2
    assert sizer.desired(5, (0.9,) * 5, 1e6) == 3
    assert not IngressBounds(min=2, max=2).is_scalable
