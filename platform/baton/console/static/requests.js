// Recent requests, and one in detail: its waterfall and its placement.

import { h } from "./dom.js";
import { ago, route, seconds, shortId, whole, words } from "./format.js";
import { detail } from "./request.js";

const ORDERS = [["latest", "l"], ["missed", "m"], ["slowest", "s"]];
const PARTS = ["ingress_wait", "lost", "queue", "prefill", "transfer", "decode"];

export const requests = {
  topics: (state) => [state.order],
  view(ctx) {
    const { live, state } = ctx;
    const data = live.get(state.order);
    const open = state.open !== null;
    return [h("div", { class: `split ${open ? "open" : ""}`, key: "split" },
      h("section", { class: "list", key: "list" }, head(ctx), list(ctx, data)),
      open ? h("section", { class: "detail", key: "detail", "aria-label": "Request" }, detail(ctx)) : null,
    )];
  },
  filters: "requests",
  key(event, ctx) {
    const order = ORDERS.find(([, key]) => key === event.key);
    if (order) ctx.set({ order: order[0], shown: null });
    if (event.key === "z") ctx.set({ whole: !ctx.state.whole });
    return Boolean(order) || event.key === "z";
  },
};

function head(ctx) {
  return h("div", { class: "section-head" },
    h("h1", {}, "Requests"),
    h("div", { class: "segments", role: "group", "aria-label": "Which" }, ORDERS.map(([order, key]) => h("button", {
      type: "button", key: order, "aria-pressed": ctx.state.order === order ? "true" : "false", "aria-keyshortcuts": key,
      on: { click: () => ctx.set({ order, shown: null }) },
    }, order))),
    h("span", { class: "faint paused-note" }, ctx.state.isReading ? "paused while you read" : ""),
    ctx.filterBox,
  );
}

const EMPTY = {
  latest: "No recent request. Send a request, and it appears here.",
  missed: "No recent request missed an objective.",
  slowest: "No recent request.",
};

function list(ctx, data) {
  const { state } = ctx;
  if (!data) return h("p", { class: "empty" }, "Waiting for the ingresses.");
  const all = state.isReading && state.shown ? state.shown : data;
  state.shown = all;
  const rows = all.requests.filter((row) => matches(row, state.filter));
  if (!rows.length) return nothing(state);
  return h("div", { class: "scroll", "data-reading": true }, partsLegend(), h("table", { class: "rows" },
    h("thead", {}, h("tr", {}, ["", "Request", "TTFT", "TPOT", "Total", "Ran on", "Time to first token", "Class", "Tenant", "Tokens", "Ended"].map((name, at) => h("th", { scope: "col", class: (at >= 2 && at <= 4) || at === 9 ? "n" : at === 6 ? "wide" : "" }, name)))),
    h("tbody", {}, rows.map((row) => line(row, ctx))),
  ));
}

/** The legend of bars and rows. */
function partsLegend() {
  return h("p", { class: "legend", key: "legend" },
    PARTS.map((part) => h("span", { key: part }, h("i", { class: `part ${part}`, "aria-hidden": "true" }), part === "lost" ? "lost (a leg that failed)" : words(part))),
    ["✓ met every objective", "✕ missed an objective", "– not evaluated"].map((text) => h("span", { key: text }, text)));
}

function nothing(state) {
  if (!state.filter) return h("p", { class: "empty" }, EMPTY[state.order]);
  return h("p", { class: "empty" }, "None of these match. ", h("a", { href: `#requests/${encodeURIComponent(state.filterText)}`, "data-row": true }, `Look for “${state.filterText}” in all request logs`));
}

function matches(row, filter) {
  if (!filter) return true;
  const text = [row.request_id, row.slo_class, row.tenant, row.prefill_replica, row.decode_replica, row.outcome, row.missed, row.verdict].join(" ");
  return text.toLowerCase().includes(filter);
}

/** `missed TTFT, TPOT`, or `not served`. */
function missedText(missed) {
  const names = missed.split(",").filter(Boolean);
  const late = names.filter((name) => name !== "served").map((name) => words(name).toUpperCase());
  return [names.includes("served") ? "not served" : "", late.length ? `missed ${late.join(", ")}` : ""].filter(Boolean).join(", ");
}

export function outcomeText(row) {
  if (row.verdict === "good") return ["✓", "good", "met every objective"];
  if (row.verdict === "missed") return ["✕", "bad", missedText(String(row.missed))];
  return ["–", "faint", String(row.verdict ?? "")];
}

function line(row, ctx) {
  const [glyph, tone, text] = outcomeText(row);
  const total = firstToken(row) ?? row.ended_s;
  return h("tr", { key: row.request_id, class: ctx.state.open === row.request_id ? "on" : "" },
    h("td", { class: tone }, h("span", { title: text, role: "img", "aria-label": text }, glyph)),
    h("th", { scope: "row" }, h("a", { class: "stretch mono cut", href: `#requests/${encodeURIComponent(row.request_id)}`, "data-row": true, title: row.request_id }, row.request_id)),
    h("td", { class: `n ${String(row.missed).includes("ttft") ? "bad" : ""}` }, seconds(row.first_token_s)),
    h("td", { class: `n ${String(row.missed).includes("tpot") ? "bad" : ""}` }, seconds(row.tpot_s)),
    h("td", { class: "n" }, seconds(row.ended_s)),
    h("td", { class: "mono" }, route(row, shortId).split(" → ").map((name, at) => h("span", { key: String(at), class: "nowrap" }, at ? ` → ${name}` : name))),
    h("td", { class: "wide" }, bars(row.bars, total)),
    h("td", {}, h("span", { class: "cut narrow" }, row.slo_class ?? "–")),
    h("td", {}, h("span", { class: "cut narrow" }, row.tenant ?? "–")),
    h("td", { class: "n nowrap" }, whole(row.prompt_tokens), h("span", { class: "faint" }, ` → ${whole(row.output_tokens)}`)),
    h("td", { class: "faint nowrap" }, ago((row.age_s ?? 0) + ctx.live.age(ctx.state.order))),
  );
}

const firstToken = (row) => (typeof row.first_token_s === "number" ? row.first_token_s : null);

function bars(parts, total) {
  if (!parts?.length || !total) return null;
  return h("div", { class: "minibar", "aria-hidden": "true" }, parts.filter(([, from]) => from < total).map(([part, from, to], at) => h("i", {
    key: `${at}`, class: `part ${PARTS.includes(part) ? part : "lost"}`,
    style: { left: `${((from / total) * 100).toFixed(2)}%`, width: `${(((Math.min(to, total) - from) / total) * 100).toFixed(2)}%` },
  })));
}
