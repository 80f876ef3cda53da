"""Type-check the dashboards against Grafana's own schema: `python -m tests.dashboards.typecheck`.

What is checked: each dashboard against `Dashboard`, each panel against `Panel`, each query against
`DataQuery`, and each panel's options and field settings against those of its kind. Keys that the
schema does not have and values that it does not allow are errors. Keys of options may be missing,
since Grafana fills them in. Not reached: queries' own keys of Prometheus' data source (the schema
does not have them), transformations' options and overrides' values (it takes anything there).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.dashboards.pages import GET_TOOLS, TOOLS, Page, pages

NODE = TOOLS / "node"
TSC = NODE / "node_modules" / ".bin" / "tsc"
_KINDS = {
    "timeseries": "timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen",
    "stat": "stat/panelcfg/x/StatPanelCfg_types.gen",
    "bargauge": "bargauge/panelcfg/x/BarGaugePanelCfg_types.gen",
    "table": "table/panelcfg/x/TablePanelCfg_types.gen",
    "heatmap": "heatmap/panelcfg/x/HeatmapPanelCfg_types.gen",
}
_WITHOUT_FIELDS = frozenset({"stat", "bargauge"})
"""Kinds that have no field settings of their own."""
# Enumerations are written by their values in JSON.
_HEAD = """
import type { Dashboard, DataQuery, Panel, RowPanel } from "@grafana/schema";
type Json<T> = unknown extends T ? T
  : T extends string ? `${T}`
  : T extends number | boolean | null | undefined ? T
  : T extends (infer U)[] ? Json<U>[]
  : T extends object ? { [K in keyof T]: Json<T[K]> } : T;
type Part<T> = unknown extends T ? T
  : T extends string ? `${T}`
  : T extends number | boolean | null | undefined ? T
  : T extends (infer U)[] ? Part<U>[]
  : T extends object ? { [K in keyof T]?: Part<T[K]> } : T;
type Query = DataQuery & { [key: string]: unknown };
"""
_ERROR = re.compile(r"^check\.ts\((?P<line>\d+),\d+\): error (?P<text>.*)$")


def main() -> int:
    """0 when every dashboard fits."""
    if not TSC.exists():
        sys.stderr.write(f"typecheck: no TypeScript compiler in .tools, {GET_TOOLS}\n")
        return 2
    errors = mismatches(pages())
    for mismatch in errors:
        sys.stderr.write(f"{mismatch}\n")
    checked = sum(1 for page in pages() for _ in page["panels"])
    sys.stderr.write(f"typecheck: {checked} panels and rows, {len(errors)} errors\n")
    return 1 if errors else 0


def mismatches(dashboards: Iterable[Page]) -> list[str]:
    """What does not fit the schema, with the dashboard and the panel."""
    head = _HEAD + "".join(_imports())
    first = head.count("\n") + 1
    claims = [claim for page in dashboards for claim in _declarations(page)]
    text = head + "".join(f"export const c{n}: {code};\n" for n, (_, code) in enumerate(claims))
    errors = []
    for line in _compile(text).splitlines():
        match = _ERROR.match(line)
        if match is None:
            if line.startswith((" ", "\t")):
                continue  # what follows explains the line before
            errors.append(line)
            continue
        index = int(match["line"]) - first
        location = claims[index][0] if 0 <= index < len(claims) else "the check itself"
        errors.append(f"{location}: {match['text']}")
    return errors


def _imports() -> Iterator[str]:
    for kind, module in _KINDS.items():
        path = f"@grafana/schema/dist/esm/raw/composable/{module}"
        names = f"Options as {kind}Options"
        if kind not in _WITHOUT_FIELDS:
            names += f", FieldConfig as {kind}Fields"
        yield f'import type {{ {names} }} from "{path}";\n'


def _declarations(page: Page) -> Iterator[tuple[str, str]]:
    """Where it is, and a TypeScript declaration without its name."""
    title = page["title"]
    yield title, _declaration("Json<Dashboard>", {**page, "panels": []})
    for panel in page["panels"]:
        location = f"{title}: panel {panel['title']!r}"
        if panel["type"] == "row":
            yield location, _declaration("Json<RowPanel>", panel)
            continue
        yield location, _declaration("Json<Panel>", {**panel, "targets": []})
        kind = panel["type"]
        yield f"{location}: options", _declaration(f"Part<{kind}Options>", panel.get("options", {}))
        fields = panel["fieldConfig"]["defaults"].get("custom", {})
        if kind in _WITHOUT_FIELDS:
            yield f"{location}: fields", _declaration("Record<string, never>", fields)
        else:
            yield f"{location}: fields", _declaration(f"Part<{kind}Fields>", fields)
        for target in panel["targets"]:
            yield f"{location}: query {target['refId']}", _declaration("Query", target)


def _declaration(kind: str, value: object) -> str:
    return f"{kind} = {json.dumps(value)}"


def _compile(text: str) -> str:
    """What the compiler says."""
    # Below node_modules' own folder, since that is where packages are looked for.
    with tempfile.TemporaryDirectory(dir=NODE) as folder:
        (Path(folder) / "check.ts").write_text(text)
        command = [
            str(TSC), "--noEmit", "--strict", "--skipLibCheck", "--target", "es2022",
            "--module", "esnext", "--moduleResolution", "bundler", "--pretty", "false", "check.ts",
        ]  # fmt: skip
        process = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=300, check=False
        )
    return process.stdout + process.stderr


if __name__ == "__main__":
    raise SystemExit(main())
