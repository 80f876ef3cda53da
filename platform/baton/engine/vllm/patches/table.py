"""Every coupling of baton to private names of vLLM, and of the packages of its API server.

A row is checked where it is installed, or where its names are first called. `baton doctor` prints
all rows. Guards import vLLM when they are called; importing this module does not.
"""

from __future__ import annotations

from typing import Final

from baton.engine.vllm.patches import api_server
from baton.runtime.patch import Patch, Target, replace_attributes
from baton.runtime.patch_guards import (
    all_of,
    contains_text,
    has,
    has_fields,
    takes,
    takes_exactly,
    takes_only,
    uses,
)

_VLLM_TESTED: Final = ("0.32", "0.33")
_CLIENT = "vllm.v1.engine.core_client:AsyncMPClient"
_RESOURCES = "vllm.v1.engine.core_client:BackgroundResources"
_CHAT = "vllm.entrypoints.openai.chat_completion.serving"
_COMPLETIONS = "vllm.entrypoints.openai.completion.serving"
_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
_NO_START = "the process does not start"


def _vllm(*names: str) -> Target:
    return Target(package="vllm", names=names, tested=_VLLM_TESTED)


# ------------------------------------------------------------------ client and wire
ENGINE_CORE_WIRE: Final = Patch(
    name="EngineCore wire",
    target=_vllm("vllm.v1.engine messages", "vllm.v1.serial_utils"),
    guard=all_of(
        has(
            "vllm.v1.engine:EngineCoreRequestType",
            "vllm.v1.engine:EngineCoreReadyResponse",
            "vllm.v1.serial_utils:MsgpackEncoder",
            "vllm.v1.serial_utils:MsgpackDecoder",
        ),
        has_fields(
            "vllm.v1.engine:EngineCoreRequest",
            *("request_id", "prompt_token_ids", "sampling_params", "lora_request", "cache_salt"),
            *("data_parallel_rank", "priority", "client_index", "external_req_id"),
        ),
        has_fields(
            "vllm.v1.engine:EngineCoreOutput",
            *("request_id", "new_token_ids", "finish_reason", "stop_reason", "prefill_stats"),
        ),
        has_fields("vllm.v1.engine:EngineCoreOutputs", "outputs", "utility_output"),
        takes("vllm.v1.serial_utils:UtilityResult", "r"),
    ),
    fallback=_NO_START,
    is_required=True,
)
INPROCESS_CLIENT: Final = Patch(
    name="client in the same loop",
    target=_vllm("AsyncMPClient.add_request_async", "AsyncMPClient.abort_requests_async"),
    guard=all_of(
        takes_only(f"{_CLIENT}.add_request_async", "self", "request"),
        takes_only(f"{_CLIENT}.abort_requests_async", "self", "request_ids"),
        uses(f"{_CLIENT}.__init__", "outputs_queue"),
    ),
    apply=replace_attributes,
    fallback="requests and tokens go through sockets, which takes more processor time",
)
CORE_OUTPUTS: Final = Patch(
    name="reader of EngineCore's outputs",
    target=_vllm("BackgroundResources.output_queue_task", "core_client._process_utility_output"),
    guard=all_of(
        has_fields(_RESOURCES, "output_queue_task", "output_socket", "engine_dead", "ctx"),
        takes_only(
            "vllm.v1.engine.core_client:_process_utility_output", "output", "utility_results"
        ),
        has("vllm.v1.engine.core:EngineCoreProc.ENGINE_CORE_DEAD"),
        takes(f"{_CLIENT}.shutdown", "timeout"),
        has(f"{_CLIENT}.is_sleeping_async", f"{_CLIENT}.call_utility_async"),
    ),
    apply=replace_attributes,
    fallback=_NO_START,
    is_required=True,
)

# ------------------------------------------------------------------ API server
API_SERVER: Final = Patch(
    name="API server",
    target=_vllm("AsyncLLM._add_request", "AsyncLLM(client_addresses)", "build_app"),
    guard=all_of(
        takes("vllm.v1.engine.async_llm:AsyncLLM.__init__", "client_addresses", "log_requests"),
        takes("vllm.v1.engine.async_llm:AsyncLLM._add_request", "request"),
        has("vllm.v1.engine.async_llm:AsyncLLM.check_admission"),
        has("vllm.v1.engine.output_processor:OutputProcessor.abort_requests"),
        has("vllm.entrypoints.launchers.app:build_app"),
        takes("vllm.entrypoints.launchers.api_server.app_state:init_app_state", "state", "args"),
        uses(f"{_CHAT}:OpenAIServingChat.__init__", "default_sampling_params"),
    ),
    fallback=_NO_START,
    is_required=True,
)
BEAM_SEARCH_LIMITS: Final = Patch(
    name="limits of beam searches",
    target=_vllm("OpenAIServingChat.beam_search", "OpenAIServingCompletion.beam_search"),
    guard=all_of(
        takes(f"{_CHAT}:OpenAIServingChat.beam_search", "params"),
        takes(f"{_COMPLETIONS}:OpenAIServingCompletion.beam_search", "params"),
        has_fields("vllm.sampling_params:BeamSearchParams", "beam_width", "max_tokens"),
    ),
    apply=api_server.wrap_beam_search,
    fallback="the ingress does not start, for a beam search would exceed a limit",
    is_required=True,
)
STREAM_ERRORS: Final = Patch(
    name="errors in streams",
    target=_vllm("create_streaming_error_response"),
    guard=has(
        f"{_CHAT}:OpenAIServingChat.create_streaming_error_response",
        f"{_CHAT}:OpenAIServingChat.create_error_response",
        f"{_COMPLETIONS}:OpenAIServingCompletion.create_streaming_error_response",
    ),
    apply=api_server.wrap_stream_errors,
    fallback="the ingress does not start, for failed streams would count as complete",
    is_required=True,
)
ADAPTER_LIST: Final = Patch(
    name="list of adapters",
    target=_vllm("OpenAIServingModels.lora_requests"),
    guard=uses(
        "vllm.entrypoints.openai.models.serving:OpenAIServingModels.__init__", "lora_requests"
    ),
    apply=replace_attributes,
    fallback="the ingress does not start, for it would not serve adapters that are added",
    is_required=True,
)
VALIDATION_ERRORS: Final = Patch(
    name="texts of validation errors",
    target=_vllm("exception_handling.register.validation_exception_handler"),
    guard=has("vllm.entrypoints.serve.exception_handling.register:validation_exception_handler"),
    apply=api_server.replace_validation_handler,
    fallback="vLLM's own texts name its classes",
)
SERVER_HANDLE: Final = Patch(
    name="server that error handlers stop",
    target=_vllm("app.state.server"),
    guard=contains_text(
        "vllm.entrypoints.serve.exception_handling.handlers.vllm_error", "app.state.server"
    ),
    apply=api_server.set_server,
    fallback="the ingress does not start, for an error handler of a dead engine would fail",
    is_required=True,
)
LOG_REDACTION: Final = Patch(
    name="model names in logs",
    target=_vllm("log text 'Error with model %s'"),
    guard=contains_text(_CHAT, '"Error with model %s"'),
    fallback="the log has names of models as clients sent them",
)
STREAM_BYPASS: Final = Patch(
    name="bypass of plain streams",
    target=_vllm("RequestState.make_request_output", "RequestOutputCollector.output"),
    guard=all_of(
        takes_only(
            "vllm.v1.engine.output_processor:RequestState.make_request_output",
            *("self", "new_token_ids", "pooling_output", "finish_reason", "stop_reason"),
            *("kv_transfer_params", "ec_transfer_params", "error"),
        ),
        uses(
            "vllm.v1.engine.output_processor:RequestState.__init__",
            *("queue", "parent_req", "output_kind", "stream_interval", "detokenizer"),
            *("streaming_input", "logprobs_processor", "sampling_mask_chunks"),
        ),
        uses("vllm.v1.engine.output_processor:RequestOutputCollector.__init__", "output"),
        has("vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer.get_next_output_text"),
    ),
    apply=replace_attributes,
    fallback="each token of a plain stream takes vLLM's way, at more processor time",
)
REQUEST_BYPASS: Final = Patch(
    name="bypass of FastAPI's routing",
    target=Target(
        package="fastapi",
        names=("APIRoute.app", "APIRoute.dependant", "APIRoute.body_field"),
        tested=("0.136",),
    ),
    guard=all_of(
        uses("fastapi.routing:APIRoute.__init__", "app", "dependant", "body_field"),
        has_fields(
            "fastapi.dependencies.models:Dependant",
            *("path_params", "query_params", "header_params", "cookie_params", "body_params"),
            *("dependencies", "request_param_name", "response_param_name"),
            "background_tasks_param_name",
        ),
        has("vllm.entrypoints.serve.utils.api_utils:validate_json_request"),
    ),
    apply=api_server.replace_routes,
    fallback="FastAPI routes and parses each request, at more processor time",
)
RESPONSE_BYPASS: Final = Patch(
    name="bypass of middleware by chunks",
    target=_vllm("StreamingResponse in four routers"),
    guard=has(*(f"{module}:StreamingResponse" for module in api_server.ROUTERS)),
    apply=api_server.replace_streaming_responses,
    fallback="each chunk passes all layers of vLLM's app, at more processor time",
)
FAST_CHUNKS: Final = Patch(
    name="fast chunks",
    target=_vllm("classes of chunks in two handlers", "tool_calls_utils"),
    guard=has(
        f"{_COMPLETIONS}:CompletionStreamResponse",
        f"{_COMPLETIONS}:CompletionResponseStreamChoice",
        f"{_CHAT}:ChatCompletionStreamResponse",
        f"{_CHAT}:ChatCompletionResponseStreamChoice",
        "vllm.entrypoints.serve.utils.tool_calls_utils:ChatCompletionResponseStreamChoice",
    ),
    apply=api_server.replace_chunk_classes,
    fallback="pydantic validates each chunk, at more processor time",
)
TOKENIZER: Final = Patch(
    name="fast tokenizer",
    target=_vllm("BaseRenderer._tokenize_prompt", "BaseRenderer._tokenize_prompt_async"),
    guard=all_of(
        takes_only("vllm.renderers.base:BaseRenderer._tokenize_prompt", "self", "prompt", "params"),
        uses("vllm.renderers.base:BaseRenderer.__init__", "_tokenize_prompt_async", "_executor"),
    ),
    apply=replace_attributes,
    fallback="vLLM tokenizes whole prompts, and the first token comes later",
)
DETOKENIZER_TAIL: Final = Patch(
    name="detokenizer of long prompts",
    target=_vllm("OutputProcessor.add_request", "FastIncrementalDetokenizer.stream"),
    guard=all_of(
        takes("vllm.v1.engine.output_processor:OutputProcessor.add_request", "request"),
        uses("vllm.v1.engine.output_processor:OutputProcessor.__init__", "request_states"),
        uses(
            "vllm.v1.engine.detokenizer:FastIncrementalDetokenizer.__init__",
            *("stream", "tokenizer", "skip_special_tokens"),
        ),
    ),
    apply=replace_attributes,
    fallback="the first token of a long prompt stops the event loop for up to 21 ms",
)
ROUTE_NAMES: Final = Patch(
    name="cache of route names",
    target=Target(
        package="prometheus-fastapi-instrumentator",
        names=("routing.get_route_name",),
        tested=("8.1",),
    ),
    guard=takes_only(
        "prometheus_fastapi_instrumentator.routing:get_route_name",
        *("request", "should_include_root_path"),
    ),
    apply=api_server.wrap_route_names,
    fallback="each request searches its route twice, 0.15 ms of a processor",
)
METRICS_REGISTRY: Final = Patch(
    name="registry of vLLM's metrics",
    target=Target(
        package="prometheus-client", names=("REGISTRY._collector_to_names",), tested=("0.26",)
    ),
    guard=has("prometheus_client:REGISTRY._collector_to_names"),
    fallback=_NO_START,
    is_required=True,
)
RUST_PARAMS: Final = Patch(
    name="parameters from the Rust frontend",
    target=_vllm(
        "SamplingParams._validate_structured_outputs",
        "SamplingParams._bad_words_token_ids",
        "StructuredOutputsParams._backend",
    ),
    guard=all_of(
        takes_exactly(
            "vllm.sampling_params:SamplingParams._validate_structured_outputs",
            *("self", "model_config", "structured_outputs_config", "tokenizer"),
        ),
        has_fields("vllm.sampling_params:SamplingParams", "_bad_words_token_ids"),
        has_fields("vllm.sampling_params:StructuredOutputsParams", "_backend"),
    ),
    apply=replace_attributes,
    fallback="an ingress with server.api_server 'rust' does not start",
    is_required=True,
)


# ------------------------------------------------------------------ engine processes
def _resume_guard() -> str | None:
    from baton.engine.vllm.patches import resume_patch

    return resume_patch.find_incompatibility()


def _apply_resume() -> None:
    from baton.engine.vllm.patches import resume_patch

    resume_patch.apply()


def _refusals_guard() -> str | None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCoreProc

    from baton.engine.vllm.patches import refusals

    return refusals.find_incompatibility(EngineCoreProc, Scheduler)


def _apply_refusals() -> None:
    from baton.engine.vllm.patches import refusals

    refusals.apply()


def _apply_cache_report() -> None:
    from baton.engine.vllm.patches import engine_reports

    engine_reports.apply_cache_report()


def _apply_rank_reports() -> None:
    from baton.engine.vllm.patches import engine_reports

    engine_reports.apply_rank_reports()


def _step_budget_guard() -> str | None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    from baton.engine.vllm.patches import step_budget

    return step_budget.find_incompatibility(Scheduler, Request)


def _apply_step_budget(max_num_batched_tokens_while_decoding: int) -> None:
    from baton.engine.vllm.patches import step_budget

    step_budget.apply(max_num_batched_tokens_while_decoding)


RESUME: Final = Patch(
    name="resumed sampling state",
    target=_vllm(
        "Request.from_engine_core_request",
        "StructuredOutputManager._create_grammar",
        "CachedRequestState.__post_init__",
        "TopKTopPSampler.__init__",
    ),
    guard=_resume_guard,
    apply=_apply_resume,
    fallback="a resumed request is a new prompt: its seed, penalties and grammar start again",
)
REFUSALS: Final = Patch(
    name="reasons of refusals",
    target=_vllm("EngineCoreProc._handle_request_preproc_error", "Scheduler.update_from_output"),
    guard=_refusals_guard,
    apply=_apply_refusals,
    fallback="a request that is wrong is retried on other engines, within the retry budget",
)
CACHE_REPORT: Final = Patch(
    name="report of the KV cache",
    target=_vllm("EngineCore.scheduler", "EngineCore.model_executor"),
    guard=all_of(
        uses(
            "vllm.v1.engine.core:EngineCore.__init__",
            *("scheduler", "model_executor", "vllm_config"),
        ),
        has("vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager"),
    ),
    apply=_apply_cache_report,
    fallback="baton ignores the engine's KV cache events",
)
RANK_REPORTS: Final = Patch(
    name="report of transports",
    target=_vllm("WorkerBase", "EngineCore.collective_rpc"),
    guard=has(
        "vllm.v1.worker.worker_base:WorkerBase", "vllm.v1.engine.core:EngineCore.collective_rpc"
    ),
    apply=_apply_rank_reports,
    fallback="nothing says which transports the workers use",
)
STEP_BUDGET: Final = Patch(
    name="token budget beside decodes",
    target=_vllm("Scheduler.schedule", "Scheduler.max_num_scheduled_tokens"),
    guard=_step_budget_guard,
    apply=_apply_step_budget,
    fallback="an engine with max_num_batched_tokens_while_decoding does not start",
    is_required=True,
)
NIXL_CONNECTOR: Final = Patch(
    name="NIXL connector",
    target=_vllm(
        "NixlPullConnectorWorker._read_blocks",
        "NixlPullConnectorWorker._pop_done_transfers",
        "NixlPullConnectorWorker._handle_failed_transfer",
        "NixlPullConnectorScheduler._nixl_handshake_listener",
    ),
    guard=all_of(
        takes(
            f"{_NIXL}.pull_worker:NixlPullConnectorWorker._read_blocks",
            *("request_id", "dst_engine_id", "read_spec"),
        ),
        takes(f"{_NIXL}.pull_worker:NixlPullConnectorWorker._pop_done_transfers", "transfers"),
        takes(f"{_NIXL}.pull_worker:NixlPullConnectorWorker._handle_failed_transfer", "req_id"),
        takes_only(
            f"{_NIXL}.pull_scheduler:NixlPullConnectorScheduler._nixl_handshake_listener",
            *("self", "encoded_data", "ready_event", "stop_event", "host", "port"),
        ),
        has(f"{_NIXL}.stats:NixlKVConnectorStats", f"{_NIXL}.connector:NixlBaseConnector"),
    ),
    fallback="an engine that transfers KV blocks does not start",
    is_required=True,
)
LOG_HANDLERS: Final = Patch(
    name="log handlers of the process",
    target=Target(
        package="Python", names=("logging._handlerList", "logging._handlers"), tested=("3.11",)
    ),
    guard=has("logging:_handlerList", "logging:_handlers"),
    fallback="vLLM closes the log handlers of Serve, whose controller then restarts replicas",
)

PATCHES: Final = (
    ENGINE_CORE_WIRE,
    INPROCESS_CLIENT,
    CORE_OUTPUTS,
    API_SERVER,
    BEAM_SEARCH_LIMITS,
    STREAM_ERRORS,
    ADAPTER_LIST,
    VALIDATION_ERRORS,
    SERVER_HANDLE,
    LOG_REDACTION,
    STREAM_BYPASS,
    REQUEST_BYPASS,
    RESPONSE_BYPASS,
    FAST_CHUNKS,
    TOKENIZER,
    DETOKENIZER_TAIL,
    ROUTE_NAMES,
    METRICS_REGISTRY,
    RUST_PARAMS,
    RESUME,
    REFUSALS,
    CACHE_REPORT,
    RANK_REPORTS,
    STEP_BUDGET,
    NIXL_CONNECTOR,
    LOG_HANDLERS,
)
