// The time of a request, in order: one bar for each part, on one axis.

import { h } from "./dom.js";
import { objective as axisText, seconds, shortId, words } from "./format.js";

const PARTS = new Set(["ingress_wait", "lost", "queue", "prefill", "transfer", "decode"]);

export function waterfall(record, ctx) {
  const bars = record.waterfall ?? [];
  const first = typeof record.first_token_s === "number" ? record.first_token_s : null;
  const end = bars.at(-1)?.to_s ?? 0;
  if (!bars.length || end <= 0) return h("p", { class: "empty" }, "No timing is known.");
  const all = ctx.state.whole || first === null || first <= 0;
  const span = all ? end : first * 1.08;
  const objective = (record.objectives ?? []).find((row) => row.objective === "ttft")?.objective_s ?? null;
  return h("figure", { class: "waterfall", "data-end": end, key: "waterfall" },
    h("figcaption", {},
      h("h2", {}, "Time by part"),
      first === null ? null : h("div", { class: "segments small", role: "group", "aria-label": "Axis" },
        h("button", { type: "button", "aria-pressed": all ? "false" : "true", on: { click: () => ctx.set({ whole: false }) } }, "until the first token"),
        h("button", { type: "button", "aria-pressed": all ? "true" : "false", "aria-keyshortcuts": "z", on: { click: () => ctx.set({ whole: true }) } }, "all of it")),
    ),
    h("ol", { class: "bars" }, bars.map((bar, at) => row(bar, at, span)), axis(span, first, objective)),
    h("p", { class: "legend" },
      bars.some((bar) => typeof bar.predicted_s === "number") ? h("span", { key: "predicted" }, h("i", { class: "key-box", "aria-hidden": "true" }), "predicted") : null,
      first === null || first > span ? null : h("span", { key: "first" }, h("i", { class: "key-line", "aria-hidden": "true" }), "first token"),
      objective === null || objective > span ? null : h("span", { key: "objective" }, h("i", { class: "key-line objective", "aria-hidden": "true" }), "TTFT objective"),
      bars.some((bar) => bar.guessed) ? h("span", { key: "guessed" }, h("i", { class: "key-stripes", "aria-hidden": "true" }), "predicted, not reported by the engine") : null),
    h("p", { class: "total" }, "ended after ", h("b", { "data-test": "e2e", "data-seconds": record.ended_s ?? end }, seconds(record.ended_s ?? end)), first === null ? ", without a first token" : [", first token after ", h("b", { "data-test": "first", "data-seconds": first }, seconds(first))]),
  );
}

function row(bar, at, span) {
  const took = bar.to_s - bar.from_s;
  const beyond = bar.from_s >= span;
  const cut = !beyond && bar.to_s > span * 1.0001;
  const width = beyond ? 0 : ((Math.min(bar.to_s, span) - bar.from_s) / span) * 100;
  const part = PARTS.has(bar.part) ? bar.part : "lost";
  return h("li", { key: String(at), "data-test": "bar", "data-seconds": took },
    h("span", { class: "bar-name" }, h("i", { class: `part ${part}`, "aria-hidden": "true" }), words(part), bar.replica ? h("span", { class: "faint mono cut", title: bar.replica }, shortId(bar.replica)) : null),
    h("span", { class: "lane" },
      bar.predicted_s === null || bar.predicted_s === undefined || beyond ? null : h("i", { class: "predicted", title: `predicted ${seconds(bar.predicted_s)}`, style: place(bar.from_s, bar.predicted_s, span) }),
      h("i", { class: `part bar ${part} ${cut ? "cut-off" : ""} ${bar.guessed ? "guessed" : ""}`, title: bar.guessed ? "not reported by the engine: its boundary is predicted" : null, style: { left: `${Math.min(100, (bar.from_s / span) * 100).toFixed(3)}%`, width: `${width.toFixed(3)}%` } })),
    h("span", { class: "n bar-value" }, seconds(took)),
  );
}

const place = (from, took, span) => ({ left: `${((from / span) * 100).toFixed(3)}%`, width: `${Math.min(100 - (from / span) * 100, (took / span) * 100).toFixed(3)}%` });

function axis(span, first, objective) {
  const marks = [];
  if (first !== null && first <= span) marks.push(["first", first, "first token"]);
  if (objective !== null && objective <= span) marks.push(["objective", objective, "TTFT objective"]);
  return h("li", { class: "axis", "aria-hidden": "true" }, h("span", {}), h("span", { class: "lane" },
    ticks(span).map((at) => h("span", { key: `t${at}`, class: "tick", style: { left: `${(at / span) * 100}%` } }, at === 0 ? "0" : axisText(at))),
    marks.map(([kind, at, text]) => h("span", { key: kind, class: `marker ${kind}`, style: { left: `${(at / span) * 100}%` }, title: `${text} ${seconds(at)}` })),
  ), h("span", {}));
}

/** Round numbers, about four of them. */
function ticks(span) {
  const raw = span / 4;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw) ?? raw;
  const out = [];
  for (let at = 0; at < span * 0.97; at += step) out.push(Number(at.toPrecision(6)));
  return out;
}
