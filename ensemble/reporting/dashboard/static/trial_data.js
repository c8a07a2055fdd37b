/** What the views of a search need of the members: trials, their order, the best so far, what was pruned. No DOM. */

import { extent, rankPlaces } from "./scales.js";

const RUNNING = new Set(["running", "placed", "moved", "measuring"]);
const STANDING = new Set(["paused", "stopped", "interrupted"]);

/** How a member's state is drawn: "finished", "running", "standing" (paused, stopped, interrupted), "pruned", "failed", or "waiting". */
export function phaseOf(state) {
  if (state === "finished" || state === "pruned") return state;
  if (state === "failed" || state === "cancelled") return "failed";
  if (RUNNING.has(state)) return "running";
  return STANDING.has(state) ? "standing" : "waiting";
}

/** The members that pass the filter as trials `{ id, number, state, phase, value, params, epoch }`. */
export function collectTrials(store) {
  return store.visible().map((id) => {
    const member = store.members.get(id);
    return {
      id,
      number: member.number,
      state: member.state,
      phase: phaseOf(member.state),
      value: Number.isFinite(member.metric) ? member.metric : null,
      params: member.params ?? {},
      epoch: member.epoch,
    };
  });
}

/** The hyperparameters that differ, as declared; `byImportance`: by importance where it is known, then as declared. */
export function orderedParams(store, byImportance = false) {
  const varied = store.run.varied ?? [];
  const important = byImportance ? (store.importances?.importances ?? []).map(([name]) => name) : [];
  const first = important.filter((name) => varied.includes(name));
  return [...new Set([...first, ...varied])];
}

/** A hyperparameter's value in a trial; undefined where it has none of that name. */
export function paramOf(trial, name) {
  return Object.hasOwn(trial.params, name) ? trial.params[name] : undefined;
}

/** Trials with a value, the best first. */
export function ranked(trials, direction) {
  const sign = direction === "max" ? -1 : 1;
  return trials.filter((each) => each.value !== null).sort((a, b) => sign * (a.value - b.value) || a.number - b.number);
}

/** Places 0 (worst) … 1 (best) of trials by the objective, by id; without a value null. */
export function placesByObjective(trials, direction) {
  const sign = direction === "max" ? 1 : -1;
  const places = rankPlaces(trials.map((each) => (each.value === null ? null : sign * each.value)));
  return new Map(trials.map((each, i) => [each.id, places[i]]));
}

/** `[number, best value after that trial]` of the finished trials by number. */
export function bestSoFar(trials, direction) {
  const better = direction === "max" ? Math.max : Math.min;
  const line = [];
  for (const each of [...trials].sort((a, b) => a.number - b.number)) {
    if (each.phase !== "finished" || each.value === null) continue;
    line.push([each.number, line.length ? better(line.at(-1)[1], each.value) : each.value]);
  }
  return line;
}

/** Smallest and largest value that is worth showing: outliers beyond four spreads of the middle half are left out. */
export function plainRange(values) {
  const sorted = [...values].sort((a, b) => a - b);
  if (sorted.length < 8) return extent(sorted);
  const [low, high] = [sorted[Math.floor(sorted.length / 4)], sorted[Math.floor((3 * sorted.length) / 4)]];
  const reach = 4 * (high - low);
  return extent(sorted.filter((each) => reach === 0 || (each >= low - reach && each <= high + reach)));
}

/** A place beside others of the same value, the same at each drawing. */
export function asideOf(trial) {
  return ((trial.number * 0.6180339887) % 1) - 0.5;
}
