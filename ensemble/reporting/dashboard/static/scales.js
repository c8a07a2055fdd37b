/** Scales and ticks of hand-drawn axes: linear, logarithmic, or one place for each value. Pure; pixels come from outside. */

import { clock, significant, value } from "./format.js";

const MOST_LABELS = 14;
const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];

/** A value's name as a category: what tells values apart, numbers and texts alike. */
export function keyOf(given) {
  return typeof given === "string" ? given : JSON.stringify(given ?? null);
}

/** Smallest and largest of numbers; without any 0 and 1. */
export function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const each of values) {
    if (each < low) low = each;
    if (each > high) high = each;
  }
  return low <= high ? [low, high] : [0, 1];
}

/**
 * Maps the values `lo` … `hi` to the pixels `from` … `to`: `at(value)`, and back: `back(pixel)`. A logarithmic scale wants positive
 * values; neither looks whether it got some.
 */
export function spanScale(lo, hi, from, to, log = false) {
  const [a, b] = log ? [Math.log(lo), Math.log(hi)] : [lo, hi];
  const slope = b === a ? 0 : (to - from) / (b - a);
  const middle = (from + to) / 2;
  return {
    lo, hi, log,
    at: (given) => (slope === 0 ? middle : from + slope * ((log ? Math.log(given) : given) - a)),
    back: (pixel) => {
      const found = slope === 0 ? a : a + (pixel - from) / slope;
      return log ? Math.exp(found) : found;
    },
  };
}

/**
 * A scale from values to pixels `from` … `to`.
 * `options`: `kind`, `values` (all that is to be shown), `zero` (begin at 0), `pad` (share of the span added at both
 * ends), `ticks` (how many are wanted), `whole` (whole numbers only), `label` (of a tick).
 * Returns `{ kind, domain, at(value) -> px|null, back(px) -> value, ticks: [{ at, label }] }`.
 */
export function makeScale(options, from, to) {
  if (options.kind === "category") return categoryScale(options, from, to);
  const log = options.kind === "log";
  const known = options.values.filter((each) => Number.isFinite(each) && (!log || each > 0));
  let [low, high] = known.length ? extent(known) : log ? [1, 10] : [0, 1];
  if (options.zero && !log) [low, high] = [Math.min(0, low), Math.max(0, high)];
  const [first, last] = padded(low, high, options.pad ?? 0, log);
  const scale = spanScale(options.zero && low === 0 && high > 0 ? 0 : first, last, from, to, log);
  const at = (given) => (!Number.isFinite(given) || (log && given <= 0) ? null : scale.at(given));
  const places = log ? logTicks(scale.lo, last, options.ticks ?? 5) : linearTicks(scale.lo, last, options.ticks ?? 5, options.whole);
  const label = options.label ?? tickText;
  return { kind: options.kind, domain: [scale.lo, last], at, back: scale.back, ticks: places.map((each) => ({ at: at(each), label: label(each) })) };
}

function categoryScale(options, from, to) {
  const found = new Map(options.values.map((each) => [keyOf(each), each]));
  const order = [...found.keys()].sort((a, b) => compareValues(found.get(a), found.get(b)));
  const places = new Map(order.map((key, i) => [key, from + ((i + 0.5) / order.length) * (to - from)]));
  const every = Math.ceil(order.length / (options.ticks ? Math.max(options.ticks, 2) * 2 : MOST_LABELS));
  return {
    kind: "category",
    domain: order.map((key) => found.get(key)),
    at: (given) => places.get(keyOf(given)) ?? null,
    back: (px) => found.get(order[Math.max(0, Math.min(order.length - 1, Math.floor(((px - from) / (to - from)) * order.length)))]),
    ticks: order.filter((_, i) => i % every === 0).map((key) => ({ at: places.get(key), label: value(found.get(key)) })),
  };
}

/** Numbers by size, then all else by its name. */
export function compareValues(a, b) {
  if (Number.isFinite(a) && Number.isFinite(b)) return a - b;
  if (Number.isFinite(a) !== Number.isFinite(b)) return Number.isFinite(a) ? -1 : 1;
  return keyOf(a).localeCompare(keyOf(b), "en", { numeric: true });
}

/** A step of 1, 2 or 5 times a power of ten, so that about `most` of them cover `span`. */
export function niceStep(span, most) {
  const rough = span / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * ([1, 2, 5].find((each) => each * power >= rough * 0.999) ?? 10);
}

/** Round values between `lo` and `hi`: about `most` of them, whole ones only where `whole` says so. */
export function linearTicks(lo, hi, most = 6, whole = false) {
  if (!(hi > lo)) return [lo];
  const step = Math.max(niceStep(hi - lo, most), whole ? 1 : 0);
  const first = Math.ceil(lo / step - 1e-9);
  const last = Math.floor(hi / step + 1e-9);
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

/** Powers of ten between `lo` and `hi`, with 2 and 5 between them where they are few; round values within one decade. */
export function logTicks(lo, hi, most = 6) {
  const [first, last] = [Math.ceil(Math.log10(lo) - 1e-9), Math.floor(Math.log10(hi) + 1e-9)];
  const decades = last - first + 1;
  if (decades <= 1 && hi / lo < 8) return linearTicks(lo, hi, most);
  const every = Math.max(1, Math.ceil(decades / most));
  const mantissas = decades <= most / 3 ? [1, 2, 5] : [1];
  const found = [];
  for (let power = first - 1; power <= last; power += 1) {
    if (mantissas.length === 1 && (power - first) % every !== 0) continue;
    for (const each of mantissas) found.push(Number((each * 10 ** power).toPrecision(12)));
  }
  return found.filter((value) => value >= lo * 0.999999 && value <= hi * 1.000001);
}

/** Round seconds between `lo` and `hi`. */
export function timeTicks(lo, hi, most = 6) {
  const span = hi - lo;
  if (!(span > 0)) return [lo];
  if (span / most < 1) return linearTicks(lo, hi, most);
  const step = TIME_STEPS.find((each) => each >= span / most) ?? niceStep(span / 604800, most) * 604800;
  const first = Math.ceil(lo / step);
  return Array.from({ length: Math.floor(hi / step) - first + 1 }, (_, i) => (first + i) * step);
}

/** A tick's value, as short as it can be told from its neighbours. */
export function tickText(given) {
  const size = Math.abs(given);
  if (size >= 1e15 || (size < 1e-3 && size > 0)) return significant(given, 3);
  if (size < 1e4) return String(Number(given.toPrecision(6)));
  const [unit, word] = size >= 1e9 ? [1e9, "G"] : size >= 1e6 ? [1e6, "M"] : [1e3, "k"];
  return `${significant(given / unit, 4)}${word}`;
}

/** Seconds since a start at a tick; fractions of a second where ticks are so close. */
export function timeText(seconds) {
  return Number.isInteger(seconds) ? clock(seconds) : `${Number(seconds.toPrecision(6))} s`;
}

/** Lengthens a span of values at both ends by a share of it; on a logarithmic axis by a factor. */
export function padded(lo, hi, share, log = false) {
  if (log) {
    const factor = hi > lo ? (hi / lo) ** share : 2;
    return [lo / factor, hi * factor];
  }
  const more = hi > lo ? (hi - lo) * share : Math.abs(lo) * 0.05 || 1;
  return [lo - more, hi + more];
}
