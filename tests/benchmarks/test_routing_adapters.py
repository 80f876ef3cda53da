from __future__ import annotations

from collections import Counter
from dataclasses import replace

from benchmarks._routing_adapters import Setting, draw, run, summary
from benchmarks._routing_policies import VARIANTS

SETTING = Setting(adapters=6, requests=60, replicas=2, output_tokens=4)
SMALL = replace(SETTING, engine=replace(SETTING.engine, adapter_slots=3, adapters_per_batch=2))


def test_the_most_wanted_adapter_is_asked_for_most_often() -> None:
    wanted = Counter(request.adapter for request in draw(Setting(requests=2000), 1))
    assert len(wanted) == 50
    assert wanted.most_common(1)[0][0] == "adapter-00"
    assert 2 * wanted["adapter-01"] > wanted["adapter-00"] > wanted["adapter-01"]


def test_adapter_local_placement_loads_less_than_taking_turns() -> None:
    requests = draw(SMALL, 1)
    local, turns = (run(SMALL, VARIANTS[name], requests, 1) for name in ("baton", "round_robin"))
    assert local["loads"] < turns["loads"]
    assert local["hit_fraction"] > turns["hit_fraction"]
    for found in (local, turns):
        assert round(found["hit_fraction"] * len(requests)) + found["loads"] >= len(requests)


def test_the_summary_is_of_the_middle_repeat() -> None:
    runs = [{"hit_fraction": part, "loads": 1.0} for part in (0.2, 0.9, 0.5)]
    assert summary({"baton": runs}) == {
        "baton": {
            "hit_fraction": 0.5,
            "loads": 1.0,
            "min_hit_fraction": 0.2,
            "max_hit_fraction": 0.9,
        }
    }
