"""What a benchmark found, as one document and as tables and plots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from baton.bench.findings.campaign import BenchmarkResult
from baton.bench.findings.metrics import SloObjectives
from baton.bench.findings.tables import intervals_over_repeats, tables_of
from baton.bench.formatting import format_percent
from baton.bench.report.json_report import json_safe
from baton.bench.report.study import Curve, Evidence, RunResult, Study
from baton.policy.admission.slo_classes import DEFAULT_CLASS
from baton.simulator.outcome import Objectives, mean

SCHEMA_VERSION = 1
"""Counted up when a key changes its meaning or goes away."""

DEFINITIONS = (
    "TTFT: from when a request was due to its first token. End to end: from then to its last"
    " token. A request that was sent late has waited, as its user would have; `vllm bench serve`"
    " counts from when it was sent, as do the lines 'from send'.",
    "TPOT: (last token - first token) / (output tokens - 1), per request, over requests with two"
    " tokens and more; output tokens as the endpoint counted them. ITL: the gaps between pieces of"
    " an answer, of all answers together; a piece may be several tokens. As in `vllm bench serve`.",
    "Quantiles are over requests that finished. Attainment: the share of all measured requests"
    " that finished and met all objectives; goodput: such requests per second. Both count failed"
    " requests as misses.",
    "Rates per second are over the measured window, from when its first request was due to the end"
    " of its last answer. `vllm bench serve` counts from the start of its run, one gap earlier.",
    "Of a chat, a message that only names the role, or only ends the answer, is no token;"
    " `vllm bench serve` takes the former for the first.",
    "± is half of Student's 95 % interval of the mean over repeats; one run alone has none.",
)


@dataclass(frozen=True, slots=True)
class BenchmarkContext:
    """What is known of a benchmark beside its runs."""

    title: str
    command: str
    endpoint: str
    model: str
    load: Mapping[str, object]
    provenance: Mapping[str, object]
    slo: SloObjectives
    notes: tuple[str, ...] = ()


# ------------------------------------------------------------------ one document
def build_document(result: BenchmarkResult, context: BenchmarkContext) -> dict[str, object]:
    """All that was found, without single requests; what is no number is null."""
    slo = context.slo
    document: dict[str, object] = {
        "schema_version": SCHEMA_VERSION,
        "kind": "bench",
        "valid": not result.invalid_reasons and bool(result.runs),
        "why_invalid": list(result.invalid_reasons),
        "partial": result.is_partial,
        "provenance": {
            "evidence": "measured",
            "command": context.command,
            "endpoint": context.endpoint,
            "model": context.model,
            **context.provenance,
        },
        "load": dict(context.load),
        "objectives": {
            "target": slo.target,
            "classes": {name: asdict(objectives) for name, objectives in slo.objectives.items()},
        },
        "levels": [
            {
                "level": level,
                "rate_per_s": runs[0].rate_per_s,
                "streams": runs[0].concurrency,
                "repeats": len(runs),
                "figures": {
                    name: asdict(interval)
                    for name, interval in intervals_over_repeats(runs).items()
                },
            }
            for level, runs in result.runs_by_load().items()
        ],
        "knee": None if result.knee is None else asdict(result.knee),
        "runs": [
            {
                "level": run.load_label,
                "rate_per_s": run.rate_per_s,
                "streams": run.concurrency,
                "repeat": run.repeat,
                "window_s": run.metrics.window_s,
                **asdict(run.metrics),
            }
            for run in result.runs
        ],
        "definitions": list(DEFINITIONS),
        "notes": [*context.notes, *_notes(result)],
    }
    return {key: json_safe(value) for key, value in document.items()}


def request_lines(result: BenchmarkResult) -> Iterable[dict[str, object]]:
    """Every measured request, one object each; gaps are left out but the longest."""
    for run in result.runs:
        for sample in run.samples:
            yield {
                "level": run.load_label,
                "repeat": run.repeat,
                "number": sample.request_index,
                "due_s": sample.due_s,
                "late_s": sample.send_delay_s,
                "ttft_s": json_safe(sample.ttft_s),
                "tpot_s": sample.tpot_s,
                "e2e_s": sample.e2e_s,
                "worst_gap_s": max(sample.gaps_s, default=0.0),
                "prompt_tokens": sample.prompt_tokens,
                "cached_tokens": sample.cached_tokens,
                "output_tokens": sample.output_tokens,
                "slo_class": sample.slo_class,
                "ok": sample.ok,
                "failure": sample.failure,
            }


# ------------------------------------------------------------------ tables and plots
def build_study(result: BenchmarkResult, context: BenchmarkContext) -> Study:
    """The same as a study, for people."""
    slo = context.slo
    levels = result.runs_by_load()
    has_default_class_only = set(slo.objectives) <= {DEFAULT_CLASS}
    curve = Curve(
        name=context.model,
        points=tuple(
            (runs[0].rate_per_s, mean([run.metrics.attainment for run in runs]))
            for runs in levels.values()
            if runs[0].rate_per_s is not None
        ),
    )
    return Study(
        title=context.title,
        evidence=Evidence.MEASURED,
        command=context.command,
        facts=_facts(result, context),
        notes=(*context.notes, *_notes(result)),
        objectives=slo.objectives.get(DEFAULT_CLASS, Objectives())
        if has_default_class_only
        else Objectives(),
        target=slo.target,
        device="endpoint",
        results=tuple(
            RunResult(
                name=context.model if runs[0].concurrency is None else level,
                outcomes=[
                    sample.to_outcome(runs[0].metrics.window_start_s) for sample in runs[0].samples
                ],
                devices=1,
                offered_per_s=runs[0].rate_per_s,
            )
            for level, runs in levels.items()
        ),
        rate_curves=(curve,) if slo.has_objectives and len(curve.points) > 1 else (),
        tables=tuple(tables_of(result, slo)),
        has_result_tables=False,
        definitions=DEFINITIONS,
    )


def _facts(result: BenchmarkResult, context: BenchmarkContext) -> dict[str, str]:
    verdict = (
        "yes" if not result.invalid_reasons else "NO: " + "; ".join(result.invalid_reasons[:3])
    )
    facts = {
        "valid": verdict,
        "endpoint": context.endpoint,
        "model": context.model,
        **{name: str(value) for name, value in context.load.items() if value is not None},
    }
    if result.is_partial:
        facts = {"partial": "stopped before its end: what had ended by then"} | facts
    return facts


def _notes(result: BenchmarkResult) -> Iterable[str]:
    """What a reader must know to judge the figures."""
    metrics = [run.metrics for run in result.runs]
    counted_notes = (
        (
            sum(metric.unfinished for metric in metrics),
            "requests were left when the run was stopped.",
        ),
        (
            sum(metric.dropped_turns for metric in metrics),
            "turns were not asked: one before them failed.",
        ),
        (
            sum(metric.truncated_prompts for metric in metrics),
            "prompts were cut to what the endpoint takes.",
        ),
        (
            sum(metric.skipped_too_long for metric in metrics),
            "requests were left out: their output is too long.",
        ),
        (sum(metric.short_answers for metric in metrics), "answers ended before the asked length."),
        (
            sum(metric.prompt_length_mismatches for metric in metrics),
            "prompts had, as the endpoint counts, another length than was asked for.",
        ),
    )
    yield from (f"{number} {what}" for number, what in counted_notes if number)
    cached, prompts = (
        sum(metric.cached_tokens for metric in metrics),
        sum(metric.prompt_tokens for metric in metrics),
    )
    if cached and prompts:
        yield (
            f"{format_percent(cached / prompts)} of the prompts' tokens were cached, the"
            " endpoint says;"
            " another --seed makes other prompts."
        )
    tail_fractions = [
        1
        - (max(sample.due_s for sample in run.samples) - run.metrics.window_start_s)
        / run.metrics.window_s
        for run in result.runs
        if run.samples and run.metrics.window_s and run.concurrency is None
    ]
    if max(tail_fractions, default=0.0) > _LONG_TAIL_FRACTION:
        yield (
            f"Up to {max(tail_fractions):.0%} of a run's window is after its last request was"
            " due: rates per"
            " second are means over all of it; a longer run has higher ones."
        )


_LONG_TAIL_FRACTION = 0.2
