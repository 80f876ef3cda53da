// What the autoscaler decided, why, and from which numbers.

import { Chart, chartBox } from "./charts.js";
import { h } from "./dom.js";
import { ago, digits, seconds, whole, words } from "./format.js";
import { waiting } from "./overview.js";

const INKS = ["--ink-1", "--ink-2", "--ink-3", "--ink-4"];
const MOST_POOLS = 4;

const replicas = new Chart({
  lines: (history) => Object.keys(history).filter((name) => name.startsWith("ready/")).slice(0, MOST_POOLS).flatMap((name, at) => {
    const pool = name.slice("ready/".length);
    return [
      { name: `desired/${pool}`, label: `${pool} desired`, color: INKS[at], dash: [4, 4], width: 1.25, step: true },
      { name, label: `${pool} ready`, color: INKS[at], step: true },
    ];
  }),
  least: 2,
  text: (value) => (Number.isInteger(value) ? whole(value) : ""),
});

const MOST_KNOWN = 400;
const known = [];
let runs = 0;

export const scaling = {
  topics: () => ["ticks"],
  view(ctx) {
    const { live, state } = ctx;
    const told = live.get("ticks");
    const summary = live.get("overview")?.overview.autoscaler;
    return [
      h("div", { class: "section-head", key: "head" }, h("h1", {}, "Autoscaler"), h("p", { class: "faint" }, summary?.policy ?? ""), ctx.filterBox),
      chartBox(replicas, { title: "Replicas", key: "chart", live, note: "Replicas wanted and ready by pool, over the last ten minutes" }),
      summary ? standing(summary) : null,
      told ? log(told.runs, live, state.filter) : waiting("its decisions"),
    ];
  },
  drew: ({ live }) => replicas.draw(live),
  filters: "decisions",
};

function standing(told) {
  const items = [
    ["turns", whole(told.turns)], ["failed turns", whole(told.failed_turns)], ["failed calls", whole(told.failed_calls)],
    ["paused", told.paused_reason || "no"], ["by hand", (told.overrides ?? []).map((one) => `${one.pool} at ${one.replicas}`).join(", ") || "none"],
  ];
  return h("dl", { class: "stats", key: "standing" }, items.map(([name, value]) => h("div", { key: name }, h("dt", {}, name), h("dd", { class: "smaller" }, value))));
}

function log(told, live, filter) {
  const age = live.age("ticks");
  const shown = told.filter((run) => !filter || textOf(run).includes(filter));
  return h("section", { key: "log" },
    h("h2", {}, "Decisions"),
    shown.length ? null : h("p", { class: "empty" }, filter ? "No decision matches." : "It has not decided anything yet."),
    h("ol", { class: "log" }, shown.map((run) => entry(run, age, live))),
  );
}

const textOf = (run) => [outcome(run)[1], ...run.pools.flatMap((pool) => [pool.pool, words(pool.reason), pool.detail, pool.clipped_by])].join(" ").toLowerCase();

/** Ages only nearly agree from one answer to the next: who began within half a second is the same. */
function identity(run, live) {
  const began = live.now() - live.age("ticks") - run.first_age_s;
  let found = known.find((one) => Math.abs(one.began - began) < 0.5);
  if (!found) {
    found = { began, id: `run${(runs += 1)}` };
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
  const when = run.ticks > 1 ? `${ago(run.first_age_s + age).replace(" ago", "")} to ${ago(run.age_s + age)}, ${run.ticks} ticks` : ago(run.age_s + age);
  return h("li", { key: identity(run, live), class: `entry is-${tone}` },
    h("details", {},
      h("summary", { "data-row": true },
        h("span", { class: "entry-text" }, text),
        h("span", { class: "entry-pools" }, run.pools.map((pool) => h("span", { key: pool.pool, class: pool.have === pool.desired ? "faint" : "" }, `${pool.pool} `, h("b", { class: "n" }, pool.have === pool.desired ? pool.desired : `${pool.have} → ${pool.desired}`), ` ${words(pool.reason)}`))),
        h("span", { class: "faint nowrap" }, when)),
      run.pools.map((pool) => poolPart(pool)),
    ),
  );
}

function poolPart(pool) {
  const flips = Object.entries(pool.flips).filter(([, count]) => count).map(([role, count]) => `${count} as ${role}`).join(", ");
  const bounds = [pool.asked === pool.desired ? "" : `${pool.asked} asked`, pool.clipped_by ? `clipped by ${words(pool.clipped_by)}` : ""].filter(Boolean).join(", ");
  return h("div", { class: "entry-pool", key: pool.pool },
    h("p", {}, h("b", {}, `${pool.pool}: `), pool.detail || words(pool.reason), bounds ? h("span", { class: "warn" }, ` (${bounds})`) : null, flips ? h("span", {}, `; ${flips}`) : null),
    h("dl", { class: "facts inputs" }, Object.entries(pool.inputs).map(([name, value]) => h("div", { key: name }, h("dt", {}, words(name)), h("dd", {}, value === null ? "–" : name.endsWith("_s") && !name.endsWith("per_s") ? seconds(value) : digits(value, 4))))),
  );
}
