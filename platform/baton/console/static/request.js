// One request: objectives, waterfall, placements.

import { h } from "./dom.js";
import { ago, DASH, objective, route, seconds, share, shortId, whole, words } from "./format.js";
import { outcomeText } from "./requests.js";
import { waterfall } from "./waterfall.js";

export function detail(ctx) {
  const { open, report } = ctx.state;
  const close = h("a", { class: "quiet close", href: "#requests", "aria-label": "Close (Esc)", title: "Close (Esc)" }, "✕");
  if (report?.id !== open || report.loading) return [close, h("p", { class: "empty" }, "Loading.")];
  if (report.error) return [close, h("h1", { class: "mono title" }, open), h("p", { class: "empty" }, report.error)];
  return [close, report.requests.map((record, at) => article(record, at, ctx))];
}

function article(record, at, ctx) {
  const [glyph, tone, text] = outcomeText(record);
  return h("article", { key: `${record.request_id} ${at}` },
    h("h1", { class: "mono title" }, record.request_id),
    h("p", { class: "sub" }, h("b", { class: tone }, `${glyph} ${text}`), ` · ${words(record.outcome)} (${record.reason}) · class ${record.slo_class} of ${record.tenant}`, record.age_s === undefined ? "" : ` · ${ago(record.age_s)}`),
    objectives(record.objectives ?? []),
    waterfall(record, ctx),
    facts(record),
    h("h2", {}, record.decisions?.length === 1 ? "Placement" : "Placements"),
    record.decisions?.length ? record.decisions.map((decision, number) => placement(decision, number, record)) : h("p", { class: "empty" }, "The request was not placed."),
    (record.resume_reasons ?? []).slice(Math.max(0, (record.decisions?.length ?? 0) - 1)).map((reason) => h("p", { class: "warn" }, `not placed again after: ${words(reason)}`)),
  );
}

function objectives(rows) {
  if (!rows.length) return h("p", { class: "faint" }, "Its class has no objectives.");
  return h("div", { class: "objectives" }, h("p", { class: "legend" }, h("span", {}, h("i", { class: "key-line", "aria-hidden": "true" }), "objective")), rows.map((row) => {
    const used = row.actual_s === null ? null : row.actual_s / row.objective_s;
    return h("div", { key: row.objective, class: "objective-row" },
      h("span", { class: "meter-name" }, row.objective.toUpperCase()),
      h("span", { class: "track limit" }, h("i", { class: row.met ? "fill good-fill" : "fill bad-fill", style: { width: `${used === null ? 0 : Math.min(100, used * 66.67).toFixed(1)}%` } })),
      h("span", { class: `n ${row.met ? "" : "bad"}` }, row.actual_s === null ? "no token" : seconds(row.actual_s), h("span", { class: "faint" }, `${row.actual_s === null ? ", objective" : " of"} ${objective(row.objective_s)}`), row.met ? "" : " ✕"),
    );
  }));
}

function facts(record) {
  const cached = record.cached_tokens === null || record.cached_tokens === undefined ? "unknown" : whole(record.cached_tokens);
  const items = [
    ["prompt", `${whole(record.prompt_tokens)} tokens`], ["cached", cached], ["output", `${whole(record.output_tokens)} tokens`],
    ["per token", seconds(record.tpot_s)], ["longest gap", seconds(record.worst_gap_s)], ["handed off", `${whole(record.handed_off_blocks)} blocks`],
    ["resumes", whole(record.resumes)], ["device time", seconds(record.gpu_s)],
  ];
  if (record.trace_id) items.push(["trace", record.trace_id]);
  return h("dl", { class: "facts wide-facts" }, items.map(([name, value]) => h("div", { key: name }, h("dt", {}, name), h("dd", {}, value))));
}

function placement(decision, number, record) {
  const many = record.decisions.length > 1;
  const because = number ? record.resume_reasons?.[number - 1] : null;
  const changed = route(decision.route, shortId) !== route(decision.became, shortId);
  return h("div", { class: "placement", key: String(number) },
    many ? h("h3", {}, `${number + 1} of ${record.decisions.length}`, because ? h("span", { class: "faint" }, `, because ${words(because)}`) : null) : null,
    h("p", {}, h("b", { class: "mono" }, route(decision.route, shortId)), ` ${words(decision.reason)}`, h("span", { class: "faint" }, ` · policy ${decision.policy}, ${seconds(decision.decided_s)} after arrival`)),
    changed ? h("p", { class: "warn" }, `changed to ${route(decision.became, shortId)}, ${words(decision.became.reason)}`) : null,
    decision.options?.length ? options(decision) : h("p", { class: "faint" }, "This policy makes no predictions, so there are no candidates to compare."),
    h("p", { class: "faint" }, prediction(decision)),
  );
}

function options(decision) {
  const loads = decision.options.some((option) => option.load_s);
  const names = ["", "Runs on", "Cost", "Interference", "TTFT", "= Queue", ...(loads ? ["+ Load"] : []), "+ Prefill", "+ Transfer", "+ Decode", "Cached"];
  return h("div", { class: "scroll" }, h("table", { class: "options" },
    h("caption", {}, `Best ${decision.options.length} of ${whole(decision.considered)} candidates, by cost`),
    h("thead", {}, h("tr", {}, names.map((name, at) => h("th", { scope: "col", class: at > 1 ? "n" : "" }, name)))),
    h("tbody", {}, decision.options.map((option, at) => h("tr", { key: String(at), class: option.chosen ? "on" : "" },
      h("td", { class: "good" }, option.chosen ? h("span", { role: "img", "aria-label": "chosen" }, "●") : ""),
      h("th", { scope: "row", class: "mono" }, route(option, shortId)),
      ["cost_s", "harm_s", "ttft_s", "queue_s", ...(loads ? ["load_s"] : []), "prefill_s", "transfer_s", "decode_s"].map((name) => h("td", { key: name, class: `n ${name === "ttft_s" || name === "cost_s" ? "strong" : ""}` }, seconds(option[name]))),
      h("td", { class: "n" }, option.hit_tokens ? `${whole(option.hit_tokens)} ${option.hit_source}` : "none"),
    ))),
  ));
}

function prediction(decision) {
  const actual = decision.actual_ttft_s === null ? "no first token" : `actual ${seconds(decision.actual_ttft_s)}`;
  const predicted = decision.predicted_ttft_s === null ? DASH : seconds(decision.predicted_ttft_s);
  const error = decision.ttft_error_fraction;
  const off = error === null ? "" : `, predicted ${share(Math.abs(error), 0)} too ${error > 0 ? "long" : "short"}`;
  return `Remaining TTFT: predicted ${predicted}, ${actual}${off}`;
}

