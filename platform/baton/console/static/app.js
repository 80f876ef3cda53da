// The page: sections, keyboard, theme, and when to draw.

import { config } from "./config.js";
import { h, patch } from "./dom.js";
import { fleet } from "./fleet.js";
import { ago, seconds } from "./format.js";
import { Live } from "./live.js";
import { overview } from "./overview.js";
import { forgetOffer, playground } from "./playground.js";
import { requests } from "./requests.js";
import { scaling } from "./scaling.js";

const SECTIONS = { overview, fleet, requests, scaling, config, playground };
const NAMES = Object.keys(SECTIONS);
const THEMES = ["system", "light", "dark"];
const HIDDEN_S = 30;
const NOUNS = { overview: "the fleet", links: "pairs", requests: "requests", ticks: "scaling decisions" };

const state = {
  section: "overview", filter: "", filterText: "", order: "latest", open: null, report: null, whole: false,
  pair: null, shown: null, isReading: false, config: { text: null, error: "", generation: undefined },
};
const live = new Live(() => soon());
const ctx = { live, state, set: (change) => { Object.assign(state, change); watch(); draw(); }, later: () => soon() };
const main = document.getElementById("main");
let drawn = 0;

// ------------------------------------------------------------------------------ drawing

function soon() {
  if (!drawn) drawn = requestAnimationFrame(draw);
}

function draw() {
  cancelAnimationFrame(drawn);
  drawn = 0;
  const section = SECTIONS[state.section];
  state.isReading = Boolean(main.querySelector("[data-reading]:hover, [data-reading] :focus-visible"));
  ctx.filterBox = section.filters ? filterBox(section.filters) : null;
  patch(main, [h("div", { class: `page page-${state.section}`, key: state.section }, section.view(ctx))]);
  section.afterDraw?.(ctx);
  header();
  freshConfig();
}

function filterBox(what) {
  return h("label", { class: "filter", key: "filter" },
    h("span", { class: "sr" }, `Filter ${what}`),
    h("input", { type: "search", id: "filter", placeholder: `Filter ${what}`, autocomplete: "off", spellcheck: "false", "aria-keyshortcuts": "/", on: { input: (event) => setFilter(event.target.value) } }),
    h("kbd", { "aria-hidden": "true" }, "/"));
}

function setFilter(text) {
  state.filterText = text.trim();
  ctx.set({ filter: state.filterText.toLowerCase() });
}

function header() {
  const summary = live.get("overview")?.overview;
  for (const link of document.querySelectorAll("[data-section]")) {
    if (link.dataset.section === state.section) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  patch(document.getElementById("about"), summary ? [h("span", { title: `baton ${summary.baton}, generation ${summary.generation} of its configuration` }, summary.model ?? ""), summary.up_s == null ? "" : h("span", { class: "faint" }, ` up ${seconds(summary.up_s + live.age("overview"))}`)] : []);
  const [tone, text] = connectionStatus();
  const stateBox = document.getElementById("state");
  stateBox.className = `state ${tone}`;
  if (stateBox.textContent !== text) stateBox.textContent = text;
  document.title = tone === "ok" ? `${summary?.model ?? "baton"} · baton` : `✕ ${text} · baton`;
  patch(document.getElementById("troubles"), [...live.troubles].map(([source, trouble]) => h("p", { key: source }, h("b", {}, `No answer about ${NOUNS[source] ?? source}`), `: ${trouble.reason}`, h("span", { class: "faint", "aria-hidden": "true" }, ` since ${ago((performance.now() - trouble.since) / 1000).replace(" ago", "")}`))));
}

function connectionStatus() {
  if (live.troubles.has("overview")) return ["bad", "no answer"];
  if (live.state === "live") return ["ok", "live"];
  if (live.state === "connecting") return ["wait", "connecting"];
  return ["bad", live.state === "stale" ? "no new data" : "connection lost"];
}

// ------------------------------------------------------------------------------ address

function go() {
  const [name, ...rest] = location.hash.slice(1).split("/");
  const section = NAMES.includes(name) ? name : "overview";
  if (section !== state.section) {
    Object.assign(state, { filter: "", filterText: "", shown: null });
    const box = document.getElementById("filter");
    if (box) box.value = "";
  }
  if (state.section === "playground" && section !== "playground") forgetOffer();
  state.section = section;
  const id = rest.join("/");
  state.open = section === "requests" && id ? decoded(id) : null;
  if (state.open !== null) loadRequest(state.open);
  watch();
  draw();
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function watch() {
  live.watch(SECTIONS[state.section].topics(state));
}

async function fetchResponse(path) {
  try {
    return await fetch(path, { headers: { accept: "application/json" } });
  } catch {
    return null;
  }
}

async function loadRequest(id) {
  if (state.report?.id === id && !state.report.error) return;
  state.report = { id, loading: true };
  const answer = await fetchResponse(`api/request?id=${encodeURIComponent(id)}`);
  if (state.open !== id) return;
  const body = answer ? await answer.json().catch(() => null) : null;
  state.report = body?.requests ? { id, requests: body.requests } : { id, error: body?.reason ?? "The controller does not answer." };
  soon();
}

/** Fetches the text when the section opens, and again after a new generation. */
async function freshConfig() {
  const generation = live.get("overview")?.overview.generation ?? null;
  if (state.section !== "config" || state.config.generation === generation) return;
  state.config.generation = generation;
  const answer = await fetchResponse("api/config");
  if (answer?.ok) state.config = { text: await answer.text(), error: "", generation };
  else state.config = { ...state.config, error: (await answer?.json().catch(() => null))?.reason ?? "The controller does not answer." };
  soon();
}

// ------------------------------------------------------------------------------ keyboard

const isTyping = (node) => node instanceof HTMLInputElement || node instanceof HTMLTextAreaElement || node instanceof HTMLSelectElement;

function moveFocus(step) {
  const rows = [...main.querySelectorAll("[data-row]")].filter((row) => row.offsetParent !== null);
  const at = rows.findIndex((row) => row === document.activeElement || row.contains(document.activeElement));
  const next = rows[Math.max(0, Math.min(rows.length - 1, at < 0 ? 0 : at + step))];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
}

function onEscape() {
  const box = document.getElementById("filter");
  if (isTyping(document.activeElement) && document.activeElement !== box) document.activeElement.blur();
  else if (isTyping(document.activeElement)) {
    if (box.value) box.value = "";
    else box.blur();
    setFilter("");
  } else if (state.open !== null) {
    const from = state.open;
    location.hash = "requests";
    requestAnimationFrame(() => [...main.querySelectorAll("[data-row]")].find((row) => row.title === from)?.focus());
  } else if (state.pair !== null) ctx.set({ pair: null });
  else document.activeElement?.blur?.();
}

const KEYS = {
  j: () => moveFocus(1),
  k: () => moveFocus(-1),
  "/": () => document.getElementById("filter")?.focus(),
  "?": () => document.getElementById("keys").showModal(),
  t: () => nextTheme(),
  Escape: () => onEscape(),
};
NAMES.forEach((name, at) => { KEYS[String(at + 1)] = () => { location.hash = name; }; });

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.getElementById("keys").open) return;
  const isFilter = event.target.id === "filter";
  if (isTyping(event.target) && event.key !== "Escape" && !(isFilter && event.key === "Enter")) return;
  if (isFilter && event.key === "Enter") {
    moveFocus(0);
    event.preventDefault();
    return;
  }
  const action = KEYS[event.key];
  if (!action && !SECTIONS[state.section].key?.(event, ctx)) {
    if (event.key === "Enter" && document.activeElement?.matches?.("[data-row]:not(a, button, summary)")) document.activeElement.click();
    return;
  }
  action?.();
  event.preventDefault();
});

// ------------------------------------------------------------------------------ theme

const chosenTheme = () => document.documentElement.dataset.theme ?? "system";

function nextTheme() {
  const next = THEMES[(THEMES.indexOf(chosenTheme()) + 1) % THEMES.length];
  if (next === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem("baton.theme", next);
  } catch {
    // Storage is closed to this page: the choice lasts as long as the page.
  }
  showTheme();
  draw();
}

function showTheme() {
  const names = { system: "Auto", light: "Light", dark: "Dark" };
  const button = document.getElementById("theme");
  button.textContent = names[chosenTheme()];
  button.setAttribute("aria-label", `Theme: ${chosenTheme()}`);
}

// ------------------------------------------------------------------------------ start

document.getElementById("theme").addEventListener("click", nextTheme);
document.getElementById("help").addEventListener("click", () => document.getElementById("keys").showModal());
document.getElementById("keys").addEventListener("click", (event) => { if (event.target === event.currentTarget) event.currentTarget.close(); });
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
window.addEventListener("hashchange", go);
let hidden = 0;
document.addEventListener("visibilitychange", () => {
  clearTimeout(hidden);
  if (document.hidden) hidden = setTimeout(() => live.pause(), HIDDEN_S * 1000);
  else watch();
});
showTheme();
go();
