"""The deployment on the Ray cluster that this process is connected to, as applying sees it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence

from baton.config.schema import DeploymentConfig
from baton.domain.errors import NotRunning
from baton.serving import serve_control
from baton.serving.live_config import Generations, LiveConfig
from baton.serving.names import APP, CONTROLLER, INGRESS
from baton.serving.serve_control import Answers

_ASK_S = 10.0
"""Answers take milliseconds; building a policy of the user's own may import a lot first."""
_ACT_S = 10.0
_TOLD = (INGRESS, CONTROLLER)
"""Who works by the configuration."""


class ServeRunning:
    """A `Running` on Ray Serve."""

    def __init__(self, runner: asyncio.Runner, app: str = APP) -> None:
        self._runner = runner
        self._app = app
        self._generations = Generations()
        self._pools: tuple[str, ...] = ()

    def current(self) -> LiveConfig:
        """What holds now: as the store has it, or else as the controller was started.

        Raises:
            NotRunning: there is no controller, or it does not answer.
        """
        answers = self._ask(CONTROLLER, "config")
        for answer in answers.given:
            if isinstance(answer, LiveConfig):
                newest = self._generations.newest(answer.config)
                live = newest if newest.generation > answer.generation else answer
                self._pools = tuple(live.config.pools)
                return live
        why = "; ".join(answers.missing) or "there is none"
        raise NotRunning(f"the controller does not answer: {why}", "look at 'baton status'")

    def prepare(self, on_top_of: int, config: DeploymentConfig) -> Sequence[str]:
        """Why processes cannot take it, those that do not answer among them."""
        wrong: list[str] = []
        for deployment in _TOLD:
            answers = self._ask(deployment, "prepare_config", on_top_of, config)
            wrong += answers.missing
            wrong += [f"{deployment}: {why}" for why in answers.given if why]
            if not answers.given and not answers.missing:
                wrong.append(f"{deployment}: there is none")
        return list(dict.fromkeys(wrong))

    def commit(self, live: LiveConfig) -> bool:
        """Keep it as the next generation; False: somebody else's is."""
        return self._generations.add(live)

    def tell(self, live: LiveConfig) -> Sequence[str]:
        """Have every process take it; what went wrong."""
        wrong: list[str] = []
        for deployment in _TOLD:
            answers = self._ask(deployment, "take_config", live)
            wrong += answers.missing
            wrong += [
                f"{deployment}: still at generation {got}"
                for got in answers.given
                if not isinstance(got, int) or got < live.generation
            ]
        return wrong

    def problems(self) -> Sequence[str]:
        """What ails: one line for each ingress that cannot serve."""
        answers = self._ask(INGRESS, "healthy")
        ailing = sum(answer is not True for answer in answers.given)
        unwell = [f"{ailing} of {len(answers.given)} ingresses cannot serve"] if ailing else []
        return [*answers.missing, *unwell]

    def sizes(self) -> Mapping[str, int]:
        """How many replicas each pool is to have at present."""
        states = self._runner.run(
            serve_control.deployment_states(self._app, self._pools, timeout_s=_ASK_S)
        )
        return {name: state.target for name, state in states.items()}

    def resize(self, pool: str, replicas: int) -> None:
        """Have exactly so many replicas of a pool, from now on."""
        self._runner.run(
            serve_control.scale_soon(self._app, pool, replicas=replicas, timeout_s=_ACT_S)
        )

    def _ask(self, deployment: str, method: str, *arguments: object) -> Answers:
        return self._runner.run(
            serve_control.call_all(self._app, deployment, method, *arguments, timeout_s=_ASK_S)
        )


@contextlib.contextmanager
def running_deployment() -> Iterator[ServeRunning]:
    """The deployment of the cluster that this process is connected to."""
    import ray.serve  # noqa: F401 - importing it sets the level of its logger

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with asyncio.Runner() as runner:
        yield ServeRunning(runner)
