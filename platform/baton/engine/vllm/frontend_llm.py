"""vLLM's own engine client and API app, turned towards the seam instead of an engine."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.exceptions import GenerationError, GracefulHTTPError
from vllm.outputs import RequestOutput
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor

from baton.domain.errors import BatonError, EngineStartFailed
from baton.engine.vllm.frontend_errors import Problem
from baton.engine.vllm.frontend_gate import CURRENT_EXCHANGE, AsgiApp

_TASKS = ("generate",)
_CLOSE_TIMEOUT_S = 1.0
_GONE = Problem(status=503, message="this frontend is going away; try again", retry_after_s=1.0)


class FleetError(GracefulHTTPError, GenerationError):  # type: ignore[misc]  # vllm is not followed
    """A problem on its way through vLLM's handlers.

    The first base passes through the engine client as it is, the second through the streams
    without a stack trace in the log.
    """

    def __init__(self, problem: Problem) -> None:
        status = HTTPStatus(problem.status)
        super().__init__(problem.message, status)
        self.status_code = status
        if (exchange := CURRENT_EXCHANGE.get()) is not None:
            exchange.problem = problem


class FleetLLM(AsyncLLM):  # type: ignore[misc]  # vllm is not followed
    """An engine client whose engine is the fleet."""

    def __init__(
        self,
        config: Any,  # noqa: ANN401 - vllm is not followed
        *,
        addresses: Mapping[str, str],
        log_stats: bool,
        admit: Callable[[int], BatonError | None],
    ) -> None:
        self._admit = admit
        super().__init__(
            config,
            Executor.get_class(config),
            log_stats=log_stats,
            log_requests=False,
            client_addresses=dict(addresses),
        )

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Ask the fleet, besides vLLM's own limits; called before a response starts.

        Raises:
            FleetError: the fleet takes no `n` more.
        """
        exchange = CURRENT_EXCHANGE.get()
        if exchange is not None and not exchange.generates:
            return  # vLLM's handlers ask even when they only count tokens
        super().check_admission(n, request_id)
        error = self._admit(n)
        if error is not None:
            raise FleetError(Problem.of(error))

    async def generate(
        self,
        *args: Any,  # noqa: ANN401 - passed on as they are
        **kwargs: Any,  # noqa: ANN401
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs as vLLM makes them; tells the exchange when they flow and why they break off.

        Raises:
            FleetError: the request failed in the fleet.
        """
        exchange = CURRENT_EXCHANGE.get()
        async with aclosing(super().generate(*args, **kwargs)) as outputs:
            try:
                async for output in outputs:
                    for completion in output.outputs:
                        if completion.finish_reason == "error":
                            raise FleetError(Problem.unpack(completion.stop_reason))
                    if exchange is not None:
                        exchange.flowing = True
                    yield output
            except EngineDeadError as error:
                raise FleetError(_GONE) from error

    async def aclose(self) -> None:
        """End open requests with an error and stop; unlike vLLM's shutdown, wait for its tasks."""
        self.output_processor.propagate_error(EngineDeadError())
        resources = self.engine_core.resources
        tasks = [task for task in (self.output_handler, resources.output_queue_task) if task]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_TIMEOUT_S)
        self.shutdown()
        resources.ctx.destroy(linger=0)


def server_args(argv: list[str]) -> Namespace:
    """Parse vLLM's server arguments.

    Raises:
        EngineStartFailed: vLLM refuses them; it has written why to stderr.
    """
    try:
        args: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
    except SystemExit as refusal:
        raise EngineStartFailed(
            f"vllm does not take the server arguments {json.dumps(argv)}",
            "see its message above and correct `engine.extra`",
        ) from refusal
    return args


def engine_config(args: Namespace) -> Any:  # noqa: ANN401 - vllm is not followed
    """Make vLLM's engine configuration for a frontend, which loads a tokenizer but no weights.

    Raises:
        EngineStartFailed: the model cannot be read or the arguments contradict each other.
    """
    try:
        return AsyncEngineArgs.from_cli_args(args).create_engine_config()
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines() or [repr(error)]
        raise EngineStartFailed(
            f"vllm cannot serve model {args.model!r}: {reason[0]}",
            "check the model's path or id and the engine's options",
        ) from error


async def api_app(llm: FleetLLM, args: Namespace) -> AsgiApp:
    """Build vLLM's complete API app over `llm`."""
    app = build_app(args, _TASKS, llm.model_config)
    await init_app_state(llm, app.state, args, _TASKS)
    # vLLM's error handlers ask this server to exit when the engine is dead; ours is not theirs to
    # stop: it turns unhealthy instead.
    app.state.server = SimpleNamespace(should_exit=False)
    result: AsgiApp = app
    return result
