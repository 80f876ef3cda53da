// The stream of server-sent events: its topics, their newest data, and its connection state.

const STALE_AFTER_S = 6;
export const HISTORY_S = 1800;

export class Live {
  /** `onChange` is called after every event, and when the state changes. */
  constructor(onChange) {
    this.onChange = onChange;
    this.latest = new Map();
    this.troubles = new Map();
    this.history = { at_s: [] };
    this.state = "connecting";
    this.lastAt = performance.now();
    this.topics = "";
    setInterval(() => this.#check(), 1000);
  }

  /** Watch these; a stream that watches the same goes on. */
  watch(topics) {
    const wanted = [...topics].sort().join(",");
    if (wanted === this.topics && this.source) return;
    this.topics = wanted;
    for (const source of this.troubles.keys()) if (source !== "overview") this.troubles.delete(source);
    this.#open();
  }

  /** The page is hidden: close the stream until `watch`. */
  pause() {
    this.source?.close();
    this.source = null;
    this.state = "connecting";
  }

  /** The server's clock now, in its seconds. */
  now() {
    return performance.now() / 1000 + (this.offset ?? 0);
  }

  get(topic) {
    return this.latest.get(topic)?.data;
  }

  /** Seconds since the newest data of a topic. */
  age(topic) {
    const found = this.latest.get(topic);
    return found ? (performance.now() - found.at) / 1000 : 0;
  }

  #open() {
    this.source?.close();
    clearTimeout(this.retry);
    const source = new EventSource(`events?topics=${encodeURIComponent(this.topics)}`);
    this.source = source;
    source.addEventListener("hello", (event) => this.#onHello(JSON.parse(event.data)));
    source.addEventListener("trouble", (event) => this.#onTrouble(JSON.parse(event.data)));
    for (const topic of ["overview", "fleet", "links", "latest", "missed", "slowest", "ticks"])
      source.addEventListener(topic, (event) => this.#onTopic(topic, JSON.parse(event.data)));
    source.onerror = () => this.#failed(source);
  }

  #onHello(message) {
    this.offset = message.now_s - performance.now() / 1000;
    this.history = message.history.at_s ? message.history : { at_s: [] };
    this.#alive("live");
  }

  #onTopic(topic, data) {
    this.latest.set(topic, { data, at: performance.now() });
    if (topic === "overview") this.#point(data.point);
    this.#alive("live");
  }

  #onTrouble(message) {
    if (message.reason === null) this.troubles.delete(message.source);
    else this.troubles.set(message.source, { reason: message.reason, since: performance.now() - message.for_s * 1000 });
    this.#alive("live");
  }

  /** The point of the controller's last tick, unless it is already there. */
  #point(point) {
    if (!point) return;
    const columns = this.history;
    const last = columns.at_s.at(-1);
    if (last !== undefined && point.at_s <= last) return;
    const length = columns.at_s.length;
    for (const name of Object.keys(point)) columns[name] ??= new Array(length).fill(null);
    for (const name of Object.keys(columns)) {
      columns[name].push(point[name] ?? null);
    }
    while (point.at_s - columns.at_s[0] > HISTORY_S) for (const column of Object.values(columns)) column.shift();
  }

  #alive(state) {
    this.lastAt = performance.now();
    this.state = state;
    this.onChange();
  }

  /** EventSource tries again by itself, but not after a response that is no stream. */
  #failed(source) {
    if (source !== this.source) return;
    this.state = "lost";
    if (source.readyState === EventSource.CLOSED) this.retry = setTimeout(() => this.#open(), 5000);
    this.onChange();
  }

  #check() {
    if (this.state === "live" && performance.now() - this.lastAt > STALE_AFTER_S * 1000) this.state = "stale";
    this.onChange();
  }
}
