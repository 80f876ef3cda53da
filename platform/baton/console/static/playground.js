// A chat with the deployment: answers, their speed, and their replicas.

import { h } from "./dom.js";
import { objective, seconds, shortId, whole } from "./format.js";

const RECORD_TRIES = 6;
const RECORD_WAIT_MS = 500;
const MOST_MESSAGES = 200;

// Kept as long as the page, never in the browser's storage: the key is a secret.
const form = { model: "", system: "", message: "", temperature: "1", max_tokens: "256", key: "" };
const talk = { turns: [], offer: null, error: "", status: "", running: null, asked: false };

export const playground = {
  topics: () => [],
  view(ctx) {
    ask(ctx);
    const { offer } = talk;
    return [
      h("div", { class: "section-head", key: "head" }, h("h1", {}, "Playground"),
        h("p", { class: "faint" }, "Chats with this deployment’s own API, like any client: its requests appear under Requests.")),
      offer === null ? h("p", { class: "empty", key: "wait" }, talk.error || "Loading.")
        : offer.available ? h("div", { class: "playground", key: "on" }, settings(ctx, offer), conversation(ctx, offer))
          : h("p", { class: "empty", key: "off" }, `The chat is not available: ${offer.reason}.`),
    ];
  },
  afterDraw: () => { if (talk.running) follow(); },
};

/** Keeps the newest words in sight, unless the user has scrolled up. */
function follow() {
  const box = document.querySelector(".turns");
  if (box && box.scrollHeight - box.scrollTop - box.clientHeight < 160) box.scrollTop = box.scrollHeight;
}

/** The offer can change with the configuration, so each opening of the section loads it. */
async function ask(ctx) {
  if (talk.asked) return;
  talk.asked = true;
  try {
    const answer = await fetch("api/playground", { headers: { accept: "application/json" } });
    talk.offer = answer.ok ? await answer.json() : null;
    talk.error = answer.ok ? "" : "The controller does not answer.";
  } catch {
    talk.error = "The controller does not answer.";
  }
  form.model = talk.offer?.models?.includes(form.model) ? form.model : talk.offer?.models?.[0] ?? "";
  ctx.set({});
}

export function forgetOffer() {
  talk.asked = false;
}

// ------------------------------------------------------------------------------ the form

function field(name, label, tag, attributes = {}, kids = []) {
  return h("p", { class: "field", key: name }, h("label", { for: `chat-${name}` }, label),
    h(tag, { id: `chat-${name}`, ...attributes, hook: tag === "select" ? undefined : (node) => { node.value = form[name]; }, on: { input: (event) => { form[name] = event.target.value; } } }, kids));
}

function settings(ctx, offer) {
  const open = window.isSecureContext;
  return h("section", { class: "chat-settings", key: "settings", "aria-label": "Settings" },
    offer.models.length > 1 ? field("model", "Model", "select", {}, offer.models.map((name) => h("option", { key: name, value: name, selected: name === form.model }, name))) : null,
    field("system", "System prompt", "textarea", { rows: 3, placeholder: "none" }),
    h("div", { class: "two" },
      field("temperature", "Temperature", "input", { type: "number", min: 0, max: 2, step: "any", inputmode: "decimal" }),
      field("max_tokens", "Max tokens", "input", { type: "number", min: 1, max: 1000000, step: 1, inputmode: "numeric" })),
    offer.takes_key ? [
      field("key", offer.needs_key ? "API key" : "API key (optional)", "input", { type: "password", autocomplete: "off", spellcheck: "false", disabled: !open, "aria-describedby": "chat-key-note" }),
      h("p", { class: open ? "faint tiny" : "warn tiny", id: "chat-key-note", key: "key-note" }, open
        ? "Kept in this page’s memory only, and sent with each chat."
        : "This page is not encrypted, so it takes no key: open it with https, or on the controller’s machine (ssh -L)."),
    ] : null,
    h("button", { type: "button", class: "quiet", key: "new", disabled: !talk.turns.length || Boolean(talk.running), on: { click: () => { talk.turns = []; talk.status = ""; ctx.set({}); } } }, "New conversation"),
  );
}

function conversation(ctx, offer) {
  return h("section", { class: "chat", key: "chat", "aria-label": "Conversation" },
    h("ol", { class: "turns", key: "turns", role: "log", "aria-label": "Messages", "aria-busy": talk.running ? "true" : "false", tabindex: "0" },
      talk.turns.length ? talk.turns.map((turn, at) => message(turn, at)) : h("li", { class: "empty", key: "none" }, "No messages yet.")),
    h("form", { class: "say", key: "say", on: { submit: (event) => { event.preventDefault(); send(ctx, offer); } } },
      h("label", { for: "chat-message", class: "sr" }, "Message"),
      h("textarea", { id: "chat-message", rows: 3, placeholder: "Message (Enter sends, Shift+Enter begins a line)", hook: (node) => { node.value = form.message; }, on: { input: (event) => { form.message = event.target.value; }, keydown: (event) => {
        if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
        event.preventDefault();
        send(ctx, offer);
      } } }),
      talk.running
        ? h("button", { type: "button", class: "primary", key: "stop", on: { click: () => talk.running?.abort() } }, "Stop")
        : h("button", { type: "submit", class: "primary", key: "send" }, "Send")),
    h("p", { class: "faint tiny", role: "status", key: "status" }, talk.status),
  );
}

function message(turn, at) {
  return h("li", { class: `turn is-${turn.role}`, key: String(at) },
    h("p", { class: "author" }, turn.role === "user" ? "You" : "Model"),
    h("p", { class: "text" }, turn.content || (turn.error ? "" : "…")),
    turn.error ? h("p", { class: "bad" }, `✕ ${turn.error}`) : null,
    turn.role === "assistant" ? figures(turn) : null);
}

function figures(turn) {
  const { record } = turn;
  const items = [["TTFT", seconds(turn.ttft_s)], ["TPOT", seconds(turn.tpot_s)], ["output", turn.tokens === null ? "–" : `${whole(turn.tokens)} tokens`]];
  if (record) {
    const places = record.mode === "local" || !record.prefill_replica ? [["ran on", "mixed", record.decode_replica]] : [["prefill on", "prefill", record.prefill_replica], ["decode on", "decode", record.decode_replica]];
    for (const [name, role, id] of places) if (id) items.push([name, h("span", { title: id }, role === "mixed" ? null : h("i", { class: `dot ${role}`, "aria-hidden": "true" }), h("span", { class: "mono" }, shortId(id)))]);
    items.push(["at the ingress", `TTFT ${seconds(record.first_token_s)}, TPOT ${seconds(record.tpot_s)}`]);
  }
  return h("dl", { class: "figures", "data-test": "figures" },
    items.map(([name, value]) => h("div", { key: name }, h("dt", {}, name), h("dd", {}, value))),
    turn.id ? h("div", { key: "link" }, h("dt", {}, "request"), h("dd", {}, h("a", { class: "mono cut", href: `#requests/${encodeURIComponent(turn.id)}`, title: turn.id }, turn.id))) : null);
}

// ------------------------------------------------------------------------------ one chat

/** The error in the form; empty when the form is valid. */
function problem(offer) {
  if (!form.message.trim()) return "Write a message first.";
  const temperature = Number(form.temperature);
  if (form.temperature === "" || !(temperature >= 0 && temperature <= 2)) return "Temperature is a number from 0 to 2.";
  const tokens = Number(form.max_tokens);
  if (!Number.isInteger(tokens) || tokens < 1 || tokens > 1e6) return "Max tokens is a whole number from 1.";
  if (offer.needs_key && !form.key.trim()) return "This deployment needs an API key.";
  return "";
}

async function send(ctx, offer) {
  if (talk.running) return;
  talk.status = problem(offer);
  if (talk.status) {
    ctx.set({});
    return;
  }
  const turn = { role: "assistant", content: "", error: "", id: "", ttft_s: null, tpot_s: null, tokens: null, record: null };
  talk.turns.push({ role: "user", content: form.message.trim() }, turn);
  if (talk.turns.length > MOST_MESSAGES) talk.turns.splice(0, 2);
  form.message = "";
  const box = document.getElementById("chat-message");
  if (box) box.value = "";
  talk.running = new AbortController();
  talk.status = "Waiting for the first token.";
  ctx.set({});
  try {
    await stream(ctx, turn, talk.running.signal);
    talk.status = turn.error ? "Request failed." : `Done: first token after ${objective(turn.ttft_s)}.`;
  } catch (error) {
    turn.error = error.name === "AbortError" ? "" : `connection lost: ${error.message}`;
    talk.status = turn.error ? "Request failed." : "Stopped.";
  }
  talk.running = null;
  ctx.set({});
  if (turn.id) await locate(ctx, turn);
}

async function stream(ctx, turn, signal) {
  const messages = talk.turns.slice(0, -1).filter((turn) => turn.content).map(({ role, content }) => ({ role, content }));
  if (form.system.trim()) messages.unshift({ role: "system", content: form.system.trim() });
  const headers = { "content-type": "application/json", ...(form.key.trim() ? { "x-api-key": form.key.trim() } : {}) };
  const body = JSON.stringify({ model: form.model, messages, temperature: Number(form.temperature), max_tokens: Number(form.max_tokens) });
  const times = { began: performance.now(), first: null, last: null };
  const answer = await fetch("api/chat", { method: "POST", headers, body, signal });
  if (!answer.ok) {
    const text = await answer.text();
    turn.error = reason(text) || `HTTP ${answer.status}`;
    return;
  }
  for await (const event of events(answer.body)) {
    onEvent(event, turn, times);
    if (times.first !== null && talk.status.startsWith("Waiting")) talk.status = "Streaming.";
    ctx.later();
  }
}

function reason(text) {
  try {
    return JSON.parse(text).reason;
  } catch {
    return text.slice(0, 500);
  }
}

function onEvent(event, turn, times) {
  if (event.error) {
    turn.error = event.error.message ?? "the API reports an error";
    return;
  }
  turn.id = event.id ?? turn.id;
  const delta = event.choices?.[0]?.delta ?? {};
  const text = delta.content ?? delta.reasoning_content ?? delta.reasoning ?? "";
  if (text) {
    times.last = performance.now();
    times.first ??= times.last;
    turn.content += text;
    turn.ttft_s = (times.first - times.began) / 1000;
  }
  if (event.usage) {
    turn.tokens = event.usage.completion_tokens;
    if (turn.tokens > 1 && times.first !== null) turn.tpot_s = (times.last - times.first) / 1000 / (turn.tokens - 1);
  }
}

/** The JSON of each server-sent event until `[DONE]`. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

/** The replicas of an answer: the ingress publishes them shortly after its end. */
async function locate(ctx, turn) {
  for (let attempt = 0; attempt < RECORD_TRIES && !turn.record; attempt += 1) {
    try {
      const answer = await fetch(`api/request?id=${encodeURIComponent(turn.id)}`, { headers: { accept: "application/json" } });
      if (answer.ok) turn.record = (await answer.json()).requests.at(-1) ?? null;
    } catch {
      return;
    }
    if (!turn.record) await new Promise((resolve) => setTimeout(resolve, RECORD_WAIT_MS));
  }
  ctx.set({});
  follow();
}
