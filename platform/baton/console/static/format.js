// Numbers as text. An unknown value is a dash, never a zero.

export const DASH = "–";
const is = (value) => typeof value === "number" && Number.isFinite(value);

/** A measured duration, always to three digits, so that columns line up: `231 ms`, `1.20 s`, `12.0 min`. */
export function seconds(value) {
  if (!is(value)) return DASH;
  if (value === 0) return "0 s";
  const [scaled, unit] = scaledSeconds(value);
  const size = Math.abs(scaled);
  return `${size >= 99.95 ? Math.round(scaled) : scaled.toPrecision(size < 0.995 ? 2 : 3)} ${unit}`;
}

/** A configured duration, as short as it was written: `500 ms`, `10 s`. */
export function objective(value) {
  if (!is(value)) return DASH;
  const [scaled, unit] = scaledSeconds(value);
  return `${digits(scaled, 3)} ${unit}`;
}

function scaledSeconds(value) {
  const size = Math.abs(value);
  if (size !== 0 && size < 0.0009995) return [value * 1e6, "µs"];
  if (size !== 0 && size < 0.9995) return [value * 1e3, "ms"];
  if (size < 99.95) return [value, "s"];
  if (size < 5400) return [value / 60, "min"];
  return size < 172800 ? [value / 3600, "h"] : [value / 86400, "d"];
}

/** A number to `count` significant digits, without trailing zeros after the point. */
export function digits(value, count) {
  if (!is(value)) return DASH;
  const text = Number(value.toPrecision(count));
  return text.toLocaleString("en", { maximumSignificantDigits: Math.max(count, 1), useGrouping: true });
}

/** A rate with one decimal below a hundred. */
export function rate(value) {
  if (!is(value)) return DASH;
  const places = Math.abs(value) < 100 ? 1 : 0;
  return value.toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places });
}

export function whole(value) {
  return is(value) ? Math.round(value).toLocaleString("en") : DASH;
}

/** `12.4k`, `3.1M`. */
export function short(value) {
  if (!is(value)) return DASH;
  const size = Math.abs(value);
  if (size < 1000) return digits(value, 3);
  if (size < 1e6) return `${digits(value / 1e3, 3)}k`;
  return size < 1e9 ? `${digits(value / 1e6, 3)}M` : `${digits(value / 1e9, 3)}G`;
}

/** A share as a percentage that does not round a miss away: 99.96 % is not 100 %. */
export function share(value, places = 1) {
  if (!is(value)) return DASH;
  let text = (value * 100).toFixed(places);
  if (value < 1 && Number(text) === 100) text = (Math.floor(value * 1e4) / 100).toFixed(2);
  return `${text} %`;
}

export function bytes(value, count = 3) {
  if (!is(value)) return DASH;
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let step = 0;
  let left = value;
  while (Math.abs(left) >= 999.5 && step < units.length - 1) {
    left /= 1000;
    step += 1;
  }
  return `${digits(left, count)} ${units[step]}`;
}

/** Ages in whole seconds while they are short: a list should not flicker. */
export function ago(age_s) {
  if (!is(age_s)) return DASH;
  if (age_s < 1) return "now";
  if (age_s < 60) return `${Math.floor(age_s)} s ago`;
  if (age_s < 3600) return `${Math.floor(age_s / 60)} min ago`;
  return `${digits(age_s / 3600, 2)} h ago`;
}

/** `p-1`, or `p-1 → d-2` when it is handed off. */
export function route(record, name = (id) => id) {
  if (!record?.decode_replica) return DASH;
  const to = name(record.decode_replica);
  return record.mode === "local" || !record.prefill_replica ? to : `${name(record.prefill_replica)} → ${name(record.decode_replica)}`;
}

/** The part of a replica's id that distinguishes it: the text after the last `#`. */
export function shortId(id) {
  return String(id ?? "").split("#").pop() || DASH;
}

export function words(name) {
  return String(name ?? "").replaceAll("_", " ");
}
