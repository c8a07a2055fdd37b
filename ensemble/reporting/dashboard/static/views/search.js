/** The view "Search": what each hyperparameter does to the objective, which trials were pruned, what is best so far. */

import { Chart } from "../canvas_chart.js";
import { card } from "../card.js";
import { chooseKind, rampColour } from "../scales.js";
import { fill, h, setText } from "../dom.js";
import { count, hyperparameters, score, share, value, visible } from "../format.js";
import { ParallelAxes } from "../parallel_axes.js";
import { HIGHLIGHT, NEUTRAL, STATES } from "../store.js";
import { asideOf, bestSoFar, collectTrials, orderedParams, paramOf, placesByObjective, plainRange, ranked } from "../trial_data.js";
import { Plots } from "./task_plots.js";

const MOST_SLICES = 12;
const MOST_AXES = 14;
const OWN_COLOURS = 10; // so many selected trials have their own colours
const MANY = 300; // trials with small marks
const MANY_AT_ONE_PLACE = 60; // trials from which on equal values are spread over the whole room of their place
const PHASES = [["finished", "finished", "dot"], ["running", "still running", "ring"], ["standing", "paused, stopped or interrupted", "ring"], ["pruned", "pruned", "cross"], ["failed", "failed or cancelled", "ring"]];
const PHASE_COLOURS = { finished: STATES.finished, running: STATES.running, standing: STATES.paused, pruned: STATES.pruned, failed: STATES.failed, waiting: STATES.waiting };
const FITS = { bestK: (given) => Number.isInteger(given) && given > 0, hidden: Array.isArray, ranges: Array.isArray, kinds: (given) => given instanceof Object };
const DASHES = { finished: null, running: [7, 4], standing: [4, 4], pruned: [2, 3], failed: [1, 4] };

export const searchView = {
  id: "search",
  title: "Search",
  needs: ["importances"],
  shown: (store) => store.run !== null && store.members.size > 1 && (store.run.mode === "search" || (store.run.varied ?? []).length > 0),
  mount: (root, page) => new SearchView(root, page),
};

class SearchView {
  constructor(root, page) {
    this.page = page;
    const set = page.settings({ bestK: null, hidden: [], ranges: null, kinds: {}, allAxes: false, byImportance: false }, FITS);
    this.bestK = set.bestK; // null: all
    this.hidden = new Set(set.hidden); // phases that the reader switched off
    this.brushed = set.ranges === null ? null : page.store.selection; // what the ranges select
    this.allAxes = set.allAxes;
    this.byImportance = set.byImportance; // the reader asks for it: axes do not move by themselves
    const pick = (id) => page.store.toggle(id);
    this.axes = new ParallelAxes({
      pick,
      hover: (id) => page.store.setHover(id),
      onBrush: (ids) => this.select(ids),
      onScale: () => page.set({ kinds: Object.fromEntries(this.axes.kinds) }),
    });
    this.axes.kinds = new Map(Object.entries(set.kinds));
    this.axes.setRanges(set.ranges ?? []);
    this.parallel = card({ title: "Hyperparameters and the objective", table: () => this.tabulateTrials() });
    this.importances = card({ title: "Importance of hyperparameters", width: "rest", table: () => this.tabulateImportances() });
    const chart = (title, options) => new Chart({ title, pick, height: 300, ...options });
    this.history = chart("Trials in order", { width: "most", table: () => this.tabulateTrials(true), reading: "The objective of each trial, and the best that was known after each finished one." });
    this.plots = new Plots(page, { document: "importances", isShown: (id) => this.shown.has(id), isPale: (id) => !this.isStrong(id) });
    this.slices = new Map();
    this.sliceGrid = h("div", { class: "grid" });
    this.sliceHead = h("h2", {}, "Each hyperparameter against the objective");
    this.sliceNote = h("p", { class: "reading" });
    fill(this.parallel.body, this.buildControls(), this.axes.root, this.axes.ranges);
    fill(root, h("div", { class: "grid" }, this.parallel.root, this.history.card.root, this.importances.root), h("div", { class: "below" }, this.plots.root),
      this.sliceHead, this.sliceNote, this.sliceGrid);
    this.first = true;
  }

  close() {
    for (const each of [this.axes, this.history, this.plots, ...this.slices.values()]) each.close();
  }

  buildControls() {
    this.slider = h("input", { type: "range", min: 1, max: 1, value: 1, "aria-label": "Show the best trials only: how many", oninput: () => this.setBest(Number(this.slider.value)), onchange: () => this.page.set({ bestK: this.bestK }) });
    this.sliderText = h("output", { class: "figures" });
    this.waiting = h("span", { class: "chart-key", "data-phase": "waiting", hidden: true });
    this.phaseButtons = new Map(PHASES.map(([phase, word]) => [phase, h("button", { type: "button", class: "phase", "data-phase": phase, onclick: () => this.flip(phase) }, word)]));
    this.clear = h("button", { type: "button", onclick: () => this.select(null) }, "clear ranges");
    this.ramp = h("span", { class: "ramp", "aria-hidden": "true" }, [0, 0.2, 0.4, 0.6, 0.8, 1].map((place) => h("span", { style: { background: rampColour(place) } })));
    this.more = h("button", { type: "button", onclick: () => this.showAll() });
    this.importance = h("button", { type: "button", class: "minor", "aria-pressed": "false", hidden: true, onclick: () => this.order() }, "by importance");
    return h("div", { class: "figure-tools" },
      h("label", { class: "choice slider" }, "Best", this.slider, this.sliderText),
      h("span", { class: "phases", role: "group", "aria-label": "Trials drawn" }, [...this.phaseButtons.values()], this.waiting),
      h("span", { class: "chart-key" }, "worst", this.ramp, "best"), this.clear, this.importance, this.more);
  }

  setBest(k) {
    this.bestK = k >= Number(this.slider.max) ? null : k;
    this.redraw();
  }

  flip(phase) {
    if (!this.hidden.delete(phase)) this.hidden.add(phase);
    this.page.set({ hidden: [...this.hidden] });
    this.redraw();
  }

  order() {
    this.byImportance = !this.byImportance;
    this.page.set({ byImportance: this.byImportance });
    this.redraw();
  }

  showAll() {
    this.allAxes = !this.allAxes;
    this.page.set({ allAxes: this.allAxes });
    this.redraw();
  }

  redraw() {
    this.collect();
    this.drawParallel();
    this.reselect();
    this.drawFigures();
  }

  /** Selects what the ranges hold; null where there is none any more. */
  select(ids) {
    this.brushed = ids === null ? null : new Set(ids);
    if (ids === null) this.axes.clearBrushes();
    this.page.set({ ranges: ids === null ? null : this.axes.listRanges() });
    this.page.store.select(ids ?? []);
  }

  /** A range is a rule: trials that come to lie in it are selected, too. */
  reselect() {
    if (this.brushed === null) return;
    const ids = this.axes.matches();
    if (ids === null) return;
    this.brushed = new Set(ids);
    this.page.store.select(ids);
  }

  update(changed) {
    const { store } = this.page;
    const isNew = this.first || changed.has("view") || changed.has("reset");
    const data = isNew || ["run", "members", "filter", "importances", "cost"].some((name) => changed.has(name));
    this.first = false;
    if (changed.has("selection") && this.brushed !== null && !isSame(this.brushed, store.selection)) {
      this.brushed = null;
      this.axes.clearBrushes();
      this.page.set({ ranges: null });
    }
    if (data) this.collect();
    if (data || changed.has("selection")) this.drawParallel();
    if (data) this.reselect();
    if (changed.has("hover")) this.axes.setHover(store.hover);
    if (data || changed.has("selection")) this.drawFigures();
    if (isNew || changed.has("importances")) this.drawImportances();
  }

  collect() {
    const { store } = this.page;
    const { direction } = store.run;
    const all = collectTrials(store);
    this.best = ranked(all, direction);
    this.setSlider(this.best.length);
    const counts = new Map();
    for (const each of all) counts.set(each.phase, (counts.get(each.phase) ?? 0) + 1);
    for (const [phase, word] of PHASES) {
      const button = this.phaseButtons.get(phase);
      button.hidden = !counts.has(phase);
      button.setAttribute("aria-pressed", String(!this.hidden.has(phase)));
      setText(button, `${counts.get(phase) ?? 0} ${word}`);
      button.style.setProperty("--phase", DASHES[phase] === null ? "solid" : DASHES[phase][0] > 2 ? "dashed" : "dotted");
    }
    const waiting = counts.get("waiting") ?? 0;
    this.waiting.hidden = waiting === 0;
    setText(this.waiting, `${waiting} waiting, not drawn`);
    this.trials = all.filter((each) => !this.hidden.has(each.phase) && each.phase !== "waiting");
    this.shown = new Set(this.trials.map((each) => each.id));
    this.kept = this.bestK === null ? null : new Set(this.best.slice(0, this.bestK).map((each) => each.id));
    this.places = placesByObjective(all, direction);
    this.params = orderedParams(store, this.byImportance);
  }

  setSlider(most) {
    this.slider.max = Math.max(1, most);
    if (this.bestK === null || this.bestK >= most) this.slider.value = this.slider.max;
    this.slider.disabled = most < 2;
    setText(this.sliderText, this.bestK === null || this.bestK >= most ? `all ${most.toLocaleString("en-US")}` : `${this.bestK} of ${most.toLocaleString("en-US")}`);
  }

  isStrong(id) {
    return (this.kept === null || this.kept.has(id)) && !this.page.store.isPale(id);
  }

  colour(trial) {
    const { selection } = this.page.store;
    if (selection.size > 0 && selection.size <= OWN_COLOURS && selection.has(trial.id)) return this.page.store.colour(trial.id);
    const place = this.places.get(trial.id);
    return place === null || place === undefined ? NEUTRAL : rampColour(place);
  }

  describe(trial) {
    const { objective } = this.page.store.run;
    const rows = Object.entries(trial.params).slice(0, 24).map(([name, given]) => `${visible(name)} ${value(given)}`);
    return [visible(trial.id), `${trial.state} after ${count(trial.epoch ?? 0, "epoch")}`, `${visible(objective)} ${score(trial.value)}`, ...rows];
  }

  drawParallel() {
    const { store } = this.page;
    this.clear.hidden = this.brushed === null;
    this.more.hidden = this.params.length <= MOST_AXES;
    setText(this.more, this.allAxes ? `the ${this.byImportance ? `${MOST_AXES} most important` : `first ${MOST_AXES}`}` : `all ${this.params.length} hyperparameters`);
    if (this.trials.length === 0 || this.params.length === 0) {
      this.parallel.explain(this.params.length === 0 ? "All members so far have the same hyperparameters." : "No trial has begun yet.");
      return;
    }
    this.parallel.explain(null);
    this.importance.hidden = (store.importances?.importances ?? []).length === 0;
    this.importance.setAttribute("aria-pressed", String(this.byImportance));
    const order = this.byImportance ? "in the order of their importance" : "in the order in which they were declared";
    this.parallel.read(`One line for each trial, hyperparameters ${order}, ${visible(store.run.objective)} last. Drag along an axis to select a range; click a line to select its member. ` +
      "The word above an axis changes its scale. The colour is the rank by the objective; up to twelve selected trials have their own colours.");
    const names = this.allAxes ? this.params : this.params.slice(0, MOST_AXES);
    const axes = names.map((name) => ({ name, of: (trial) => paramOf(trial, name) }));
    // The last axis has a name that no hyperparameter can have.
    axes.push({ name: `${store.run.objective} `, of: (trial) => trial.value, objective: true });
    const order2 = new Map(this.best.map((each, i) => [each.id, i]));
    const trials = this.trials.slice().sort((a, b) => (order2.get(a.id) ?? Infinity) - (order2.get(b.id) ?? Infinity) || a.number - b.number);
    this.axes.draw({ trials: this.kept === null ? trials : trials.filter((each) => this.kept.has(each.id)), axes, colour: (trial) => this.colour(trial), isStrong: (id) => this.isStrong(id), describe: (trial) => this.describe(trial) });
    this.parallel.update();
  }

  drawImportances() {
    const document = this.page.store.importances;
    const missing = document === null ? "They are being computed." : document.missing;
    this.importances.explain(missing ?? null);
    if (missing !== null) return;
    const most = Math.max(...document.importances.map(([, part, , high]) => Math.max(part, high ?? 0)), 1e-9);
    const row = ([name, part, low, high]) => h("div", { class: "bar-row", "data-mark": name },
      h("span", { class: "bar-name", title: value(name) }, value(name)),
      h("span", { class: "bar-track" }, h("span", { class: "part", style: { width: `${(100 * part) / most}%`, background: "var(--accent)" } }),
        high > low && h("span", { class: "dot-span", title: `${share(low)} … ${share(high)}`, style: { left: `${(100 * low) / most}%`, width: `${(100 * (high - low)) / most}%`, color: HIGHLIGHT } })),
      h("span", { class: "bar-value figures" }, share(part)));
    this.importances.read(document.method ?? "");
    fill(this.importances.body, document.importances.map(row));
    this.importances.update();
  }

  drawFigures() {
    this.drawHistory();
    this.plots.draw();
    this.drawSlices();
  }

  /** Marks of trials in one series for each phase. */
  marks(trials, x, y, quiet, spread = false) {
    return PHASES.map(([phase, word, shape]) => ({
      name: word, colour: PHASE_COLOURS[phase], shape, quiet,
      points: trials.filter((each) => each.phase === phase).map((each) => this.mark(each, x(each), y(each), "", spread ? asideOf(each) * Math.min(1, trials.length / MANY_AT_ONE_PLACE) : 0)),
    })).filter((series) => series.points.length > 0);
  }

  mark(trial, x, y, more = "", aside = 0) {
    const { selection } = this.page.store;
    const isOwn = selection.size > 0 && selection.size <= OWN_COLOURS && selection.has(trial.id);
    return {
      id: trial.id, x, y, pale: !this.isStrong(trial.id), colour: isOwn ? this.page.store.colour(trial.id) : null, size: isOwn ? 5.5 : this.trials.length > MANY ? 2.6 : null, aside,
      get text() { return `${visible(trial.id)}\n${trial.state} after ${count(trial.epoch ?? 0, "epoch")}\n${hyperparameters(trial.params)}\n${score(trial.value)}${more}`; },
    };
  }

  /** The scale of the objective, without what lies far away from all else unless there is nothing else. */
  objectiveScale(values) {
    return { kind: "linear", values: plainRange(values), pad: 0.06, title: visible(this.page.store.run.objective) };
  }

  drawHistory() {
    const { run } = this.page.store;
    const trials = this.trials.filter((each) => each.value !== null);
    if (trials.length === 0) {
      this.history.explain("No trial has reported the objective yet.");
      return;
    }
    const line = bestSoFar(trials, run.direction);
    const last = Math.max(...trials.map((each) => each.number));
    const best = line.length ? [...line, [last, line.at(-1)[1]]].map(([x, y]) => ({ x, y })) : [];
    const steps = { name: "best so far", colour: HIGHLIGHT, line: "steps", width: 2, still: true, points: best };
    this.history.draw(() => ({
      x: { kind: "linear", values: trials.map((each) => each.number), pad: 0.02, whole: true, title: "trial" },
      y: this.objectiveScale(trials.map((each) => each.value)),
      series: [...this.marks(trials, (each) => each.number, (each) => each.value), steps],
      said: `${trials.length} trials${line.length ? `, best ${score(line.at(-1)[1])}` : ""}`,
    }));
  }

  drawSlices() {
    const trials = this.trials.filter((each) => each.value !== null);
    const names = this.params.slice(0, MOST_SLICES);
    this.sliceHead.hidden = this.sliceNote.hidden = names.length === 0 || trials.length === 0;
    const left = this.params.length - names.length;
    setText(this.sliceNote, `One mark for each trial.${left > 0 ? ` The ${this.byImportance ? `${names.length} most important` : `first ${names.length}`} of ${this.params.length}.` : ""}`);
    for (const [name, chart] of this.slices) if (!names.includes(name)) [chart.close(), chart.card.root.remove(), this.slices.delete(name)];
    names.forEach((name, i) => {
      let chart = this.slices.get(name);
      if (chart === undefined) {
        chart = new Chart({ title: value(name), width: "third", height: 220, pick: (id) => this.page.store.toggle(id) });
        chart.card.root.setAttribute("data-slice", name);
        this.slices.set(name, chart);
      }
      if (this.sliceGrid.children[i] !== chart.card.root) this.sliceGrid.insertBefore(chart.card.root, this.sliceGrid.children[i] ?? null);
      const having = trials.filter((each) => paramOf(each, name) !== undefined && paramOf(each, name) !== null);
      if (having.length === 0) {
        chart.explain("No trial with a value has it.");
        return;
      }
      const values = having.map((each) => paramOf(each, name));
      const kind = chooseKind(values);
      chart.draw(() => ({
        x: { kind, values, pad: 0.04 },
        y: { ...this.objectiveScale(trials.map((each) => each.value)), title: null },
        series: this.marks(having, (each) => paramOf(each, name), (each) => each.value, true, kind === "category"),
        said: `${having.length} trials`,
      }));
    });
  }

  tabulateTrials(byNumber = false) {
    const { objective } = this.page.store.run;
    const rest = this.trials.filter((each) => each.value === null);
    const order = [...this.best.filter((each) => this.shown.has(each.id)), ...rest];
    if (byNumber) order.sort((a, b) => a.number - b.number);
    return {
      head: ["trial", [visible(objective), score], "state", "epochs", ...this.params.map((name) => [value(name), value])],
      rows: order.map((each) => [visible(each.id), each.value, each.state, each.epoch ?? 0, ...this.params.map((name) => plain(paramOf(each, name)))]),
    };
  }

  tabulateImportances() {
    return { head: ["hyperparameter", ["importance", share], ["lowest", share], ["highest", share]], rows: (this.page.store.importances?.importances ?? []).map(([name, ...parts]) => [value(name), ...parts]) };
  }
}

/** A hyperparameter's value as a cell: numbers as they are. */
function plain(given) {
  return typeof given === "number" ? given : value(given);
}

function isSame(a, b) {
  return a.size === b.size && [...a].every((each) => b.has(each));
}
