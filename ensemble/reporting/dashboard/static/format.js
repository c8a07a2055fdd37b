/** Formats durations, rates, joules and other numbers, in the words of the report. Absent values are a dash. */

export const ABSENT = "–";

const CONTROL = /[\u0000-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g;

function grouped(value, digits = 0) {
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** A number to so many significant digits, as Python's `g` writes it: `0.000123`, `1.2e-07`, `1.5e+06`. */
export function significant(value, digits = 3) {
  if (value === 0) return "0";
  const [mantissa, power] = value.toExponential(digits - 1).split("e");
  const exponent = Number(power);
  if (exponent < -4 || exponent >= digits) {
    const short = mantissa.includes(".") ? mantissa.replace(/\.?0+$/, "") : mantissa;
    return `${short}e${exponent < 0 ? "-" : "+"}${String(Math.abs(exponent)).padStart(2, "0")}`;
  }
  const fixed = value.toFixed(Math.max(0, digits - 1 - exponent));
  return fixed.includes(".") ? fixed.replace(/\.?0+$/, "") : fixed;
}

/** `0.4 s`, `12 s`, `3 min 05 s`, `2 h 07 min`, `3 d 4 h`: two units at most. */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return ABSENT;
  if (seconds < 9.95) return `${Math.max(seconds, 0).toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

/** Seconds since a start as `0:07`, `12:30` or `1:02:03`. */
export function clock(seconds) {
  if (!Number.isFinite(seconds)) return ABSENT;
  const whole = Math.max(0, Math.floor(seconds));
  const parts = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60), whole % 60];
  if (parts[0] === 0) parts.shift();
  return parts.map((part, i) => (i ? String(part).padStart(2, "0") : String(part))).join(":");
}

/** A moment of the log as `2026-11-21 18:28` in the reader's zone. */
export function moment(seconds) {
  if (!Number.isFinite(seconds)) return ABSENT;
  const at = new Date(seconds * 1000);
  const two = (value) => String(value).padStart(2, "0");
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}`;
}

/** A number with `digits` significant digits; counts keep all theirs. */
export function number(value, digits = 3) {
  if (!Number.isFinite(value)) return ABSENT;
  const size = Math.abs(value);
  if (Number.isInteger(value) && size >= 10 && size < 1e15) return grouped(value);
  if (size >= 10 ** (digits - 1)) return grouped(value);
  return significant(value, digits);
}

/** `1 member`, `3 members`, `10,000 members`. */
export function count(many, what) {
  return many === 1 ? `1 ${what}` : `${grouped(many)} ${what}s`;
}

/** A metric, to four decimals where it is of order one. */
export function score(value) {
  if (!Number.isFinite(value)) return ABSENT;
  return Math.abs(value) < 100 ? value.toFixed(4) : significant(value, 4);
}

/** CPU-seconds: in seconds up to ten hours, then in CPU-hours. */
export function cpu(seconds) {
  if (!Number.isFinite(seconds)) return ABSENT;
  if (seconds >= 36000) return `${(seconds / 3600).toFixed(1)} CPU-h`;
  return seconds < 100 ? `${seconds.toFixed(1)} s` : `${number(Math.round(seconds))} s`;
}

/** Energy in J, kJ, MJ, GJ with three digits; with its origin where one is given: `201 J (estimated)`. */
export function joules(energy, origin) {
  if (!Number.isFinite(energy)) return ABSENT;
  const [size, unit] = [[1e9, "GJ"], [1e6, "MJ"], [1e3, "kJ"]].find(([each]) => Math.abs(energy) >= each) ?? [1, "J"];
  return `${significant(energy / size, 3)} ${unit}${origin ? ` (${origin})` : ""}`;
}

/** Power in mW, W, kW, MW with three digits. */
export function watts(power) {
  if (!Number.isFinite(power)) return ABSENT;
  if (Math.abs(power) >= 1e6) return `${significant(power / 1e6, 3)} MW`;
  if (Math.abs(power) >= 1e4) return `${significant(power / 1e3, 3)} kW`;
  return `${number(power)} W`;
}

/** Bytes in KiB, MiB, GiB with three digits. */
export function memory(bytes) {
  if (!Number.isFinite(bytes)) return ABSENT;
  const [size, unit] = [[2 ** 30, "GiB"], [2 ** 20, "MiB"]].find(([each]) => bytes >= each) ?? [1024, "KiB"];
  return `${significant(bytes / size, 3)} ${unit}`;
}

/** A share of one as `68 %`, `0.4 %`. */
export function share(part) {
  if (!Number.isFinite(part)) return ABSENT;
  const percent = part * 100;
  return percent !== 0 && Math.abs(percent) < 1 ? `${significant(percent, 1)} %` : `${Math.round(percent)} %`;
}

/** A hyperparameter's value, short. */
export function value(given) {
  if (given === null || given === undefined) return ABSENT;
  if (typeof given === "number") return Number.isInteger(given) ? String(given) : significant(given, 4);
  if (typeof given === "object") return visible(JSON.stringify(given));
  return visible(String(given));
}

/** `lr 0.1, width 32`, in the order declared. */
export function hyperparameters(params) {
  return Object.entries(params ?? {}).map(([name, given]) => `${visible(name)} ${value(given)}`).join(", ");
}

/** Text of so many characters at most. */
export function shorten(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

/** Text with control characters, and those which reverse the order of letters, written out. */
export function visible(text) {
  return String(text).replace(CONTROL, (found) => `\\u${found.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

/** How a figure that Python has declared is written (`ensemble.reporting.columns`). */
export const FORMATS = {
  number,
  score,
  share,
  clock,
  whole: (given) => (given === null || given === undefined ? ABSENT : String(given)),
  tenths: (given) => number(Number.isFinite(given) ? Math.round(given * 10) / 10 : NaN),
};
