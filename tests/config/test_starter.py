"""A configuration to begin with: it loads, and asks for what its machine has."""

from __future__ import annotations

import pytest

from baton.config.load import load_text
from baton.config.write.starter import NotEnoughGpus, Starter


@pytest.mark.parametrize(
    ("starter", "cpus_and_gpus", "tp"),
    [
        (Starter(model="tiny"), (1, 0), 1),
        (Starter(model="tiny", gpus_here=4), (1, 0), 1),
        (Starter(model="org/model"), (1, 0), 1),
        (Starter(model="org/model", gpus_here=1), (1, 0.5), 1),
        (Starter(model="org/model", gpus_here=2), (1, 1), 1),
        (Starter(model="org/model", gpus_here=4, tp=2), (1, 2), 2),
        (Starter(model="org/model", accelerator="H100", tp=4), (1, 4), 4),
    ],
    ids=lambda value: value.model if isinstance(value, Starter) else str(value),
)
def test_a_starter_configuration_loads_and_asks_for_existing_resources(
    starter: Starter, cpus_and_gpus: tuple[float, float], tp: int
) -> None:
    config = load_text(starter.render())
    (model,) = config.models.values()
    assert model.source == starter.model
    assert list(config.pools) == ["prefill", "decode"]
    for pool in config.pools.values():
        assert (pool.resources.cpus, pool.resources.gpus) == cpus_and_gpus
        assert pool.resources.accelerator == starter.accelerator
        assert pool.parallel.tp == tp
        assert pool.replicas.initial == 1


def test_replicas_are_those_that_were_asked_for() -> None:
    config = load_text(Starter(model="m", prefill=2, decode=3, gpus_here=8).render())
    assert {name: pool.replicas.initial for name, pool in config.pools.items()} == {
        "prefill": 2,
        "decode": 3,
    }


@pytest.mark.parametrize("gpus_here", [1, 2])
def test_more_than_this_machine_has_is_refused_with_the_numbers(gpus_here: int) -> None:
    starter = Starter(model="m", prefill=1, decode=2, gpus_here=gpus_here)
    with pytest.raises(NotEnoughGpus) as caught:
        starter.render()
    assert f"got {gpus_here} on this machine, expected at least 3" in caught.value.reason
    assert "--gpu" in caught.value.remedy


@pytest.mark.parametrize("model", ["null", "10", "./models/llama", "org/Model-1.5"])
def test_an_odd_name_of_a_model_is_read_as_it_was_written(model: str) -> None:
    (read,) = load_text(Starter(model=model).render()).models.values()
    assert read.source == model
