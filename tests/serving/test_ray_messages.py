"""What Ray says of its own accord does not get into what a command prints."""

from __future__ import annotations

import pytest
from ray._private import worker

from baton.serving.ray.driver import redirect_ray_messages


def test_messages_of_ray_go_to_standard_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)
    for _ in range(2):
        redirect_ray_messages()
    said = {"lines": ["a node has been marked dead"], "pid": "raylet", "is_err": False}
    worker.print_to_stdstream(said, ignore_prefix=False)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("a node has been marked dead") == 1


def test_a_ray_that_has_no_such_function_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(worker, "print_to_stdstream")
    redirect_ray_messages()
    assert not hasattr(worker, "print_to_stdstream")
