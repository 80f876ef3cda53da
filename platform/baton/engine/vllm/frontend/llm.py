"""vLLM's engine client and API app, with the fleet's engine server instead of an engine."""

from __future__ import annotations

import asyncio
import json
import logging
import traceback
from argparse import Namespace
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from functools import partial
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import JSONResponse, Response
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.serve.exception_handling.handlers.validation import (
    validation_exception_handler,
)
from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMClientError
from vllm.outputs import RequestOutput
from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import SamplingParams
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.executor import Executor

from baton.control.fleet.adapter_registry import RuntimeAdapter
from baton.domain.errors import BatonError, EngineStartFailed
from baton.engine.vllm.cli_args import make_arg_parser, validate_parsed_serve_args
from baton.engine.vllm.fast_path.detokenizer_tail import install_tail_decoding
from baton.engine.vllm.fast_path.fast_chunks import install_fast_chunks
from baton.engine.vllm.fast_path.route_name_cache import install_route_name_cache
from baton.engine.vllm.fast_path.stream_bypass import (
    install_request_bypass,
    install_response_bypass,
)
from baton.engine.vllm.fast_path.tokenization_cache import (
    install_fast_tokenizer,
    install_tokenization_cache,
)
from baton.engine.vllm.gate.errors import (
    Problem,
    describe_field_errors,
    problem_from_vllm,
    strip_class_names,
)
from baton.engine.vllm.gate.gate import CURRENT_EXCHANGE, AsgiApp
from baton.engine.vllm.gate.limits import FrontendLimits, bad_request_id, too_many_bad_words
from baton.engine.vllm.patches import table
from baton.engine.vllm.wire.codec import is_runtime_adapter, to_lora_request
from baton.engine.vllm.wire.identity import ANONYMOUS, Caller, tenant_session_id, with_caller

_TASKS = ("generate",)
# Handlers whose requests may omit the number of tokens. On other routes it is required, or the API
# prescribes a default.
_DEFAULT_TOKENS_HANDLERS = ("openai_serving_chat", "openai_serving_responses")
_FILTERED_LOGGERS = (
    "vllm.entrypoints.anthropic.api_router",
    "vllm.entrypoints.anthropic.serving",
    "vllm.entrypoints.openai.chat_completion.serving",
    "vllm.entrypoints.openai.completion.serving",
    "vllm.entrypoints.openai.responses.serving",
)
# Its log line has the client's name of a model, however long.
_WRONG_MODEL_MESSAGE = "Error with model %s"
# Exceptions that vLLM answers with 400.
_CLIENT_ERRORS = (VLLMClientError, ValueError, TypeError, OverflowError)
_CLOSE_TIMEOUT_S = 1.0
_SHUTTING_DOWN = Problem(
    status=503, message="this frontend is going away; try again", retry_after_s=1.0
)
_NUMBER_TOO_LARGE = Problem(status=400, message="a number in the request takes more than 64 bits")


class FleetError(GracefulHTTPError, GenerationError):  # type: ignore[misc]  # vllm is not followed
    """A problem on its way through vLLM's handlers.

    The first base class passes the engine client unchanged, the second passes streams without a
    stack trace in the log.
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
        admit: Callable[[int, Caller], BatonError | None],
        limits: FrontendLimits | None = None,
    ) -> None:
        self.limits = limits or FrontendLimits()
        """May be replaced at any time."""
        self._admit = admit
        super().__init__(
            config,
            Executor.get_class(config),
            log_stats=log_stats,
            log_requests=False,
            client_addresses=dict(addresses),
        )
        install_tokenization_cache(
            self.renderer, _cache_scope, install_fast_tokenizer(self.renderer)
        )
        install_tail_decoding(self.output_processor)

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Ask the fleet after vLLM's own limits; called before a response starts.

        Raises:
            FleetError: the fleet admits no `n` more, or `n` is over the limit.
        """
        exchange = CURRENT_EXCHANGE.get()
        if exchange is not None and not exchange.generates:
            return  # vLLM's handlers ask even when they only count tokens
        if (problem := self.limits.too_many_answers(n)) is not None:
            raise FleetError(problem)
        super().check_admission(n, request_id)
        error = self._admit(n, ANONYMOUS if exchange is None else exchange.caller)
        if error is not None:
            raise FleetError(Problem.from_error(error))

    async def generate(
        self,
        prompt: Any,  # noqa: ANN401 - passed on as it is
        sampling_params: SamplingParams,
        request_id: str,
        **kwargs: Any,  # noqa: ANN401
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs as vLLM makes them; the exchange learns when they flow and why they end early.

        Raises:
            FleetError: the request failed in the fleet, or exceeds a limit.
        """
        exchange = CURRENT_EXCHANGE.get()
        if exchange is not None:
            # Not earlier: `/v1/responses` asks for admission before it checks its body.
            exchange.submitted = True
        problem = (
            self.limits.too_many_tokens(sampling_params.max_tokens)
            or bad_request_id(request_id)
            or too_many_bad_words(sampling_params.bad_words)
            or self.limits.no_logprobs(sampling_params.logprobs, sampling_params.prompt_logprobs)
        )
        if problem is not None:
            raise FleetError(problem)
        caller, trace = (ANONYMOUS, None) if exchange is None else (exchange.caller, exchange.trace)
        sampling_params.extra_args = with_caller(sampling_params.extra_args, caller, trace)
        # Priority depends on classes and tenants, and placement chooses the engine.
        kwargs |= {"priority": 0, "data_parallel_rank": None}
        session_hint = None if exchange is None else exchange.session
        kwargs["session_id"] = tenant_session_id(caller, kwargs.get("session_id"), session_hint)
        bypass = None if exchange is None else exchange.bypass
        generation = super().generate(prompt, sampling_params, request_id, **kwargs)
        async with aclosing(generation) as outputs:
            try:
                async for output in outputs:
                    _raise_if_failed(output)
                    if exchange is not None:
                        exchange.has_output = True
                    if bypass is not None:
                        bypass.on_output(output)
                    yield output
                    if bypass is not None:
                        bypass.on_idle()
            except EngineDeadError as error:
                raise FleetError(_SHUTTING_DOWN) from error
            except EngineGenerateError as error:
                if isinstance(error.__cause__, OverflowError):
                    raise FleetError(_NUMBER_TOO_LARGE) from error
                raise

    async def _add_request(
        self,
        request: EngineCoreRequest,
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Add a request as vLLM does, but forget it if the fleet does not get it.

        vLLM would remove it only when its consumer starts to wait.
        """
        try:
            await super()._add_request(request, *args, **kwargs)
        except BaseException:
            self.output_processor.abort_requests([request.request_id], internal=True)
            raise
        exchange = CURRENT_EXCHANGE.get()
        state = self.output_processor.request_states.get(request.request_id)
        if exchange is not None and exchange.bypass is not None and state is not None:
            exchange.bypass.attach(state)

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


def _raise_if_failed(output: RequestOutput) -> None:
    for completion in output.outputs:
        if completion.finish_reason == "error":
            raise FleetError(Problem.unpack(completion.stop_reason))


def _cache_scope() -> str | bool | None:
    """The cache scope of the running request, or False if it names a salt."""
    exchange = CURRENT_EXCHANGE.get()
    if exchange is None:
        return None
    return False if exchange.has_cache_salt else exchange.caller.cache_scope


def parse_server_args(argv: list[str]) -> Namespace:
    """Parse vLLM's server arguments, and load the parsers that they name, as `vllm serve` does.

    Raises:
        EngineStartFailed: vLLM refuses them.
    """
    try:
        args: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
    except SystemExit as error:
        raise EngineStartFailed(
            f"vllm does not take the server arguments {json.dumps(argv)}",
            "see its message above and correct `models.*.api`",
        ) from error
    try:
        validate_parsed_serve_args(args)
        if args.tool_parser_plugin:
            ToolParserManager.import_tool_parser(args.tool_parser_plugin)
        if args.reasoning_parser_plugin:
            ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
        _check_parsers(args)
    except (OSError, ImportError, KeyError, *_CLIENT_ERRORS) as error:
        raise EngineStartFailed(
            f"vllm does not take the server arguments: {str(error).strip() or repr(error)}",
            "correct `models.*.api`",
        ) from error
    return args


def _check_parsers(args: Namespace) -> None:
    """Check that the parsers exist.

    Raises:
        KeyError: a parser does not.
    """
    tool_parsers, reasoning = ToolParserManager.list_registered(), args.reasoning_parser
    if args.enable_auto_tool_choice and args.tool_call_parser not in tool_parsers:
        raise KeyError(
            f"no tool_call_parser {args.tool_call_parser!r}, there are {sorted(tool_parsers)}"
        )
    reasoning_parsers = ReasoningParserManager.list_registered()
    if reasoning and reasoning not in reasoning_parsers:
        raise KeyError(f"no reasoning_parser {reasoning!r}, there are {sorted(reasoning_parsers)}")


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


class PromptRedactionFilter(logging.Filter):
    """Removes content of requests, and refusals, from vLLM's log.

    vLLM's handlers log errors with a stack and the error's text, which may quote the request.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written; its text is replaced."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, FleetError) or record.msg == _WRONG_MODEL_MESSAGE:
            return False
        if error is None:
            return True
        record.msg, record.args = "a handler of vLLM answered with %s", (type(error).__name__,)
        if not isinstance(error, _CLIENT_ERRORS):
            record.msg += ":\n%s"
            record.args += ("".join(traceback.format_tb(error.__traceback__)),)
        record.exc_info = record.exc_text = None
        return True


def _limited_search(
    limits: Callable[[], FrontendLimits], search: Callable[..., Any]
) -> Callable[..., Any]:
    """A beam search within the limits.

    It makes many requests of one token each, so the limits of a request would not apply.
    """

    def bounded(*args: Any, params: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        current = limits()
        problem = current.too_many_tokens(params.max_tokens) or current.too_many_answers(
            params.beam_width
        )
        if problem is not None:
            raise FleetError(problem)
        return search(*args, params=params, **kwargs)

    return bounded


def capture_stream_errors(state: Any) -> None:  # noqa: ANN401 - vllm is not followed
    """Record in the exchange why one of vLLM's handlers ends a stream early.

    A handler puts the error into the stream, after status 200, and goes on to its end.
    """
    table.STREAM_ERRORS.install(
        state,
        streamed=_capturing_errors,
        raw_stream=_marking_streams,
        raw_error=_capturing_raw_errors,
    )


def _capturing_errors(make_error: Callable[..., str]) -> Callable[..., str]:
    def capturing(*args: Any, **kwargs: Any) -> str:  # noqa: ANN401
        error_json = make_error(*args, **kwargs)
        _record_problem(error_json)
        return error_json

    return capturing


def _marking_streams(generate: Callable[..., Any]) -> Callable[..., Any]:
    def marking(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if (exchange := CURRENT_EXCHANGE.get()) is not None:
            exchange.has_begun_stream = True
        return generate(*args, **kwargs)

    return marking


def _capturing_raw_errors(make_error: Callable[..., Any]) -> Callable[..., Any]:
    def capturing(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        error_response = make_error(*args, **kwargs)
        exchange = CURRENT_EXCHANGE.get()
        if exchange is not None and exchange.has_begun_stream:
            _record_problem(error_response.model_dump_json())
        return error_response

    return capturing


def _record_problem(error_json: str) -> None:
    """Keep an error of vLLM in the exchange, unless it has one."""
    exchange = CURRENT_EXCHANGE.get()
    if exchange is not None and exchange.problem is None:
        exchange.problem = problem_from_vllm(
            json.loads(error_json)["error"]["code"], error_json.encode()
        )


async def _on_validation_error(request: Request, error: Exception) -> Response:
    """Answer as vLLM does for an invalid body, in terms that clients know."""
    assert isinstance(error, RequestValidationError), "it is registered for these"
    response = await validation_exception_handler(request, error)
    document = json.loads(response.body)
    document["error"]["message"] = describe_field_errors(error.errors())
    if (param := document["error"]["param"]) is not None:
        document["error"]["param"] = strip_class_names(param)
    return JSONResponse(document, status_code=response.status_code)


class ApiApp:
    """VLLM's complete API app, and the defaults of its handlers."""

    def __init__(self, app: Any) -> None:  # noqa: ANN401 - vllm is not followed
        self.asgi: AsgiApp = app
        self._models = app.state.openai_serving_models
        self._defaults = [
            (defaults, defaults.get("max_tokens"))
            for name in _DEFAULT_TOKENS_HANDLERS
            if (handler := getattr(app.state, name, None)) is not None
            for defaults in [handler.default_sampling_params]
        ]

    def set_adapters(self, adapters: Iterable[RuntimeAdapter]) -> None:
        """Serve these runtime adapters, together with the configured adapters."""
        current = self._models.lora_requests
        configured = {
            name: value for name, value in current.items() if not is_runtime_adapter(value)
        }
        added = {
            adapter.name: to_lora_request(adapter)
            for adapter in adapters
            if adapter.name not in configured
        }
        # An iteration sees the old or the new mapping; requests keep their adapter.
        table.ADAPTER_LIST.install(self._models, lora_requests=configured | added)

    def set_default_max_tokens(self, max_tokens: int | None) -> None:
        """Set the output tokens of a request without a limit; None: the model's default."""
        for defaults, model_default in self._defaults:
            default = model_default if max_tokens is None else max_tokens
            if default is None:
                defaults.pop("max_tokens", None)
            else:
                defaults["max_tokens"] = default


async def build_api_app(llm: FleetLLM, args: Namespace) -> ApiApp:
    """Build vLLM's complete API app over `llm`."""
    table.API_SERVER.fits()
    table.LOG_REDACTION.fits()
    # By name: the app's handlers are fixed once it is built.
    table.VALIDATION_ERRORS.install(_on_validation_error)
    app = build_app(args, _TASKS, llm.model_config)
    await init_app_state(llm, app.state, args, _TASKS)
    capture_stream_errors(app.state)
    table.BEAM_SEARCH_LIMITS.install(app.state, partial(_limited_search, lambda: llm.limits))
    install_response_bypass(app, middleware=bool(args.middleware))
    install_request_bypass(app)
    install_fast_chunks()
    install_route_name_cache()
    for name in _FILTERED_LOGGERS:
        filtered_logger = logging.getLogger(name)
        if not any(
            isinstance(filter_, PromptRedactionFilter) for filter_ in filtered_logger.filters
        ):
            filtered_logger.addFilter(PromptRedactionFilter())
    # vLLM's error handlers ask this server to exit when the engine is dead. Here the frontend
    # becomes unhealthy instead.
    table.SERVER_HANDLE.install(app, SimpleNamespace(should_exit=False))
    return ApiApp(app)
