// The current configuration, as the controller resolved it.

import { h } from "./dom.js";

export const config = {
  topics: () => [],
  view(ctx) {
    const { text, error } = ctx.state.config;
    const generation = ctx.live.get("overview")?.overview.generation;
    return [
      h("div", { class: "section-head", key: "head" }, h("h1", {}, "Configuration"),
        h("p", { class: "faint" }, generation === undefined || generation === null ? "" : `generation ${generation}, `, "with every default; secrets are not shown"), ctx.filterBox),
      error ? h("p", { class: "empty bad", key: "error" }, error) : null,
      text === null ? (error ? null : h("p", { class: "empty", key: "wait" }, "Loading.")) : body(text, ctx.state.filter),
    ];
  },
  filters: "lines",
};

function body(text, filter) {
  const lines = text.replace(/\n$/, "").split("\n");
  const shown = matchingLines(lines, filter);
  if (!shown.length) return h("p", { class: "empty", key: "none" }, "No line matches.");
  return h("ol", { class: "yaml mono", key: "yaml", "aria-label": "Configuration" }, shown.map((at) => h("li", { key: String(at), value: at + 1 }, coloured(lines[at]))));
}

/** Lines that match, and the keys that they are under. */
function matchingLines(lines, filter) {
  if (!filter) return lines.map((_, at) => at);
  const shown = new Set();
  const above = [];
  lines.forEach((line, at) => {
    const depth = line.search(/\S/);
    if (depth < 0) return;
    while (above.length && lines[above.at(-1)].search(/\S/) >= depth) above.pop();
    if (line.toLowerCase().includes(filter)) for (const index of [...above, at]) shown.add(index);
    above.push(at);
  });
  return [...shown].sort((a, b) => a - b);
}

function coloured(line) {
  const found = /^(\s*(?:- )?)([^\s:#][^:#]*)(:)(\s.*|)$/.exec(line);
  if (!found) return h("span", {}, line || " ");
  const [, indent, key, colon, rest] = found;
  return [h("span", {}, indent), h("b", {}, key), h("span", { class: "faint" }, colon), h("span", { class: "value" }, rest)];
}
