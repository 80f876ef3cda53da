"""How an ingress has the controller load and unload adapters for its clients."""

from __future__ import annotations

from baton.engine.vllm.gate.adapters import AdapterOrder, Administer
from baton.engine.vllm.gate.errors import Problem
from baton.serving.controller.adapter_manager import Calls
from baton.serving.shared.names import CONTROLLER

_ASK_S = 80.0
"""The controller itself gives up sooner."""


def administered_by(call: Calls) -> Administer:
    """What carries a client's orders out."""

    async def administer(order: AdapterOrder) -> Problem | None:
        if order.path is None:
            asked: tuple[object, ...] = ("unload_adapter", order.name, order.tenant)
        else:
            told = {
                "name": order.name,
                "source": order.path,
                "tenant": order.tenant,
                "model": order.model,
                "in_place": order.in_place,
            }
            asked = ("load_adapter", told)
        method, *arguments = asked
        answers = await call(CONTROLLER, str(method), *arguments, timeout_s=_ASK_S)
        if not answers.given:
            why = answers.missing[0] if answers.missing else "there is none"
            return Problem(status=503, message=f"the controller does not answer: {why}; try again")
        said = answers.given[0]
        if isinstance(said, dict):
            return Problem(status=int(said["status"]), message=str(said["why"]))
        return None

    return administer
