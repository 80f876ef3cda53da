// Lines over the last 30 minutes, by uPlot. Colours come from the style sheet, so that both themes
// are right; every chart has a line of text above it with the values under the pointer.

import { h } from "./dom.js";
import { HISTORY_S } from "./live.js";

const LEAST_S = 60;
const GAP_S = 6;

const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Points that are further apart than this are not connected: ticks were missing. */
function gapOf(at_s) {
  const steps = at_s.slice(1).map((at, index) => at - at_s[index]).sort((a, b) => a - b);
  return Math.max(GAP_S, 3 * (steps[steps.length >> 1] ?? 0));
}

/** Rows of `history` with x in wall time, and a hole where ticks are missing. */
function data(history, offset_s, names) {
  const out = [[], ...names.map(() => [])];
  const gap_s = gapOf(history.at_s);
  let before = null;
  history.at_s.forEach((at_s, index) => {
    if (before !== null && at_s - before > gap_s) {
      out[0].push(at_s + offset_s - 0.001);
      names.forEach((_, line) => out[line + 1].push(null));
    }
    out[0].push(at_s + offset_s);
    names.forEach((name, line) => out[line + 1].push(history[name]?.[index] ?? null));
    before = at_s;
  });
  return out;
}

/** `spec`: `lines(history)` → [{ name, label, color, fill, dash, step }], `text(value)`, `band`, `least`. */
export class Chart {
  constructor(spec) {
    this.spec = spec;
    this.hook = (node) => this.#mount(node);
  }

  draw(live) {
    if (!this.node) return;
    const lines = this.spec.lines(live.history);
    const signature = JSON.stringify([lines, document.documentElement.dataset.theme, ink("--text")]);
    if (signature !== this.signature) this.#build(lines, signature);
    const offset_s = Date.now() / 1000 - live.now();
    this.now_s = Date.now() / 1000;
    this.span_s = Math.min(HISTORY_S, Math.max(LEAST_S, live.now() - (live.history.at_s[0] ?? live.now())));
    this.plot.setData(data(live.history, offset_s, lines.map((line) => line.name)));
    this.#readValues();
  }

  #mount(node) {
    this.node = node;
    this.signature = null;
    const watch = new ResizeObserver(() => {
      if (this.plot && node.clientWidth) this.plot.setSize({ width: node.clientWidth, height: node.clientHeight });
    });
    watch.observe(node);
    return () => {
      watch.disconnect();
      if (this.node !== node) return;
      this.plot?.destroy();
      this.plot = this.node = null;
    };
  }

  #build(lines, signature) {
    this.plot?.destroy();
    this.signature = signature;
    this.lines = lines;
    const rem = parseFloat(getComputedStyle(document.documentElement).fontSize);
    const axis = { stroke: ink("--faint"), grid: { stroke: ink("--line"), width: 1 }, ticks: { show: false }, font: `${0.78 * rem}px ${ink("--sans")}` };
    const options = {
      width: this.node.clientWidth || 300,
      height: this.node.clientHeight || 160,
      legend: { show: false },
      cursor: { y: false, points: { size: 7 }, drag: { x: false, y: false } },
      padding: [8, 8, 0, 0],
      scales: {
        x: { range: () => [this.now_s - this.span_s, this.now_s] },
        y: { range: (_plot, low, high) => this.#range(low, high) },
      },
      axes: [
        { ...axis, grid: { show: false }, space: 6.5 * rem, size: 1.9 * rem, values: (_plot, ticks, _axis, _space, step) => ticks.map((tick) => clock(tick, step < 60)) },
        { ...axis, size: 3.1 * rem, space: 2.4 * rem, values: (_plot, ticks) => ticks.map((tick) => this.spec.text(tick)) },
      ],
      series: [{}, ...lines.map((line) => this.#series(line))],
      bands: this.spec.band ? [{ series: this.spec.band, fill: ink("--miss-wash") }] : [],
      hooks: { setCursor: [() => this.#readValues()] },
    };
    this.plot = new window.uPlot(options, [[], ...lines.map(() => [])], this.node);
    this.plot.root.setAttribute("aria-hidden", "true");
  }

  #series(line) {
    return {
      label: line.label,
      stroke: ink(line.color),
      width: line.width ?? 1.75,
      dash: line.dash,
      fill: line.fill ? ink(line.fill) : undefined,
      points: { show: false },
      paths: line.step ? window.uPlot.paths.stepped({ align: 1 }) : undefined,
    };
  }

  #range(low, high) {
    if (this.spec.range) return this.spec.range(low, high);
    const top = high === null || high === undefined || high <= 0 ? (this.spec.least ?? 1) : high * 1.12;
    return [0, Math.max(top, this.spec.least ?? 0)];
  }

  /** Shows the values under the pointer, or the newest. */
  #readValues() {
    const legend = this.node?.parentElement?.querySelector("[data-reads]");
    if (!legend || !this.plot) return;
    const columns = this.plot.data;
    const at = this.plot.cursor.idx ?? columns[0].length - 1;
    for (const item of legend.children) {
      const line = this.lines.findIndex((candidate) => candidate.name === item.dataset.line);
      const value = line < 0 ? null : columns[line + 1]?.[at];
      item.querySelector("b").textContent = value === null || value === undefined ? "–" : this.spec.text(value);
    }
    const when = legend.parentElement.querySelector("[data-when]");
    if (when) when.textContent = this.plot.cursor.idx == null ? "now" : clock(columns[0][at], true);
  }
}

/** A chart with its title and its legend, which reads the values. */
export function chartBox(chart, { title, key, live, note }) {
  const lines = chart.spec.lines(live.history);
  return h(
    "figure",
    { class: "chart-box", key },
    h("figcaption", {},
      h("span", { class: "chart-title" }, title),
      h("span", { class: "reads", "data-reads": true },
        lines.map((line) => h("span", { key: line.name, class: "read", "data-line": line.name }, h("i", { class: `swatch${line.dash ? " dashed" : ""}`, style: { "--ink": `var(${line.color})` } }), line.label, " ", h("b", { hook: () => undefined }))),
      ),
      chart.spec.band ? h("span", { class: "read" }, h("i", { class: "key-area", "aria-hidden": "true" }), ` ${chart.spec.bandLabel}`) : null,
      h("span", { class: "when", "data-when": true, hook: () => undefined }),
    ),
    h("div", { class: "chart", hook: chart.hook, role: "img", "aria-label": note }),
  );
}

/** The time of day of this browser: `14:05`, or with seconds. */
export function clock(at_s, exact = false) {
  const date = new Date(at_s * 1000);
  const parts = [date.getHours(), date.getMinutes(), ...(exact ? [date.getSeconds()] : [])];
  return parts.map((part) => String(part).padStart(2, "0")).join(":");
}

/** A line of words' height: values between `low` and 1, and where the target is. */
export function sparkline(values, target, label) {
  const known = values.filter((value) => value !== null && value !== undefined);
  if (known.length < 2) return h("span", { class: "faint" }, "–");
  const low = Math.min(...known, 1 - 2 * (1 - target), 0.999);
  const x = (index) => ((index / (values.length - 1)) * 100).toFixed(1);
  const y = (value) => (2 + (1 - (value - low) / (1 - low)) * 20).toFixed(1);
  let path = "";
  values.forEach((value, index) => {
    if (value === null || value === undefined) return;
    const begins = path === "" || values[index - 1] === null || values[index - 1] === undefined;
    path += `${begins ? "M" : "L"}${x(index)} ${y(value)}`;
  });
  return h("svg", { class: "spark", viewBox: "0 0 100 24", preserveAspectRatio: "none", role: "img", "aria-label": label },
    h("line", { class: "spark-target", x1: 0, x2: 100, y1: y(target), y2: y(target) }),
    h("path", { class: "spark-line", d: path }),
  );
}
