/** What the views of a search need of the members: trials, their order, the best so far, what was pruned. No DOM. */

import { cpu, joules, score, visible } from "./format.js";
import { extent, rankPlaces } from "./scales.js";

const RUNNING = new Set(["running", "placed", "moved", "measuring"]);
const STANDING = new Set(["paused", "stopped", "interrupted"]);

function finite(given) {
  return typeof given === "number" && Number.isFinite(given) ? given : null;
}

/** How a member's state is drawn: "finished", "running", "standing" (paused, stopped, interrupted), "pruned", "failed", or "waiting". */
export function phaseOf(state) {
  if (state === "finished" || state === "pruned") return state;
  if (state === "failed" || state === "cancelled") return "failed";
  if (RUNNING.has(state)) return "running";
  return STANDING.has(state) ? "standing" : "waiting";
}

/** The members that pass the filter as trials `{ id, number, state, phase, value, params, epoch, further }`; `further`: by objective beyond the first. */
export function collectTrials(store) {
  return store.visible().map((id) => {
    const member = store.members.get(id);
    return {
      id,
      number: member.number,
      state: member.state,
      phase: phaseOf(member.state),
      value: finite(member.metric),
      params: member.params ?? {},
      epoch: member.epoch,
      further: (member.further ?? []).map(finite),
    };
  });
}

/** The hyperparameters that differ, as declared; `byImportance`: by importance where it is known, then as declared. */
export function orderedParams(store, byImportance = false) {
  if (!byImportance) return [...(store.run.varied ?? [])];
  const important = (store.importances?.importances ?? []).map(([name]) => name);
  const varied = store.run.varied ?? [];
  const known = new Set(varied);
  const first = important.filter((name) => known.has(name));
  const taken = new Set(first);
  return [...first, ...varied.filter((name) => !taken.has(name))];
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

/** The finished trials that have a value of each objective, and those of them that the run says none beats, in its order. */
export function paretoFront(trials, run) {
  const judged = trials.filter((each) => each.phase === "finished" && each.value !== null && each.further.every((value) => value !== null));
  const byId = new Map(judged.map((each) => [each.id, each]));
  return { judged, front: (run.front ?? []).filter((id) => byId.has(id)).map((id) => byId.get(id)) };
}

/** What an objective of a run beyond the first is called. */
export function objectiveTitle(run, name) {
  if (name === "energy_j") return `joules (${run.further_origin})`;
  if (name === "cpu_s") return "CPU-seconds (measured)";
  return Object.hasOwn(run.figures ?? {}, name) ? run.figures[name].title : visible(name);
}

/** A value of such an objective in words; on an axis the title says where it is from. */
export function objectiveAmount(run, name, value, isAxis = false) {
  if (name === "energy_j") return joules(value, isAxis ? undefined : run.further_origin);
  return name === "cpu_s" ? cpu(value) : score(value);
}

/**
 * What was pruned when: by number of finished epochs, how many trials got there, how many were pruned there.
 * Returns `{ rungs: [{ epoch, reached, pruned }], pruned: [{ trial, epoch, value }], passed: [{ trial, epoch, value }] }`; `passed` are
 * the values at those epochs of trials that went on, from their curves where those are known.
 */
export function pruningOf(trials, curves, objective) {
  const pruned = trials.filter((each) => each.phase === "pruned").map((trial) => ({ trial, epoch: trial.epoch, value: trial.value }));
  const epochs = [...new Set(pruned.map((each) => each.epoch))].sort((a, b) => a - b);
  const rungs = epochs.map((epoch) => ({
    epoch,
    reached: trials.filter((each) => each.epoch >= epoch).length,
    pruned: pruned.filter((each) => each.epoch === epoch).length,
  }));
  const passed = [];
  for (const trial of trials) {
    const curve = curves !== null && Object.hasOwn(curves.members, trial.id) ? curves.members[trial.id] : null;
    const series = curve?.values[objective];
    if (series === undefined) continue;
    for (const epoch of epochs) {
      if (trial.epoch <= epoch && trial.phase !== "finished") continue;
      const at = curve.epoch.indexOf(epoch - 1); // the curve counts from 0, a member its finished epochs
      const value = at < 0 ? null : finite(series[at]);
      if (value !== null) passed.push({ trial, epoch, value });
    }
  }
  return { rungs, pruned, passed };
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
