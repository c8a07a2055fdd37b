/** Names and directions of the figures by which models are judged, as the run's documents describe them. */

import { score } from "./format.js";

/** The figure of this name among `figures`, a list or an object by name; one without a direction where it is not there. */
export function findFigure(figures, name) {
  const found = Array.isArray(figures) ? figures.find((each) => each.name === name) : figures != null && Object.hasOwn(figures, name) ? figures[name] : undefined;
  return found ?? { name, label: name, title: name, direction: "", better: null, nominal: null };
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

/** An interval as "0.8861 … 0.9405", or that the figure is 0 within noise; empty where there is none. */
export function intervalWords(interval) {
  if (interval && !interval[0] && !interval[1]) return "0 within noise";
  return interval ? `${score(interval[0])} … ${score(interval[1])}` : "";
}
