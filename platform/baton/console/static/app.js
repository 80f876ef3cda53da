// The page: sections, keyboard, theme, and when to draw.

import { config } from "./config.js";
import { h, patch } from "./dom.js";
import { fleet } from "./fleet.js";
import { ago, seconds } from "./format.js";
import { Live } from "./live.js";
import { overview } from "./overview.js";
import { left as leftPlayground, playground } from "./playground.js";
import { requests } from "./requests.js";
import { scaling } from "./scaling.js";

const SECTIONS = { overview, fleet, requests, scaling, config, playground };
const NAMES = Object.keys(SECTIONS);
const THEMES = ["system", "light", "dark"];
const HIDDEN_S = 30;
const NOUNS = { overview: "the fleet", links: "pairs", requests: "requests", ticks: "scaling decisions" };

const state = {
  section: "overview", filter: "", filterText: "", order: "latest", open: null, story: null, whole: false,
  pair: null, shown: null, isReading: false, config: { text: null, why: "", generation: undefined },
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
  section.drew?.(ctx);
  header();
  freshConfig();
}

function filterBox(what) {
  return h("label", { class: "filter", key: "filter" },
    h("span", { class: "sr" }, `Filter ${what}`),
    h("input", { type: "search", id: "filter", placeholder: `Filter ${what}`, autocomplete: "off", spellcheck: "false", "aria-keyshortcuts": "/", on: { input: (event) => filtered(event.target.value) } }),
    h("kbd", { "aria-hidden": "true" }, "/"));
}

function filtered(text) {
  state.filterText = text.trim();
  ctx.set({ filter: state.filterText.toLowerCase() });
}

function header() {
  const told = live.get("overview")?.overview;
  for (const link of document.querySelectorAll("[data-section]")) {
    if (link.dataset.section === state.section) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  patch(document.getElementById("about"), told ? [h("span", { title: `baton ${told.baton}, generation ${told.generation} of its configuration` }, told.model ?? ""), told.up_s == null ? "" : h("span", { class: "faint" }, ` up ${seconds(told.up_s + live.age("overview"))}`)] : []);
  const [tone, text] = standing();
  const said = document.getElementById("state");
  said.className = `state ${tone}`;
  if (said.textContent !== text) said.textContent = text;
  document.title = tone === "ok" ? `${told?.model ?? "baton"} · baton` : `✕ ${text} · baton`;
  patch(document.getElementById("troubles"), [...live.troubles].map(([source, one]) => h("p", { key: source }, h("b", {}, `No answer about ${NOUNS[source] ?? source}`), `: ${one.why}`, h("span", { class: "faint", "aria-hidden": "true" }, ` since ${ago((performance.now() - one.since) / 1000).replace(" ago", "")}`))));
}

function standing() {
  if (live.troubles.has("overview")) return ["bad", "no answer"];
  if (live.state === "live") return ["ok", "live"];
  if (live.state === "connecting") return ["wait", "connecting"];
  return ["bad", live.state === "stale" ? "nothing new" : "connection lost"];
}

// ------------------------------------------------------------------------------ where we are

function go() {
  const [name, ...rest] = location.hash.slice(1).split("/");
  const section = NAMES.includes(name) ? name : "overview";
  if (section !== state.section) {
    Object.assign(state, { filter: "", filterText: "", shown: null });
    const box = document.getElementById("filter");
    if (box) box.value = "";
  }
  if (state.section === "playground" && section !== "playground") leftPlayground();
  state.section = section;
  const id = rest.join("/");
  state.open = section === "requests" && id ? decoded(id) : null;
  if (state.open !== null) tell(state.open);
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

async function asked(path) {
  try {
    return await fetch(path, { headers: { accept: "application/json" } });
  } catch {
    return null;
  }
}

async function tell(id) {
  if (state.story?.id === id && !state.story.why) return;
  state.story = { id, loading: true };
  const answer = await asked(`api/request?id=${encodeURIComponent(id)}`);
  if (state.open !== id) return;
  const told = answer ? await answer.json().catch(() => null) : null;
  state.story = told?.requests ? { id, requests: told.requests } : { id, why: told?.reason ?? "The controller does not answer." };
  soon();
}

/** The text is asked for when it is looked at, and again when another generation holds. */
async function freshConfig() {
  const generation = live.get("overview")?.overview.generation ?? null;
  if (state.section !== "config" || state.config.generation === generation) return;
  state.config.generation = generation;
  const answer = await asked("api/config");
  if (answer?.ok) state.config = { text: await answer.text(), why: "", generation };
  else state.config = { ...state.config, why: (await answer?.json().catch(() => null))?.reason ?? "The controller does not answer." };
  soon();
}

// ------------------------------------------------------------------------------ keyboard

const isTyping = (node) => node instanceof HTMLInputElement || node instanceof HTMLTextAreaElement || node instanceof HTMLSelectElement;

function moved(step) {
  const rows = [...main.querySelectorAll("[data-row]")].filter((row) => row.offsetParent !== null);
  const at = rows.findIndex((row) => row === document.activeElement || row.contains(document.activeElement));
  const next = rows[Math.max(0, Math.min(rows.length - 1, at < 0 ? 0 : at + step))];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
}

function escaped() {
  const box = document.getElementById("filter");
  if (isTyping(document.activeElement) && document.activeElement !== box) document.activeElement.blur();
  else if (isTyping(document.activeElement)) {
    if (box.value) box.value = "";
    else box.blur();
    filtered("");
  } else if (state.open !== null) {
    const from = state.open;
    location.hash = "requests";
    requestAnimationFrame(() => [...main.querySelectorAll("[data-row]")].find((row) => row.title === from)?.focus());
  } else if (state.pair !== null) ctx.set({ pair: null });
  else document.activeElement?.blur?.();
}

const KEYS = {
  j: () => moved(1),
  k: () => moved(-1),
  "/": () => document.getElementById("filter")?.focus(),
  "?": () => document.getElementById("keys").showModal(),
  t: () => nextTheme(),
  Escape: () => escaped(),
};
NAMES.forEach((name, at) => { KEYS[String(at + 1)] = () => { location.hash = name; }; });

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.getElementById("keys").open) return;
  const isFilter = event.target.id === "filter";
  if (isTyping(event.target) && event.key !== "Escape" && !(isFilter && event.key === "Enter")) return;
  if (isFilter && event.key === "Enter") {
    moved(0);
    event.preventDefault();
    return;
  }
  const does = KEYS[event.key];
  if (!does && !SECTIONS[state.section].key?.(event, ctx)) {
    if (event.key === "Enter" && document.activeElement?.matches?.("[data-row]:not(a, button, summary)")) document.activeElement.click();
    return;
  }
  does?.();
  event.preventDefault();
});

// ------------------------------------------------------------------------------ theme

const wish = () => document.documentElement.dataset.theme ?? "system";

function nextTheme() {
  const next = THEMES[(THEMES.indexOf(wish()) + 1) % THEMES.length];
  if (next === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem("baton.theme", next);
  } catch {
    // Storage is closed to this page: the choice lasts as long as the page.
  }
  sayTheme();
  draw();
}

function sayTheme() {
  const names = { system: "Auto", light: "Light", dark: "Dark" };
  const button = document.getElementById("theme");
  button.textContent = names[wish()];
  button.setAttribute("aria-label", `Theme: ${wish()}`);
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
  if (document.hidden) hidden = setTimeout(() => live.rest(), HIDDEN_S * 1000);
  else watch();
});
sayTheme();
go();
