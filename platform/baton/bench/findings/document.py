"""What a benchmark found, as one document and as tables and plots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from baton.bench.findings.campaign import Findings
from baton.bench.findings.metrics import Promise
from baton.bench.findings.tables import over_repeats, tables_of
from baton.bench.formatting import share_text
from baton.bench.report.json_report import finite
from baton.bench.report.study import Curve, Evidence, Result, Study
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
class Background:
    """What is known of a benchmark beside its runs."""

    title: str
    command: str
    endpoint: str
    model: str
    load: Mapping[str, object]
    provenance: Mapping[str, object]
    promise: Promise
    notes: tuple[str, ...] = ()


# ------------------------------------------------------------------ one document
def document(findings: Findings, background: Background) -> dict[str, object]:
    """All that was found, without single requests; what is no number is null."""
    promise = background.promise
    whole: dict[str, object] = {
        "schema_version": SCHEMA_VERSION,
        "kind": "bench",
        "valid": not findings.invalid and bool(findings.runs),
        "why_invalid": list(findings.invalid),
        "partial": findings.partial,
        "provenance": {
            "evidence": "measured",
            "command": background.command,
            "endpoint": background.endpoint,
            "model": background.model,
            **background.provenance,
        },
        "load": dict(background.load),
        "objectives": {
            "target": promise.target,
            "classes": {name: asdict(one) for name, one in promise.objectives.items()},
        },
        "levels": [
            {
                "level": level,
                "rate_per_s": runs[0].rate_per_s,
                "streams": runs[0].streams,
                "repeats": len(runs),
                "figures": {name: asdict(one) for name, one in over_repeats(runs).items()},
            }
            for level, runs in findings.levels().items()
        ],
        "knee": None if findings.knee is None else asdict(findings.knee),
        "runs": [
            {
                "level": run.level,
                "rate_per_s": run.rate_per_s,
                "streams": run.streams,
                "repeat": run.repeat,
                "window_s": run.figures.window_s,
                **asdict(run.figures),
            }
            for run in findings.runs
        ],
        "definitions": list(DEFINITIONS),
        "notes": [*background.notes, *_notes(findings)],
    }
    return {key: finite(value) for key, value in whole.items()}


def request_lines(findings: Findings) -> Iterable[dict[str, object]]:
    """Every measured request, one object each; gaps are left out but the longest."""
    for run in findings.runs:
        for one in run.samples:
            yield {
                "level": run.level,
                "repeat": run.repeat,
                "number": one.number,
                "due_s": one.due_s,
                "late_s": one.late_s,
                "ttft_s": finite(one.ttft_s),
                "tpot_s": one.tpot_s,
                "e2e_s": one.e2e_s,
                "worst_gap_s": max(one.gaps_s, default=0.0),
                "prompt_tokens": one.prompt_tokens,
                "cached_tokens": one.cached_tokens,
                "output_tokens": one.output_tokens,
                "slo_class": one.slo_class,
                "ok": one.ok,
                "failure": one.failure,
            }


# ------------------------------------------------------------------ tables and plots
def study_of(findings: Findings, background: Background) -> Study:
    """The same as a study, for people."""
    promise = background.promise
    levels = findings.levels()
    one_class = set(promise.objectives) <= {DEFAULT_CLASS}
    curve = Curve(
        name=background.model,
        points=tuple(
            (runs[0].rate_per_s, mean([run.figures.attainment for run in runs]))
            for runs in levels.values()
            if runs[0].rate_per_s is not None
        ),
    )
    return Study(
        title=background.title,
        evidence=Evidence.MEASURED,
        command=background.command,
        facts=_facts(findings, background),
        notes=(*background.notes, *_notes(findings)),
        objectives=promise.objectives.get(DEFAULT_CLASS, Objectives())
        if one_class
        else Objectives(),
        target=promise.target,
        device="endpoint",
        results=tuple(
            Result(
                name=background.model if runs[0].streams is None else level,
                outcomes=[one.outcome(runs[0].figures.from_s) for one in runs[0].samples],
                devices=1,
                offered_per_s=runs[0].rate_per_s,
            )
            for level, runs in levels.items()
        ),
        curves=(curve,) if promise.made and len(curve.points) > 1 else (),
        tables=tuple(tables_of(findings, promise)),
        tables_of_results=False,
        definitions=DEFINITIONS,
    )


def _facts(findings: Findings, background: Background) -> dict[str, str]:
    verdict = "yes" if not findings.invalid else "NO: " + "; ".join(findings.invalid[:3])
    facts = {
        "valid": verdict,
        "endpoint": background.endpoint,
        "model": background.model,
        **{name: str(value) for name, value in background.load.items() if value is not None},
    }
    if findings.partial:
        facts = {"partial": "stopped before its end: what had ended by then"} | facts
    return facts


def _notes(findings: Findings) -> Iterable[str]:
    """What a reader must know to judge the figures."""
    told = [run.figures for run in findings.runs]
    counted = (
        (sum(one.abandoned for one in told), "requests were left when the run was stopped."),
        (sum(one.dropped_turns for one in told), "turns were not asked: one before them failed."),
        (sum(one.clipped_prompts for one in told), "prompts were cut to what the endpoint takes."),
        (sum(one.too_long for one in told), "requests were left out: their output is too long."),
        (sum(one.short_answers for one in told), "answers ended before the asked length."),
        (
            sum(one.other_lengths for one in told),
            "prompts had, as the endpoint counts, another length than was asked for.",
        ),
    )
    yield from (f"{number} {what}" for number, what in counted if number)
    cached, prompts = (
        sum(one.cached_tokens for one in told),
        sum(one.prompt_tokens for one in told),
    )
    if cached and prompts:
        yield (
            f"{share_text(cached / prompts)} of the prompts' tokens were cached, the endpoint says;"
            " another --seed makes other prompts."
        )
    tails = [
        1 - (max(one.due_s for one in run.samples) - run.figures.from_s) / run.figures.window_s
        for run in findings.runs
        if run.samples and run.figures.window_s and run.streams is None
    ]
    if max(tails, default=0.0) > _LONG_TAIL:
        yield (
            f"Up to {max(tails):.0%} of a run's window is after its last request was due: rates per"
            " second are means over all of it; a longer run has higher ones."
        )


_LONG_TAIL = 0.2
