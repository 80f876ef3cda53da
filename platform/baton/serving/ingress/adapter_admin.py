"""How an ingress has the controller load and unload adapters for its clients."""

from __future__ import annotations

from baton.engine.vllm.gate.adapters import AdapterRequest, Administer
from baton.engine.vllm.gate.errors import Problem
from baton.serving.controller.adapter_manager import CallReplicas
from baton.serving.shared.names import CONTROLLER

_CALL_TIMEOUT_S = 80.0
"""The controller itself gives up sooner."""


def make_administer(call: CallReplicas) -> Administer:
    """What carries a client's orders out."""

    async def administer(order: AdapterRequest) -> Problem | None:
        if order.path is None:
            call_arguments: tuple[object, ...] = ("unload_adapter", order.name, order.tenant)
        else:
            load_order = {
                "name": order.name,
                "source": order.path,
                "tenant": order.tenant,
                "model": order.model,
                "in_place": order.in_place,
            }
            call_arguments = ("load_adapter", load_order)
        method, *arguments = call_arguments
        answers = await call(CONTROLLER, str(method), *arguments, timeout_s=_CALL_TIMEOUT_S)
        if not answers.values:
            why = answers.failures[0] if answers.failures else "there is none"
            return Problem(status=503, message=f"the controller does not answer: {why}; try again")
        refusal = answers.values[0]
        if isinstance(refusal, dict):
            return Problem(status=int(refusal["status"]), message=str(refusal["why"]))
        return None

    return administer
