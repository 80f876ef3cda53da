// All of one request: objectives, waterfall, placements.

import { h } from "./dom.js";
import { ago, DASH, promised, route, seconds, share, shortId, whole, words } from "./format.js";
import { verdictText } from "./requests.js";
import { waterfall } from "./waterfall.js";

export function detail(ctx) {
  const { open, story } = ctx.state;
  const close = h("a", { class: "quiet close", href: "#requests", "aria-label": "Close (Esc)", title: "Close (Esc)" }, "✕");
  if (story?.id !== open || story.loading) return [close, h("p", { class: "empty" }, "Asking the ingresses.")];
  if (story.why) return [close, h("h1", { class: "mono title" }, open), h("p", { class: "empty" }, story.why)];
  return [close, story.requests.map((told, at) => one(told, at, ctx))];
}

function one(told, at, ctx) {
  const [glyph, tone, text] = verdictText(told);
  return h("article", { key: `${told.request_id} ${at}` },
    h("h1", { class: "mono title" }, told.request_id),
    h("p", { class: "sub" }, h("b", { class: tone }, `${glyph} ${text}`), ` · ${words(told.outcome)} (${told.reason}) · class ${told.slo_class} of ${told.tenant}`, told.age_s === undefined ? "" : ` · ${ago(told.age_s)}`),
    promises(told.objectives ?? []),
    waterfall(told, ctx),
    facts(told),
    h("h2", {}, told.decisions?.length === 1 ? "Placement" : "Placements"),
    told.decisions?.length ? told.decisions.map((made, number) => placement(made, number, told)) : h("p", { class: "empty" }, "It was never placed."),
    (told.resume_reasons ?? []).slice(Math.max(0, (told.decisions?.length ?? 0) - 1)).map((why) => h("p", { class: "warn" }, `not placed again after: ${words(why)}`)),
  );
}

function promises(rows) {
  if (!rows.length) return h("p", { class: "faint" }, "Its class has no objectives.");
  return h("div", { class: "promises" }, h("p", { class: "legend" }, h("span", {}, h("i", { class: "key-line", "aria-hidden": "true" }), "objective")), rows.map((row) => {
    const used = row.actual_s === null ? null : row.actual_s / row.objective_s;
    return h("div", { key: row.objective, class: "promise" },
      h("span", { class: "meter-name" }, row.objective.toUpperCase()),
      h("span", { class: "track limit" }, h("i", { class: row.met ? "fill good-fill" : "fill bad-fill", style: { width: `${used === null ? 0 : Math.min(100, used * 66.67).toFixed(1)}%` } })),
      h("span", { class: `n ${row.met ? "" : "bad"}` }, row.actual_s === null ? "never came" : seconds(row.actual_s), h("span", { class: "faint" }, ` of ${promised(row.objective_s)}`), row.met ? "" : " ✕"),
    );
  }));
}

function facts(told) {
  const cached = told.cached_tokens === null || told.cached_tokens === undefined ? "unknown" : whole(told.cached_tokens);
  const items = [
    ["prompt", `${whole(told.prompt_tokens)} tokens`], ["of it cached", cached], ["output", `${whole(told.output_tokens)} tokens`],
    ["per token", seconds(told.tpot_s)], ["longest gap", seconds(told.worst_gap_s)], ["handed off", `${whole(told.handed_off_blocks)} blocks`],
    ["resumes", whole(told.resumes)], ["device time", seconds(told.gpu_s)],
  ];
  if (told.trace_id) items.push(["trace", told.trace_id]);
  return h("dl", { class: "facts wide-facts" }, items.map(([name, value]) => h("div", { key: name }, h("dt", {}, name), h("dd", {}, value))));
}

function placement(made, number, told) {
  const many = told.decisions.length > 1;
  const because = number ? told.resume_reasons?.[number - 1] : null;
  const changed = route(made.route, shortId) !== route(made.became, shortId);
  return h("div", { class: "placement", key: String(number) },
    many ? h("h3", {}, `${number + 1} of ${told.decisions.length}`, because ? h("span", { class: "faint" }, `, because ${words(because)}`) : null) : null,
    h("p", {}, h("b", { class: "mono" }, route(made.route, shortId)), ` ${words(made.reason)}`, h("span", { class: "faint" }, ` · policy ${made.policy}, ${seconds(made.decided_s)} after arrival`)),
    changed ? h("p", { class: "warn" }, `it became ${route(made.became, shortId)}, ${words(made.became.reason)}`) : null,
    made.options?.length ? options(made) : h("p", { class: "faint" }, "This policy predicts nothing, so nothing was compared."),
    h("p", { class: "faint" }, foresight(made)),
  );
}

function options(made) {
  const loads = made.options.some((option) => option.load_s);
  const names = ["", "Runs on", "Cost", "Harm", "TTFT", "= Queue", ...(loads ? ["+ Load"] : []), "+ Prefill", "+ Transfer", "+ Decode", "Cached"];
  return h("div", { class: "scroll" }, h("table", { class: "options" },
    h("caption", {}, `Best ${made.options.length} of ${whole(made.considered)} candidates, by cost`),
    h("thead", {}, h("tr", {}, names.map((name, at) => h("th", { scope: "col", class: at > 1 ? "n" : "" }, name)))),
    h("tbody", {}, made.options.map((option, at) => h("tr", { key: String(at), class: option.chosen ? "on" : "" },
      h("td", { class: "good" }, option.chosen ? h("span", { role: "img", "aria-label": "chosen" }, "●") : ""),
      h("th", { scope: "row", class: "mono" }, route(option, shortId)),
      ["cost_s", "harm_s", "ttft_s", "queue_s", ...(loads ? ["load_s"] : []), "prefill_s", "transfer_s", "decode_s"].map((name) => h("td", { key: name, class: `n ${name === "ttft_s" || name === "cost_s" ? "strong" : ""}` }, seconds(option[name]))),
      h("td", { class: "n" }, option.hit_tokens ? `${whole(option.hit_tokens)} ${option.hit_source}` : "none"),
    ))),
  ));
}

function foresight(made) {
  const actual = made.actual_ttft_s === null ? "no first token followed it" : `actual ${seconds(made.actual_ttft_s)}`;
  const predicted = made.predicted_ttft_s === null ? DASH : seconds(made.predicted_ttft_s);
  const error = made.ttft_error_fraction;
  const off = error === null ? "" : `, predicted ${share(Math.abs(error), 0)} too ${error > 0 ? "long" : "short"}`;
  return `Time to first token from then on: predicted ${predicted}, ${actual}${off}`;
}

