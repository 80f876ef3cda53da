"""A study as tables of text, which the terminal and the HTML page share."""

from __future__ import annotations

from collections.abc import Callable

from baton.bench.formatting import NOTHING, number_text, seconds_text, share_text
from baton.bench.report.study import Scaling, Study, Table
from baton.bench.report.summary import (
    Share,
    Spread,
    Summary,
    capacity,
    curves_of,
    scales_of,
    shares_of,
    shown,
    summarize,
)


def tables_of(study: Study) -> tuple[Table, ...]:
    """All tables of a study, the most telling first."""
    made = list(study.tables)
    if not study.tables_of_results:
        return tuple(made)
    if study.results:
        made.append(_figures(study))
        made += _shares(study)
    if len(study.results) > len(shown(study)):
        made.append(_rates(study))
    if any(curve.points for curve in curves_of(study)):
        made.append(_capacities(study))
    if scales_of(study):
        made.append(_scales(study))
    return tuple(made)


def objectives_text(study: Study) -> str:
    """The objectives in a line, as `TTFT ≤ 500 ms, TPOT ≤ 30 ms for 90 % of requests`."""
    named = (
        ("TTFT", study.objectives.ttft_s),
        ("TPOT", study.objectives.tpot_s),
        ("E2E", study.objectives.e2e_s),
    )
    limits = [f"{name} ≤ {seconds_text(limit)}" for name, limit in named if limit is not None]
    if not limits:
        return "none"
    return f"{', '.join(limits)} for {target_text(study)} of requests"


def target_text(study: Study) -> str:
    """The target, as it was given: `90 %`, `99.9 %`."""
    return f"{100 * study.target:.6g} %"


def _figures(study: Study) -> Table:
    """One column a run, the figures below each other."""
    figures = [summarize(one, study.objectives) for one in shown(study)]
    rows = [(label, *(text(one) for one in figures)) for label, text in _lines(study)]
    title = "Figures"
    if len(study.results) > len(figures):
        title += f" at {number_text(figures[0].rate_per_s)} requests/s"
    return Table(title=title, columns=("", *(one.name for one in figures)), rows=tuple(rows))


_Line = tuple[str, Callable[[Summary], str]]


def _lines(study: Study) -> list[_Line]:
    lines: list[_Line] = [
        ("requests", lambda one: number_text(one.requests)),
        ("failed", lambda one: number_text(one.failed)),
        ("rate, requests/s", lambda one: number_text(one.rate_per_s)),
        ("TTFT p50 / p90 / p99", lambda one: _three(one.ttft)),
        ("TPOT p50 / p90 / p99", lambda one: _three(one.tpot)),
        ("worst gap p50 / p90 / p99", lambda one: _three(one.gap)),
        ("end to end p50 / p90 / p99", lambda one: _three(one.e2e)),
    ]
    if study.judged:
        lines += [
            ("attainment", lambda one: share_text(one.attainment)),
            ("  of TTFT alone / TPOT alone", lambda one: _alone(study, one)),
            ("goodput, requests/s", lambda one: number_text(one.goodput_per_s)),
            (
                f"goodput, requests/s/{study.device}",
                lambda one: number_text(one.goodput_per_device),
            ),
        ]
    return [
        *lines,
        ("output tokens/s", lambda one: number_text(one.output_tokens_per_s)),
        (
            f"output tokens/s/{study.device}",
            lambda one: number_text(one.output_tokens_per_device),
        ),
        ("all tokens/s", lambda one: number_text(one.total_tokens_per_s)),
        ("prompt tokens cached", lambda one: share_text(one.cached_share)),
        (f"{study.device}s", lambda one: number_text(one.devices)),
        *_scaling(study),
        *_counts(study),
    ]


def _scaling(study: Study) -> list[_Line]:
    """What autoscalers did, where there was one."""
    told = {one.name: one.scaling for one in shown(study)}
    if not any(told.values()):
        return []

    def line(label: str, figure: Callable[[Scaling], float]) -> _Line:
        def text(one: Summary) -> str:
            scaling = told[one.name]
            return NOTHING if scaling is None else number_text(figure(scaling))

        return label, text

    return [
        line(f"{study.device}-hours", lambda one: one.device_hours),
        line("scaling actions/h", lambda one: one.actions_per_hour),
        line("  that undo the last", lambda one: one.reversals_per_hour),
    ]


def _shares(study: Study) -> list[Table]:
    """Each class and tenant by itself, where there are several."""
    runs = {one.name: {_key(share): share for share in shares_of(one)} for one in shown(study)}
    keys = sorted({key for shares in runs.values() for key in shares})
    if len(keys) <= 1:
        return []
    rows = []
    for key in keys:
        several = [shares.get(key) for shares in runs.values()]
        requests = next(one.requests for one in several if one is not None)
        met = (NOTHING if one is None else share_text(one.attainment) for one in several)
        rows.append((*key, number_text(requests), *met))
    columns = ("class", "tenant", "requests", *runs)
    return [Table(title="Attainment by class and tenant", columns=columns, rows=tuple(rows))]


def _key(share: Share) -> tuple[str, str]:
    return share.slo_class, share.tenant


def _counts(study: Study) -> list[_Line]:
    counts = {one.name: one.counts for one in shown(study)}
    names = dict.fromkeys(name for one in counts.values() for name in one)
    return [
        (name, lambda one, name=name: number_text(counts[one.name].get(name, 0)))  # type: ignore[misc]
        for name in names
    ]


def _rates(study: Study) -> Table:
    """One row a run, the lowest rate first."""
    columns = (
        *("", "requests/s", f"/{study.device}", "failed", "TTFT p50", "p99", "TPOT p50", "p99"),
        *(("attainment", f"goodput/s/{study.device}") if study.judged else ()),
        f"tokens/s/{study.device}",
    )
    rows = []
    names = list(dict.fromkeys(one.name for one in study.results))
    figures = [summarize(one, study.objectives) for one in study.results]
    for one in sorted(figures, key=lambda one: (names.index(one.name), one.rate_per_s)):
        met = (share_text(one.attainment), number_text(one.goodput_per_device))
        rows.append(
            (
                *(one.name, number_text(one.rate_per_s), number_text(one.rate_per_device)),
                number_text(one.failed),
                *(seconds_text(one.ttft.p50), seconds_text(one.ttft.p99)),
                *(seconds_text(one.tpot.p50), seconds_text(one.tpot.p99)),
                *(met if study.judged else ()),
                number_text(one.output_tokens_per_device),
            )
        )
    return Table(title="By rate", columns=columns, rows=tuple(rows))


def _capacities(study: Study) -> Table:
    rows = []
    for curve in curves_of(study):
        found = capacity(curve, study.target)
        if found is None:
            first = curve.points[0][0] if curve.points else 0.0
            text = f"{NOTHING} (less than {number_text(first)}, the lowest rate tried)"
        elif found == curve.points[-1][0]:
            text = f"at least {number_text(found)} (the highest rate tried)"
        else:
            text = number_text(found)
        rows.append((curve.name, text))
    return Table(
        title=f"Capacity: the highest rate at which {target_text(study)} meet the objectives",
        columns=("", f"requests/s/{study.device}"),
        rows=tuple(rows),
    )


def _scales(study: Study) -> Table:
    """One row a name; curves of one study have their scales in common."""
    curves = scales_of(study)
    how = "a run for each" if study.scales else "the same run, judged by objectives times"
    return Table(
        title=f"Attainment by SLO scale: {how}",
        columns=("", *(f"{scale:g}" for scale, _ in curves[0].points)),
        rows=tuple((one.name, *(share_text(met) for _, met in one.points)) for one in curves),
    )


def _three(spread: Spread) -> str:
    texts = (seconds_text(one) for one in (spread.p50, spread.p90, spread.p99))
    return " / ".join(texts)


def _alone(study: Study, figures: Summary) -> str:
    pairs = (
        (study.objectives.ttft_s, figures.ttft_attainment),
        (study.objectives.tpot_s, figures.tpot_attainment),
    )
    return " / ".join(NOTHING if limit is None else share_text(met) for limit, met in pairs)
