// The autoscaler's decisions, with their reasons and inputs.

import { Chart, chartBox, clock } from "./charts.js";
import { h } from "./dom.js";
import { ago, digits, seconds, whole, words } from "./format.js";
import { waiting } from "./overview.js";

const OTHER_INKS = ["--mixed", "--ink-3", "--text", "--soft"];
const MOST_POOLS = 4;
const roles = {};

/** A pool of one role has the colour of the role, as everywhere; further pools have others. */
function inks(pools) {
  const free = [...OTHER_INKS];
  const used = new Set();
  return pools.map((pool) => {
    const own = { prefill: "--prefill", decode: "--decode" }[roles[pool]];
    if (!own || used.has(own)) return free.shift() ?? "--soft";
    used.add(own);
    return own;
  });
}

function roleOf(row) {
  const played = ["prefill", "decode", "mixed"].filter((role) => row[role]);
  return played.length === 1 ? played[0] : null;
}

const replicas = new Chart({
  // The first pool has the widest line, so that a line on top of it does not hide it.
  lines: (history) => {
    const pools = Object.keys(history).filter((name) => name.startsWith("ready/")).map((name) => name.slice("ready/".length)).slice(0, MOST_POOLS);
    const colors = inks(pools);
    return pools.flatMap((pool, at) => [
      { name: `desired/${pool}`, label: `${pool} desired`, color: colors[at], dash: [4, 4], width: Math.max(1.25, 2 - 0.75 * at), step: true },
      { name: `ready/${pool}`, label: `${pool} ready`, color: colors[at], width: Math.max(1.5, 4 - 2.5 * at), step: true },
    ]);
  },
  least: 2,
  text: (value) => (Number.isInteger(value) ? whole(value) : ""),
});

const MOST_KNOWN = 400;
const known = [];
let runCount = 0;

export const scaling = {
  topics: () => ["ticks"],
  view(ctx) {
    const { live, state } = ctx;
    const ticks = live.get("ticks");
    const overview = live.get("overview")?.overview;
    const summary = overview?.autoscaler;
    // A pool without replicas keeps the colour that it had.
    for (const row of overview?.pools ?? []) if (roleOf(row)) roles[row.pool] = roleOf(row);
    return [
      h("div", { class: "section-head", key: "head" }, h("h1", {}, "Autoscaler"), h("p", { class: "faint" }, summary?.policy ?? ""), ctx.filterBox),
      chartBox(replicas, { title: "Replicas", key: "chart", live, note: "Desired and ready replicas by pool, over the last 30 minutes" }),
      summary ? stats(summary) : null,
      ticks ? log(ticks.runs, live, state.filter) : waiting("its decisions"),
    ];
  },
  afterDraw: ({ live }) => replicas.draw(live),
  filters: "decisions",
};

function stats(summary) {
  const items = [
    ["ticks", whole(summary.turns)], ["failed ticks", whole(summary.failed_turns)], ["failed calls", whole(summary.failed_calls)],
    ["paused", summary.paused_reason || "no"], ["overrides", (summary.overrides ?? []).map((override) => `${override.pool} at ${override.replicas}`).join(", ") || "none"],
  ];
  return h("dl", { class: "stats", key: "stats" }, items.map(([name, value]) => h("div", { key: name }, h("dt", {}, name), h("dd", { class: "smaller" }, value))));
}

function log(runs, live, filter) {
  const age = live.age("ticks");
  const shown = runs.filter((run) => !filter || textOf(run).includes(filter));
  return h("section", { key: "log" },
    h("div", { class: "section-head" }, h("h2", {}, "Decisions"),
      h("p", { class: "legend" }, ["● acted", "○ no change", "! paused, or a dry run"].map((text) => h("span", { key: text }, text)))),
    shown.length ? null : h("p", { class: "empty" }, filter ? "No decision matches." : "No decision yet."),
    h("ol", { class: "log" }, shown.map((run) => entry(run, age, live))),
  );
}

const textOf = (run) => [outcome(run)[1], ...run.pools.flatMap((pool) => [pool.pool, words(pool.reason), pool.detail, pool.clipped_by])].join(" ").toLowerCase();

/** Ages differ slightly between responses: runs that began within half a second are the same. */
function identity(run, live) {
  const began = live.now() - live.age("ticks") - run.first_age_s;
  let found = known.find((entry) => Math.abs(entry.began - began) < 0.5);
  if (!found) {
    found = { began, id: `run${(runCount += 1)}` };
    known.push(found);
    if (known.length > MOST_KNOWN) known.shift();
  }
  return found.id;
}

function outcome(run) {
  if (run.paused_reason) return ["warn", `paused, because ${run.paused_reason}`];
  if (run.actions.length) return ["acted", run.actions.join(", ")];
  const would = run.dry_run && run.pools.some((pool) => pool.have !== pool.desired || Object.values(pool.flips).some(Boolean));
  return would ? ["warn", "would act, but this is a dry run"] : ["faint", "no change"];
}

function entry(run, age, live) {
  const [tone, text] = outcome(run);
  const at = (age_s) => clock(Date.now() / 1000 - age_s - age, true);
  const when = run.ticks > 1 ? `${at(run.first_age_s)} to ${at(run.age_s)}, ${run.ticks} ticks` : at(run.age_s);
  return h("li", { key: identity(run, live), class: `entry is-${tone}` },
    h("details", {},
      h("summary", { "data-row": true },
        h("span", { class: "entry-text" }, text),
        h("span", { class: "entry-pools" }, run.pools.map((pool) => h("span", { key: pool.pool, class: pool.have === pool.desired ? "faint" : "" }, `${pool.pool} `, h("b", { class: "n" }, pool.have === pool.desired ? pool.desired : `${pool.have} → ${pool.desired}`), ` ${words(pool.reason)}`))),
        h("span", { class: "faint nowrap", title: ago(run.age_s + age) }, when)),
      run.pools.map((pool) => poolPart(pool)),
    ),
  );
}

function poolPart(pool) {
  const flips = Object.entries(pool.flips).filter(([, count]) => count).map(([role, count]) => `${count} as ${role}`).join(", ");
  const bounds = [pool.asked === pool.desired ? "" : `${pool.asked} requested`, pool.clipped_by ? `clipped by ${words(pool.clipped_by)}` : ""].filter(Boolean).join(", ");
  return h("div", { class: "entry-pool", key: pool.pool },
    h("p", {}, h("b", {}, `${pool.pool}: `), pool.detail || words(pool.reason), bounds ? h("span", { class: "warn" }, ` (${bounds})`) : null, flips ? h("span", {}, `; ${flips}`) : null),
    h("dl", { class: "facts inputs" }, Object.entries(pool.inputs).map(([name, value]) => h("div", { key: name }, h("dt", {}, words(name)), h("dd", {}, value === null ? "–" : name.endsWith("_s") && !name.endsWith("per_s") ? seconds(value) : digits(value, 4))))),
  );
}
