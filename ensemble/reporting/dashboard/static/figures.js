/** Names and directions of the figures by which models are judged, as the run's documents describe them. */

import { gain, score, visible } from "./format.js";

const UNITS = { nats: " in nats", target: " in units of the target" };

/** The figure of this name among `figures`, a list or an object by name; one without a direction where it is not there. */
export function findFigure(figures, name) {
  const found = Array.isArray(figures) ? figures.find((each) => each.name === name) : figures != null && Object.hasOwn(figures, name) ? figures[name] : undefined;
  return found ?? { name, label: name, better: null, unit: "", nominal: null };
}

/** A figure's name and how to read it: "NLL in nats (lower is better)". */
export function heading(figure) {
  const words = betterWords(figure);
  return `${visible(figure.label)}${UNITS[figure.unit] ?? ""}${words ? ` (${words})` : ""}`;
}

/** In which direction a figure is better, in words; empty where nobody said. */
export function betterWords({ better, nominal }) {
  if (better === "nominal") return `${nominal} is right`;
  return better === null ? "" : `${better} is better`;
}

/** Whether one value is better than another; null where they are equal or no direction is known. */
export function isBetter({ better, nominal }, value, than) {
  if (!Number.isFinite(value) || !Number.isFinite(than) || better === null) return null;
  const [ours, theirs] = better === "nominal" ? [Math.abs(value - nominal), Math.abs(than - nominal)] : [value, than];
  if (ours === theirs) return null;
  return better === "higher" ? ours > theirs : ours < theirs;
}

/** Compares members by a figure, the best first; those without it last. */
export function byFigure(figure) {
  return (a, b) => {
    const better = isBetter(figure, a, b);
    if (better !== null) return better ? -1 : 1;
    return Number(Number.isFinite(b)) - Number(Number.isFinite(a));
  };
}

/** A combined model's figure beside that of its best member: `[words, tone]`; no tone where it is noise. */
export function compareToBest(figure, value, best, noise) {
  const words = `${gain(value, best)} to the best member`;
  if (noise?.includes(figure.name)) return [`${words}, within noise`, ""];
  const better = isBetter(figure, value, best);
  return [words, better === null ? "" : better ? "good" : "bad"];
}

/** An interval as "0.8861 … 0.9405", or that the figure is 0 within noise; empty where there is none. */
export function intervalWords(interval) {
  if (interval && !interval[0] && !interval[1]) return "0 within noise";
  return interval ? `${score(interval[0])} … ${score(interval[1])}` : "";
}

/** A label that begins a line. */
export function capital(label) {
  const text = visible(label);
  return text.charAt(0).toUpperCase() + text.slice(1);
}
