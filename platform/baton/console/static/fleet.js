// Replicas by pool, and the pairs between which KV blocks move.

import { h } from "./dom.js";
import { meter, waiting } from "./overview.js";
import { ago, bytes, DASH, digits, seconds, shortId, whole } from "./format.js";

const ROLES = { prefill: "P", decode: "D", mixed: "M" };
const STATES = { ok: "●", unknown: "○", quarantined: "✕" };
const MOST_SHOWN = 48;
const MOST_REPLICAS = 240;

export const fleet = {
  topics: () => ["fleet", "links"],
  view(ctx) {
    const data = ctx.live.get("fleet");
    if (!data) return [waiting("its replicas")];
    const names = labels(data.replicas);
    return [replicas(data, ctx, names), map(ctx, names)];
  },
  filters: "replicas",
};

/** A short name for each replica, as long as no other has the same. */
function labels(rows) {
  const counts = new Map();
  for (const row of rows) counts.set(shortId(row.replica_id), (counts.get(shortId(row.replica_id)) ?? 0) + 1);
  return (id) => (counts.get(shortId(id)) > 1 ? String(id) : shortId(id));
}

function replicas(data, { state: { filter }, filterBox }, name) {
  const found = data.replicas.filter((row) => !filter || `${row.replica_id} ${row.pool} ${row.role} ${row.state} ${row.node}`.toLowerCase().includes(filter));
  const rows = found.slice(0, MOST_REPLICAS);
  const pools = [...new Set([...data.pools.map((row) => row.pool), ...rows.map((row) => row.pool)])];
  return h("section", { key: "replicas" },
    h("div", { class: "section-head" }, h("h1", {}, "Replicas"),
      h("p", { class: "legend" }, Object.entries(ROLES).map(([role, letter]) => h("span", { key: role }, h("i", { class: `role ${role}` }, letter), role)), h("span", { key: "warn" }, "KV turns amber from 90 %")), filterBox),
    rows.length ? null : h("p", { class: "empty" }, filter ? "No replica matches." : "There are no replicas. Pools grow with demand, or by ", rows.length || filter ? null : h("code", {}, "baton scale"), filter ? null : "."),
    found.length > rows.length ? h("p", { class: "faint hint" }, `${whole(rows.length)} of ${whole(found.length)} are shown: filter them by pool, role, state or node.`) : null,
    pools.map((pool) => poolOf(pool, data, rows.filter((row) => row.pool === pool), name)),
  );
}

function poolOf(pool, data, rows, name) {
  if (!rows.length) return null;
  const row = data.pools.find((candidate) => candidate.pool === pool);
  return h("div", { class: "pool", key: pool },
    h("h2", {}, pool, row ? h("span", { class: "faint" }, ` ${row.ready} of ${row.desired} ready`) : null),
    h("ul", { class: "replicas" }, rows.map((member) => h("li", { key: member.replica_id }, replica(member, name)))),
  );
}

function replica(row, name) {
  const off = row.state !== "ready";
  return h("article", { class: `replica ${off ? "off" : ""}`, tabindex: "0", "data-row": true, title: row.replica_id, "aria-label": `${row.role} replica ${row.replica_id}, ${row.state}` },
    h("div", { class: "replica-head" }, h("i", { class: `role ${row.role}`, "aria-hidden": "true" }, ROLES[row.role] ?? "?"), h("b", { class: "mono" }, name(row.replica_id)), h("span", { class: off ? "warn" : "faint" }, row.state)),
    meter(row.kv_used_fraction ?? null, "KV"),
    h("dl", { class: "mini" },
      h("div", {}, h("dt", {}, "running"), h("dd", {}, whole(row.running_requests))),
      h("div", {}, h("dt", {}, "queued"), h("dd", {}, whole(row.queued_requests))),
      h("div", {}, h("dt", {}, "step"), h("dd", {}, seconds(row.step_s || null))),
      h("div", {}, h("dt", {}, "pulled"), h("dd", {}, bytes(row.moved_bytes, 2))),
    ),
    h("p", { class: "faint tiny" }, [row.index ? `cache ${row.index}` : null, row.leases ? `${row.leases} leases` : null, row.transfer_failures ? `${row.transfer_failures} failed pulls` : null].filter(Boolean).join(" · ")),
  );
}

// --------------------------------------------------------------------------------- pair map

function map(ctx, name) {
  const data = ctx.live.get("links");
  if (!data) return waiting("its pairs");
  const links = data.links;
  const counts = {};
  for (const link of links) counts[link.state] = (counts[link.state] ?? 0) + 1;
  return h("section", { key: "pairs" },
    h("div", { class: "section-head" }, h("h1", {}, "Pairs"),
      h("p", { class: "legend" }, Object.entries(STATES).map(([state, glyph]) => h("span", { key: state, class: counts[state] ? `pair-${state}` : "faint" }, h("i", { class: "glyph" }, glyph), `${counts[state] ?? 0} ${state}`)))),
    links.length ? h("p", { class: "faint hint" }, `From the replica of the row to that of the column; GB/s as estimated; stronger colour is faster. ${beyond(links)}`) : null,
    links.length ? h("div", { class: "map-and-more" }, matrix(ctx, links, name), chosen(ctx, links, name)) : h("p", { class: "empty" }, "No pair transfers blocks: every replica prefills and decodes its own requests."),
    data.pairs > links.length ? h("p", { class: "faint" }, `${whole(links.length)} of ${whole(data.pairs)} pairs are sent; `, h("code", {}, "baton links"), " has all.") : null,
  );
}

function beyond(links) {
  const most = Math.max(new Set(links.map((link) => link.source_id)).size, new Set(links.map((link) => link.target_id)).size);
  return most > MOST_SHOWN ? `The first ${MOST_SHOWN} by ${MOST_SHOWN} of them.` : "";
}

function matrix(ctx, links, name) {
  const sources = [...new Set(links.map((link) => link.source_id))];
  const targets = [...new Set(links.map((link) => link.target_id))];
  const by = new Map(links.map((link) => [`${link.source_id}\n${link.target_id}`, link]));
  const most = Math.max(1, ...links.map((link) => link.bytes_per_s));
  return h("div", { class: "scroll matrix-box" },
    h("table", { class: "matrix" },
      h("thead", {}, h("tr", {}, h("td", {}), targets.slice(0, MOST_SHOWN).map((id) => h("th", { scope: "col", key: id, title: id, class: "mono" }, name(id))))),
      h("tbody", {}, sources.slice(0, MOST_SHOWN).map((source) => h("tr", { key: source },
        h("th", { scope: "row", title: source, class: "mono" }, name(source)),
        targets.slice(0, MOST_SHOWN).map((target) => h("td", { key: target }, cell(ctx, by.get(`${source}\n${target}`), most))),
      ))),
    ),
  );
}

function cell(ctx, link, most) {
  if (!link) return h("span", { class: "no-pair" }, "·");
  const key = `${link.source_id}\n${link.target_id}`;
  const strength = Math.round(12 + 45 * Math.sqrt(link.bytes_per_s / most));
  return h("button", {
    type: "button", "data-row": true, class: `pair-cell pair-${link.state} ${ctx.state.pair === key ? "on" : ""}`,
    style: { "--strength": `${strength}%` }, "aria-pressed": ctx.state.pair === key ? "true" : "false",
    "aria-label": `${link.source_id} to ${link.target_id}: ${link.state}, ${gigabytes(link)} gigabytes a second`,
    on: { click: () => ctx.set({ pair: ctx.state.pair === key ? null : key }) },
  }, h("i", { class: "glyph", "aria-hidden": "true" }, STATES[link.state] ?? "?"), h("span", { class: "n" }, link.state === "quarantined" ? "out" : gigabytes(link)));
}

const gigabytes = (link) => digits(link.bytes_per_s / 1e9, 2);

function chosen(ctx, links, name) {
  const link = links.find((pair) => `${pair.source_id}\n${pair.target_id}` === ctx.state.pair);
  const troubled = links.filter((pair) => pair.reason);
  if (!link && !troubled.length) return h("aside", { class: "pair-more" }, h("p", { class: "faint" }, "Select a pair for its measurements."));
  if (!link) return h("aside", { class: "pair-more" }, h("h3", {}, "Pairs with a reason"), troubled.slice(0, 12).map((pair) => h("p", { key: `${pair.source_id}\n${pair.target_id}`, class: `pair-${pair.state}` }, h("i", { class: "glyph" }, STATES[pair.state]), h("b", { class: "mono" }, `${name(pair.source_id)} → ${name(pair.target_id)}`), ` ${pair.reason}`)));
  const facts = [
    ["state", link.state], ["reason", link.reason || DASH], ["transport", link.transport || "unknown"], ["bandwidth", `${bytes(link.bytes_per_s)}/s`],
    ["setup", seconds(link.setup_s)], ["pull, p50", seconds(link.p50_s)], ["pull, p99", seconds(link.p99_s)], ["pulls", whole(link.pulls)],
    ["moved", bytes(link.moved_bytes)], ["failed pulls", whole(link.failures)], ["failed handoffs", whole(link.failed_handoffs)],
    ["transfers in flight", whole(link.flows)], ["penalty", `× ${digits(link.penalty, 3)}`], ["probed", link.probed_age_s === null ? "never" : ago(link.probed_age_s)],
  ];
  return h("aside", { class: "pair-more" },
    h("h3", { class: "mono" }, `${name(link.source_id)} → ${name(link.target_id)}`),
    h("dl", { class: "facts" }, facts.map(([label, value]) => h("div", { key: label }, h("dt", {}, label), h("dd", { class: label === "state" ? `pair-${link.state}` : "" }, value)))),
  );
}
