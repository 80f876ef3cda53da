from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import TypeAdapter, ValidationError

from baton.engine.sim import SimSettings


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"prefill_tokens_per_s": 0.0}, "more than 0"),
        ({"speed": float("nan")}, "more than 0"),
        ({"block_size_tokens": 0}, "more than 0"),
        ({"transfer_setup_s": -0.1}, "at least 0"),
        ({"max_len_tokens": 1}, "at least 2"),
        ({"kv_blocks": 255}, "room for one request of max_len_tokens=4096"),
        ({"max_batched_tokens": 255}, "at least max_running_requests=256"),
        ({"vocab_size": 3}, "more than 3"),
        ({"eos_probability": 1.1}, "from 0 to 1"),
        ({"side_channel_port": 65_536}, "from 0 to 65535"),
    ],
)
def test_a_setting_that_cannot_work_is_named_with_what_is_wanted(
    change: dict[str, float], wanted: str
) -> None:
    (name,) = change
    with pytest.raises(ValueError, match=f"{name} is .*, wanted {wanted}"):
        replace(SimSettings(), **change)  # type: ignore[arg-type]  # parametrized


def test_a_misspelt_setting_in_a_file_is_an_error() -> None:
    with pytest.raises(ValidationError, match="prefil_tokens_per_s"):
        TypeAdapter(SimSettings).validate_python({"prefil_tokens_per_s": 1.0})


def test_engines_of_different_models_or_blocks_have_different_layouts() -> None:
    one = SimSettings()
    layouts = {
        one.layout("a"),
        one.layout("b"),
        replace(one, block_size_tokens=32).layout("a"),
        replace(one, kv_dtype="fp8").layout("a"),
        replace(one, kv_block_bytes=1).layout("a"),
    }
    assert len(layouts) == 5
    assert replace(one, kv_blocks=9999, speed=2.0).layout("a") == one.layout("a")
