from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from baton.engine.sim import SimSettings
from baton.simulator.engine.settings import SettingInvalid


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
        (
            {"max_batched_tokens_while_decoding": 255},
            "from max_running_requests=256 to max_batched_tokens=2048",
        ),
        ({"vocab_size": 3}, "more than 3"),
        ({"eos_probability": 1.1}, "from 0 to 1"),
        ({"side_channel_port": 65_536}, "from 0 to 65535"),
        ({"host_blocks": -1}, "at least 0"),
        ({"host_bytes_per_s": 0.0}, "more than 0"),
        ({"prefill_step_s": -1.0}, "at least 0"),
        ({"prefill_quadratic_s": -1.0}, "at least 0"),
        ({"decode_kv_s": -0.1}, "at least 0"),
        ({"decode_kv_quadratic_s": -0.1}, "at least 0"),
        ({"decode_kv_quadratic_s": 0.1}, "at most decode_kv_s"),
    ],
)
def test_a_setting_that_cannot_work_is_named_with_what_is_wanted(
    change: dict[str, float], wanted: str
) -> None:
    (name,) = change
    with pytest.raises(ValueError, match=f"{name} is .*, expected {wanted}"):
        replace(SimSettings(), **change)  # type: ignore[arg-type]  # parametrized


def test_a_bad_setting_travels_by_pickle() -> None:
    error = SettingInvalid("speed", 0.0, "more than 0")
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert str(again) == str(error) == "simulated engine: speed is 0.0, expected more than 0"
    assert (again.name, again.got, again.expected) == ("speed", 0.0, "more than 0")


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


def test_a_published_polynomial_can_be_set() -> None:
    """Source: the timing model of NVIDIA Dynamo's mock engine, n tokens and a share u in use:
    prefill ms = 4.209989e-7 n^2 + 1.518344e-2 n + 16.50142,
    decode ms = -25.74 u^2 + 54.01 u + 5.74.
    """
    settings = SimSettings(
        prefill_step_s=0.016_501_42,
        prefill_tokens_per_s=1e3 / 1.518344e-2,
        prefill_quadratic_s=4.209989e-10,
        decode_step_s=0.00574,
        decode_request_s=0.0,
        decode_kv_s=0.05401,
        decode_kv_quadratic_s=0.02574,
        step_overhead_s=0.0,
    )
    prefill_s = settings.step_s(prefill_tokens=4000, decode_requests=0, kv_used_fraction=0.5)
    assert prefill_s == pytest.approx((4.209989e-7 * 4000**2 + 1.518344e-2 * 4000 + 16.50142) / 1e3)
    decode_s = settings.step_s(prefill_tokens=0, decode_requests=9, kv_used_fraction=0.5)
    assert decode_s == pytest.approx((-25.74 * 0.25 + 54.01 * 0.5 + 5.74) / 1e3)
    both_s = settings.step_s(prefill_tokens=4000, decode_requests=9, kv_used_fraction=0.5)
    assert both_s == pytest.approx(prefill_s + decode_s)


def test_speed_divides_every_duration() -> None:
    one, two = SimSettings(), SimSettings(speed=2.0)
    assert two.transfer_s(10**9) == pytest.approx(one.transfer_s(10**9) / 2)
    assert two.host_load_s(100) == pytest.approx(one.host_load_s(100) / 2)
    assert two.step_s(prefill_tokens=9, decode_requests=1) == pytest.approx(
        one.step_s(prefill_tokens=9, decode_requests=1) / 2
    )


def test_a_step_that_prefills_nothing_pays_nothing_for_prefill() -> None:
    settings = SimSettings(prefill_step_s=1.0, prefill_quadratic_s=1.0)
    assert settings.step_s(prefill_tokens=0, decode_requests=1) < 0.1
