// Are objectives met, what is offered, and which pools serve it.

import { Chart, chartBox, sparkline } from "./charts.js";
import { h } from "./dom.js";
import { ago, DASH, promised, rate, seconds, share, short, whole, words } from "./format.js";

const goodput = new Chart({
  lines: () => [
    { name: "offered_per_s", label: "offered", color: "--asked", width: 1.25 },
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
    const told = live.get("overview")?.overview;
    if (!told) return [waiting()];
    return [
      h("section", { class: "hero", key: "hero", "aria-label": "Goodput" }, headline(told), chartBox(goodput, { title: "Requests per second", key: "goodput", live, note: "Requests per second, offered and goodput, over the last 30 minutes" })),
      stats(told.demand),
      classes(told.classes, live),
      pools(told.pools),
      h("div", { class: "pair", key: "rest" }, autoscaler(told.autoscaler), ingresses(told)),
    ];
  },
  drew: ({ live }) => goodput.draw(live),
};

export function waiting(what = "the fleet") {
  return h("p", { class: "empty", key: "waiting" }, `Waiting for the controller's first word on ${what}.`);
}

function headline(told) {
  const { goodput_per_s, ended_per_s, good_fraction } = told.service;
  const broken = told.classes.filter((one) => isBroken(one)).map((one) => one.class);
  const judged = good_fraction !== null;
  return h("div", { class: "headline" },
    h("h1", { class: "label" }, "Goodput"),
    h("p", { class: "huge", "data-test": "goodput" }, judged ? rate(goodput_per_s) : DASH, h("small", {}, "requests/s")),
    h("p", { class: "sub" }, judged ? ["of ", h("b", {}, rate(ended_per_s)), "/s that end, ", h("b", {}, share(good_fraction)), " met every objective"] : "nothing has ended in the window"),
    h("p", { class: `verdict ${!judged ? "" : broken.length ? "bad" : "good"}` }, !judged ? "nothing to judge" : broken.length ? `✕ below target: ${broken.join(", ")}` : "✓ every class above its target"),
  );
}

const isBroken = (one) => one.attainment !== null && one.attainment < one.target;

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
        h("td", { class: `n strong ${row.attainment === null ? "" : isBroken(row) ? "bad" : "good"}` }, share(row.attainment)),
        h("td", { class: "mark-cell" }, row.attainment === null ? "" : isBroken(row) ? "✕" : "✓"),
        h("td", { class: "n" }, share(row.target)),
        h("td", { class: "n" }, rate(row.goodput_per_s), h("span", { class: "faint" }, ` of ${rate(row.requests_per_s)}/s`)),
        h("td", { class: "n" }, promised(row.ttft_s)),
        h("td", { class: "n" }, promised(row.tpot_s)),
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
      h("p", { class: "legend" }, PIPS.map((kind) => h("span", { key: kind }, h("i", { class: `pip ${kind}`, "aria-hidden": "true" }), kind === "missing" ? "missing (desired, not there)" : kind)))),
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
  const told = plays.reduce((sum, [, count]) => sum + count, 0);
  const kinds = [...plays, ["ready", row.ready - told], ["starting", row.starting], ["draining", row.draining], ["missing", row.desired - row.ready - row.starting]];
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

function autoscaler(told) {
  if (!told) return h("section", { key: "scaling" }, h("h2", {}, "Autoscaler"), h("p", { class: "empty" }, "It has not said anything yet."));
  const last = told.last_action;
  return h("section", { key: "scaling" },
    h("h2", {}, h("a", { href: "#scaling" }, "Autoscaler")),
    h("p", {}, told.paused_reason ? [h("b", { class: "warn" }, "paused"), ` because ${told.paused_reason}`] : last ? [h("b", {}, last.actions.join(", ")), h("span", { class: "faint" }, ` ${ago(last.age_s)}`)] : "has had nothing to change"),
    h("p", { class: "faint" }, told.policy),
    (told.overrides ?? []).map((one) => h("p", { key: one.pool, class: "warn" }, `by hand: ${one.pool} at ${one.replicas} ${one.remaining_s === null ? "until taken back" : `for ${seconds(one.remaining_s)} more`}`)),
    told.last_failure ? h("p", { class: "bad" }, `✕ ${told.failed_calls + told.failed_turns} failures, the last: ${told.last_failure}`) : null,
  );
}

function ingresses(told) {
  const { count, healthy, unresponsive, unjoined, in_flight, ended } = told.ingresses;
  const all = count + unresponsive.length;
  const lost = Object.entries(unjoined);
  const counts = (phases) => Object.entries(phases).filter(([, many]) => many).map(([name, many]) => `${whole(many)} ${words(name)}`).join(", ") || "none";
  return h("section", { key: "ingresses" },
    h("h2", {}, "Ingresses"),
    h("p", {}, h("b", { class: healthy < all ? "bad" : "" }, `${healthy} of ${all}`), " healthy"),
    unresponsive.map((one) => h("p", { key: one, class: "bad" }, `✕ no answer from ${one}`)),
    h("p", { class: "faint" }, `under way: ${counts(in_flight)}`),
    h("p", { class: "faint" }, `ended: ${counts(ended)}`),
    lost.map(([id, why]) => h("p", { key: id, class: "warn" }, `${id} is not reached: ${why}`)),
    told.predictions.filter((row) => row.predictions).map((row) => h("p", { key: row.pool, class: "faint" }, `predicted first tokens of ${row.pool} are off by ${share(row.ttft_error_fraction, 0)}, over ${whole(row.predictions)} requests`)),
  );
}
