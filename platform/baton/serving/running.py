"""The deployment on the Ray cluster that this process is connected to, as applying sees it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence

from baton.config.schema import DeploymentConfig, PoolConfig
from baton.domain.errors import NotRunning
from baton.domain.fleet import Role
from baton.serving import serve_control
from baton.serving.app import build_app
from baton.serving.deployment import telling_line
from baton.serving.live_config import Generations, LiveConfig
from baton.serving.names import APP, CONTROLLER, INGRESS
from baton.serving.serve_control import Answers

_ASK_S = 10.0
"""Answers take milliseconds; building a policy of the user's own may import a lot first."""
_ACT_S = 10.0
_POLL_S = 0.2
_TOLD = (INGRESS, CONTROLLER)
"""Who works by the configuration."""


class ServeRunning:
    """A `Running` on Ray Serve."""

    def __init__(self, runner: asyncio.Runner, app: str = APP) -> None:
        self._runner = runner
        self._app = app
        self._generations = Generations()
        self._config: DeploymentConfig | None = None
        self._surge = True
        """Whether there is room for a replica beside the one that it replaces."""

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
                self._config = live.config
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
        pools = self._config.pools if self._config is not None else ()
        states = self._runner.run(
            serve_control.deployment_states(self._app, pools, timeout_s=_ASK_S)
        )
        return {name: state.target for name, state in states.items()}

    def resize(self, pool: str, replicas: int) -> None:
        """Have exactly so many replicas of a pool, from now on."""
        self._runner.run(
            serve_control.scale_soon(self._app, pool, replicas=replicas, timeout_s=_ACT_S)
        )

    def cannot_replace(self, config: DeploymentConfig, pools: Sequence[str]) -> Sequence[str]:
        """Why replicas of these pools cannot be replaced one by one.

        Without room for one more, a replica goes before its successor comes. So a lone one would
        leave nobody, unless it only prefills, for decode replicas prefill, too; and the successor
        must fit where the other was.
        """
        import ray

        free: Mapping[str, float] = ray.available_resources()
        tight = [name for name in pools if not fits(config.pools[name], free=free)]
        self._surge = not tight
        return cramped(config, self._config, self.sizes(), tight)

    def replace(
        self, config: DeploymentConfig, sizes: Mapping[str, int], timeout_s: float
    ) -> Sequence[str]:
        """Have replicas replaced that are built from something else now, and wait until they are.

        Serve begins within a tenth of a second and calls the application `DEPLOYING` at once.
        """
        from ray import serve

        app = build_app(config, sizes=sizes, surge=self._surge)
        target = serve.RunTarget(
            app, name=self._app, route_prefix="/", external_scaler_enabled=True
        )
        serve.run_many(
            [target],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            found = serve.status().applications[self._app]
            state = str(found.status.value)
            if state == "RUNNING":
                return []
            if state in {"DEPLOY_FAILED", "UNHEALTHY"}:
                said = [one.message for one in found.deployments.values() if one.message]
                return [telling_line(said) or f"Ray Serve calls the application {state}"]
            time.sleep(_POLL_S)
        return [f"the replicas were not replaced after {timeout_s:.0f} s; see --timeout"]

    def _ask(self, deployment: str, method: str, *arguments: object) -> Answers:
        return self._runner.run(
            serve_control.call_all(self._app, deployment, method, *arguments, timeout_s=_ASK_S)
        )


def cramped(
    new: DeploymentConfig,
    old: DeploymentConfig | None,
    sizes: Mapping[str, int],
    tight: Sequence[str],
) -> list[str]:
    """Why replicas of these pools, for which there is no room beside, cannot be replaced."""
    wrong = []
    for name in tight:
        pool = new.pools[name]
        before = None if old is None else old.pools[name]
        if sizes.get(name) == 1 and pool.role is not Role.PREFILL:
            wrong.append(
                f"pool {name} has one replica, and the cluster no room for the one that replaces"
                " it; add a node, or scale it up first"
            )
        elif before is None or not fits(pool, free=wants(before)):
            wrong.append(
                f"pool {name} asks for more than before, and the cluster has no room for it;"
                " add a node, or scale it down first"
            )
    return wrong


def wants(pool: PoolConfig) -> dict[str, float]:
    """What one replica takes, by Ray's names."""
    resources = pool.resources
    taken = {
        "CPU": resources.cpus,
        "GPU": float(resources.gpus),
        "memory": float(resources.memory_bytes or 0),
    }
    return {name: amount for name, amount in taken.items() if amount}


def fits(pool: PoolConfig, *, free: Mapping[str, float]) -> bool:
    """Whether one more replica could be had; by sums, which a single node may still lack."""
    return all(free.get(name, 0.0) >= amount for name, amount in wants(pool).items())


@contextlib.contextmanager
def running_deployment() -> Iterator[ServeRunning]:
    """The deployment of the cluster that this process is connected to."""
    import ray.serve  # noqa: F401 - importing it sets the level of its logger

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with asyncio.Runner() as runner:
        yield ServeRunning(runner)
