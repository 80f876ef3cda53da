// Attainment of objectives, offered load, and pools.

import { Chart, chartBox, sparkline } from "./charts.js";
import { h } from "./dom.js";
import { ago, DASH, objective, rate, seconds, share, short, whole, words } from "./format.js";

const goodput = new Chart({
  lines: () => [
    { name: "offered_per_s", label: "offered", color: "--offered", width: 1.25 },
    { name: "goodput_per_s", label: "goodput", color: "--good", fill: "--good-wash" },
  ],
  band: [1, 2],
  bandLabel: "missed, rejected or failed",
  least: 1,
  text: (value) => rate(value),
});

export const overview = {
  topics: () => ["overview"],
  view({ live }) {
    const summary = live.get("overview")?.overview;
    if (!summary) return [waiting()];
    return [
      h("section", { class: "hero", key: "hero", "aria-label": "Goodput" }, headline(summary), chartBox(goodput, { title: "Requests per second", key: "goodput", live, note: "Requests per second, offered and goodput, over the last 30 minutes" })),
      stats(summary.demand),
      classes(summary.classes, live),
      pools(summary.pools),
      h("div", { class: "pair", key: "rest" }, autoscaler(summary.autoscaler), ingresses(summary)),
    ];
  },
  afterDraw: ({ live }) => goodput.draw(live),
};

export function waiting(subject = "the fleet") {
  return h("p", { class: "empty", key: "waiting" }, `Waiting for the controller's first report on ${subject}.`);
}

function headline(summary) {
  const { goodput_per_s, ended_per_s, good_fraction } = summary.service;
  const missed = summary.classes.filter((row) => isMissed(row)).map((row) => row.class);
  const hasEnded = good_fraction !== null;
  return h("div", { class: "headline" },
    h("h1", { class: "label" }, "Goodput"),
    h("p", { class: "huge", "data-test": "goodput" }, hasEnded ? rate(goodput_per_s) : DASH, h("small", {}, "requests/s")),
    h("p", { class: "sub" }, hasEnded ? ["of ", h("b", {}, rate(ended_per_s)), "/s that end, ", h("b", {}, share(good_fraction)), " met every objective"] : "no request has ended in the window"),
    h("p", { class: `target-status ${!hasEnded ? "" : missed.length ? "bad" : "good"}` }, !hasEnded ? "no request to evaluate" : missed.length ? `✕ below target: ${missed.join(", ")}` : "✓ every class above its target"),
  );
}

const isMissed = (row) => row.attainment !== null && row.attainment < row.target;

function stats(demand) {
  const late = demand?.slack_s !== null && demand?.slack_s < 0;
  const items = [
    ["offered", rate(demand?.requests_per_s), "requests/s"],
    ["prompt tokens to compute", short(demand?.prompt_tokens_per_s), "/s"],
    ["output tokens", short(demand?.output_tokens_per_s), "/s"],
    ["in flight", whole(demand?.in_flight), ""],
    ["queued", whole(demand?.queued), ""],
    ["rejected", rate(demand?.rejected_per_s), "/s"],
    [late ? "most urgent is late by" : "most urgent has left", seconds(demand?.slack_s == null ? null : Math.abs(demand.slack_s)), "", late],
  ];
  return h("dl", { class: "stats", key: "stats", "aria-label": "Demand" },
    items.map(([name, value, unit, bad]) => h("div", { key: name.startsWith("most") ? "slack" : name, class: bad ? "bad" : "" }, h("dt", {}, name), h("dd", {}, value, unit ? h("small", {}, unit) : null))),
  );
}

function classes(rows, live) {
  if (!rows.length) return h("section", { key: "classes" }, h("h2", {}, "Objectives"), h("p", { class: "empty" }, "No class has an objective: add them under ", h("code", {}, "slo"), "."));
  return h("section", { key: "classes" },
    h("h2", {}, "Objectives"),
    h("div", { class: "scroll" }, h("table", {},
      h("caption", {}, "Line: share of requests that met every objective, from 30 minutes ago to now; dashed: its target. ✓ at or above the target, ✕ below."),
      h("thead", {}, h("tr", {}, ["Class", "Now", "", "Target", "Goodput", "TTFT", "TPOT", "Last 30 minutes", "Over its window", "Rejected", "Failed"].map((name, at) => h("th", { scope: "col", class: at > 0 && at !== 7 ? "n" : "" }, name)))),
      h("tbody", {}, rows.map((row) => h("tr", { key: row.class },
        h("th", { scope: "row" }, row.class),
        h("td", { class: `n strong ${row.attainment === null ? "" : isMissed(row) ? "bad" : "good"}` }, share(row.attainment)),
        h("td", { class: "mark-cell" }, row.attainment === null ? "" : isMissed(row) ? "✕" : "✓"),
        h("td", { class: "n" }, share(row.target)),
        h("td", { class: "n" }, rate(row.goodput_per_s), h("span", { class: "faint" }, ` of ${rate(row.requests_per_s)}/s`)),
        h("td", { class: "n" }, objective(row.ttft_s)),
        h("td", { class: "n" }, objective(row.tpot_s)),
        h("td", {}, sparkline(live.history[`attainment/${row.class}`] ?? [], row.target, `attainment of ${row.class} over the last 30 minutes`)),
        h("td", { class: `n ${row.window_attainment !== null && row.window_attainment < row.target ? "bad" : ""}` }, share(row.window_attainment, 2)),
        h("td", { class: "n" }, whole(row.rejected)),
        h("td", { class: "n" }, whole(row.failed)),
      ))),
    )),
  );
}

const PIPS = ["prefill", "decode", "mixed", "starting", "draining", "missing"];

function pools(rows) {
  return h("section", { key: "pools" },
    h("div", { class: "section-head" }, h("h2", {}, "Pools"),
      h("p", { class: "legend" }, PIPS.map((kind) => h("span", { key: kind }, h("i", { class: `pip ${kind}`, "aria-hidden": "true" }), kind === "missing" ? "missing (desired, not started)" : kind)))),
    rows.length ? null : h("p", { class: "empty" }, "No pool is known yet."),
    h("div", { class: "cards" }, rows.map((row) => h("a", { class: "card", key: row.pool, href: "#fleet", "data-row": true },
      h("div", { class: "card-head" }, h("b", {}, row.pool), h("span", { class: "faint" }, roles(row))),
      h("div", { class: "pips", "aria-hidden": "true" }, pips(row)),
      h("div", { class: "card-line" }, h("span", {}, h("b", {}, whole(row.ready)), ` of ${whole(row.desired)} ready`), row.starting ? h("span", {}, `${row.starting} starting`) : null, row.draining ? h("span", {}, `${row.draining} draining`) : null),
      meter(row.busy ?? null, "busy"),
      row.trouble ? h("p", { class: "bad note" }, `✕ ${String(row.trouble).split("\n")[0]}`) : null,
    ))),
  );
}

function roles(row) {
  const plays = ["prefill", "decode", "mixed"].filter((role) => row[role]).map((role) => `${row[role]} ${role}`);
  return plays.join(", ");
}

function pips(row) {
  const plays = ["prefill", "decode", "mixed"].map((role) => [role, row[role] ?? 0]);
  const inRoles = plays.reduce((sum, [, count]) => sum + count, 0);
  const kinds = [...plays, ["ready", row.ready - inRoles], ["starting", row.starting], ["draining", row.draining], ["missing", row.desired - row.ready - row.starting]];
  const all = kinds.flatMap(([kind, count]) => Array.from({ length: Math.max(0, count ?? 0) }, (_, at) => [kind, at]));
  return all.slice(0, 48).map(([kind, at]) => h("i", { key: `${kind}${at}`, class: `pip ${kind}` }));
}

/** A share as a bar with its number. */
export function meter(value, name, warnAt = 0.9) {
  const known = value !== null && value !== undefined;
  return h("div", { class: "meter" },
    h("span", { class: "meter-name" }, name),
    h("span", { class: "track" }, h("i", { class: known && value >= warnAt ? "fill warn" : "fill", style: { width: `${known ? Math.min(100, value * 100).toFixed(1) : 0}%` } })),
    h("span", { class: "n meter-value" }, known ? share(value, 0) : DASH),
  );
}

function autoscaler(status) {
  if (!status) return h("section", { key: "scaling" }, h("h2", {}, "Autoscaler"), h("p", { class: "empty" }, "No report yet."));
  const last = status.last_action;
  return h("section", { key: "scaling" },
    h("h2", {}, h("a", { href: "#scaling" }, "Autoscaler")),
    h("p", {}, status.paused_reason ? [h("b", { class: "warn" }, "paused"), ` because ${status.paused_reason}`] : last ? [h("b", {}, last.actions.join(", ")), h("span", { class: "faint" }, ` ${ago(last.age_s)}`)] : "no change so far"),
    h("p", { class: "faint" }, status.policy),
    (status.overrides ?? []).map((override) => h("p", { key: override.pool, class: "warn" }, `override: ${override.pool} at ${override.replicas} ${override.remaining_s === null ? "until removed" : `for ${seconds(override.remaining_s)} more`}`)),
    status.last_failure ? h("p", { class: "bad" }, `✕ ${status.failed_calls + status.failed_turns} failures, the last: ${status.last_failure}`) : null,
  );
}

function ingresses(summary) {
  const { count, healthy, unresponsive, unjoined, in_flight, ended } = summary.ingresses;
  const all = count + unresponsive.length;
  const lost = Object.entries(unjoined);
  const counts = (phases) => Object.entries(phases).filter(([, many]) => many).map(([name, many]) => `${whole(many)} ${words(name)}`).join(", ") || "none";
  return h("section", { key: "ingresses" },
    h("h2", {}, "Ingresses"),
    h("p", {}, h("b", { class: healthy < all ? "bad" : "" }, `${healthy} of ${all}`), " healthy"),
    unresponsive.map((id) => h("p", { key: id, class: "bad" }, `✕ no answer from ${id}`)),
    h("p", { class: "faint" }, `in flight: ${counts(in_flight)}`),
    h("p", { class: "faint" }, `ended: ${counts(ended)}`),
    lost.map(([id, reason]) => h("p", { key: id, class: "warn" }, `${id} is unreachable: ${reason}`)),
    summary.predictions.filter((row) => row.predictions).map((row) => h("p", { key: row.pool, class: "faint" }, `predicted first tokens of ${row.pool} are off by ${share(row.ttft_error_fraction, 0)}, over ${whole(row.predictions)} requests`)),
  );
}
