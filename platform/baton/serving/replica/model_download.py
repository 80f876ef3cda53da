"""Downloads hub models to the node of a replica or an ingress before they load."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from baton.config.derive.options import model_loading_arguments
from baton.config.derive.start_deadlines import start_deadline_s
from baton.config.schema.deployment import DeploymentConfig, ModelConfig
from baton.domain.errors import EngineStartFailed
from baton.domain.names.model_sources import hub_id, is_on_hub
from baton.engine import hub_fetch
from baton.engine.hub_fetch import FetchRequest
from baton.runtime.process.owned_process import OwnedProcess, Program
from baton.runtime.process.scratch import scratch_folder
from baton.serving.replica.start_reports import StartReporter

_POLL_S: Final = 1.0
_GRACE_S: Final = 3.0
_INGRESS_DEADLINE_S: Final = 600.0
"""For the files of an API server: megabytes."""
_MODELSCOPE_VARIABLE: Final = "VLLM_USE_MODELSCOPE"
_MB: Final = 1_000_000
_GB: Final = 1_000_000_000


async def fetch_for_engine(
    config: DeploymentConfig,
    pool_name: str,
    environment: Mapping[str, str],
    reporter: StartReporter,
) -> None:
    """Download the files of a pool's engine to this node; replicas of a node share them.

    `environment` extends that of this process for the engine's processes.

    Raises:
        EngineStartFailed: the download failed.
    """
    pool = config.pools[pool_name]
    model = config.models[pool.model]
    if not _needs_fetch(model):
        return
    arguments = model_loading_arguments(model) | dict(pool.engine.extra)
    folder = arguments.get("download_dir")
    order = FetchRequest(
        repository=hub_id(model.source),
        revision=model.revision,
        needs_weights=True,
        load_format=str(arguments.get("load_format", "auto")),
        folder=None if folder is None else str(folder),
    )
    await fetch(order, environment, reporter, deadline_s=start_deadline_s(pool, model))


async def fetch_for_ingress(model: ModelConfig, reporter: StartReporter) -> None:
    """Download the files of a model's API server to this node; see `fetch` for errors."""
    if _needs_fetch(model):
        order = FetchRequest(
            repository=hub_id(model.source), revision=model.revision, needs_weights=False
        )
        await fetch(order, {}, reporter, deadline_s=_INGRESS_DEADLINE_S)


def _needs_fetch(model: ModelConfig) -> bool:
    return is_on_hub(model.source) and not Path(model.source).is_dir()


async def fetch(
    order: FetchRequest,
    environment: Mapping[str, str],
    reporter: StartReporter,
    *,
    deadline_s: float,
) -> None:
    """Run the download process and report its progress until it ends.

    Raises:
        EngineStartFailed: it failed, or exceeded the deadline.
    """
    if environment.get(_MODELSCOPE_VARIABLE) or os.environ.get(_MODELSCOPE_VARIABLE):
        return  # vLLM downloads from there by itself
    folder = await asyncio.to_thread(scratch_folder, "baton-fetch-")
    try:
        async with asyncio.timeout(deadline_s):
            await _run_fetch(order, environment, folder, reporter)
    except TimeoutError:
        raise EngineStartFailed(
            f"model {order.repository} had not come after {deadline_s:.0f} s",
            "downloaded files are kept, so try again; or give it longer with engine.start_deadline",
        ) from None
    except EngineStartFailed as error:
        await asyncio.to_thread(reporter.failed, error)
        raise
    finally:
        await asyncio.to_thread(reporter.done)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


async def _run_fetch(
    order: FetchRequest, environment: Mapping[str, str], folder: Path, reporter: StartReporter
) -> None:
    report, ended = folder / "report", asyncio.Event()
    order_with_report = FetchRequest(**{**json.loads(order.to_json()), "report_file": str(report)})
    process = OwnedProcess(
        Program(
            name="hub-fetch",
            argv=(sys.executable, "-m", hub_fetch.__name__, order_with_report.to_json()),
            log=folder / "log",
            environment={
                "HF_HUB_DISABLE_PROGRESS_BARS": "1",
                "HF_HUB_DISABLE_TELEMETRY": "1",
                **environment,
            },
        ),
        on_exit=lambda _code: ended.set(),
    )
    process.start()
    try:
        while not ended.is_set():
            await asyncio.to_thread(_report_progress, order, report, reporter)
            await _wait_for(ended, _POLL_S)
        result = await asyncio.to_thread(_read_report, report)
    finally:
        await process.stop(grace_s=_GRACE_S)
    if not result.get("ended"):
        output_lines = (await asyncio.to_thread(process.tail)).splitlines()
        raise EngineStartFailed(
            f"model {order.repository}: its download process has died:"
            f" {(output_lines or ['killed'])[-1]}",
            "try again; downloaded files are kept",
        )
    if (reason := result.get("trouble")) is not None:
        assert isinstance(reason, list), "a reason and a remedy"
        raise EngineStartFailed(*reason)


def _report_progress(order: FetchRequest, report: Path, reporter: StartReporter) -> None:
    progress = _read_report(report)
    done, total = progress.get("done"), progress.get("total")
    if not isinstance(done, int) or not isinstance(total, int):
        reporter.progress(f"asking the hub for {order.repository}")
    elif done < total:
        reporter.progress(f"downloading {order.repository}: {progress_text(done, total)}")


def progress_text(done_bytes: int, total_bytes: int) -> str:
    """`3.1 of 16.1 GB`."""
    unit, name = (_GB, "GB") if total_bytes >= _GB else (_MB, "MB")
    return f"{done_bytes / unit:.1f} of {total_bytes / unit:.1f} {name}"


def _read_report(report: Path) -> dict[str, object]:
    try:
        fields: dict[str, object] = json.loads(report.read_text())
    except FileNotFoundError:
        return {}
    return fields


async def _wait_for(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
