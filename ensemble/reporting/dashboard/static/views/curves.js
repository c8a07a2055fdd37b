/** The view "Curves": any figure of every epoch over epochs, time or samples. */

import { AXES, band, bandPositions, extent, positions, quantile, smooth } from "../curve_series.js";
import { fill, h, setText } from "../dom.js";
import { findFigure } from "../figures.js";
import { clock, count, hyperparameters, number, score, visible } from "../format.js";
import { LineChart, limits } from "../line_chart.js";
import { card, choice, roving, tick } from "../card.js";
import { HIGHLIGHT, SERIES } from "../store.js";

const OTHERS = {
  train_loss: "training loss", lr: "learning rate", samples_per_s: "samples/s", memory_gb: "memory, GiB", cpus: "CPU cores used", waited: "share of time waiting",
  synced: "share of time exchanging gradients", grad_norm: "gradient norm", loss_scale: "loss scale",
};
const MANY = 100; // members from which on quartiles are drawn unless told otherwise
const MOST_STRONG = 40; // selected members drawn one by one; more lie on the canvas in their colours
const FENCE = 3; // interquartile ranges beyond the quartiles, outside of which a member is an outlier
const FEW = 5; // members, below which none can be told to be one
const FLAT = 4; // times the span without outliers, from which on the whole span shows nothing of the others
const HEIGHT = 330;
const MOST_AT_FIRST = [2, 4]; // figures, of all members, of one
const DEFAULTS = { metrics: null, axis: "epoch", log: false, halflife: 0, quartiles: null, outliers: null, zoom: null };
const isFlag = (given) => typeof given === "boolean";
const FITS = {
  metrics: Array.isArray, axis: (given) => Object.hasOwn(AXES, given), halflife: (given) => given > 0 && Number.isFinite(given), quartiles: isFlag, outliers: isFlag,
  zoom: (given) => Array.isArray(given) && given.length === 2 && given.every(Number.isFinite) && given[0] < given[1],
};

export const curvesView = {
  id: "curves",
  title: "Curves",
  needs: ["curves"],
  shown: () => true,
  mount: (root, page) => new CurvePanels(root, page),
};

/** What a figure is called on the page. */
export function figureName(name) {
  return OTHERS[name] ?? visible(name);
}

/** The curves of all members in `root`; `only`: of this member, with a table of its epochs. */
export class CurvePanels {
  constructor(root, page, only = null) {
    this.page = page;
    this.store = page.store;
    this.only = only;
    this.settings = page.settings(DEFAULTS, FITS);
    this.cache = new Map();
    this.panels = new Map();
    this.known = "";
    this.chips = h("div", { class: "chips", role: "group", "aria-label": "figures" });
    this.controls = h("div", { class: "figure-tools" });
    this.legend = h("div", { class: "keys-of", role: "group", "aria-label": "selected members" });
    this.legendKeys = roving(this.legend);
    this.absent = h("p", { class: "absent", hidden: true });
    this.grid = h("div", { class: "panels" });
    fill(root, h("div", { class: "figure-tools" }, this.chips, this.controls), this.legend, this.absent, this.grid);
    this.buildControls();
  }

  buildControls() {
    const { settings } = this;
    this.halflife = h("input", {
      type: "number", min: "0", step: "any", value: settings.halflife || null, placeholder: "none", "aria-label": "smoothing",
      title: "A value so far back weighs half as much.", oninput: () => this.set({ halflife: Math.max(0, Number(this.halflife.value)) || null }),
    });
    this.unit = h("span", {}, AXES[settings.axis][2]);
    this.reset = h("button", { type: "button", class: "minor", hidden: true, onclick: () => this.set({ zoom: null }) }, "whole range");
    this.samples = h("div", { class: "slot" });
    this.outliers = tick("outliers", true, (outliers) => this.set({ outliers }));
    fill(this.controls,
      this.samples,
      tick("log axis", settings.log, (log) => this.set({ log })),
      h("label", { class: "choice" }, h("span", {}, "smoothing, half-life"), this.halflife, this.unit),
      this.only === null && [tick("quartiles", settings.quartiles ?? this.store.members.size >= MANY, (quartiles) => this.set({ quartiles })), this.outliers],
      this.reset);
  }

  set(changes) {
    if ("axis" in changes) {
      Object.assign(changes, { zoom: null }, AXES[changes.axis][2] === AXES[this.settings.axis][2] ? {} : { halflife: null });
      if ("halflife" in changes) this.halflife.value = "";
      setText(this.unit, AXES[changes.axis][2]);
    }
    this.page.set(changes);
    this.settings = this.page.settings(DEFAULTS, FITS);
    this.update(new Set(["settings"]));
  }

  /** Figures that any member has reported, the objective first. */
  figures() {
    const curves = this.only === null ? Object.values(this.store.curves.members) : [this.curve(this.only)].filter(Boolean);
    const reported = new Set(curves.flatMap((curve) => Object.keys(curve.values)));
    const names = new Set([...(this.store.run.metrics ?? []).filter((name) => this.only === null || reported.has(name)), ...reported]);
    const others = Object.keys(OTHERS).filter((name) => names.has(name));
    return [...[...names].filter((name) => !(name in OTHERS)), ...others];
  }

  update(changed) {
    if (changed.has("reset")) this.cache.clear();
    if (changed.size === 1 && changed.has("clock")) return;
    if (changed.size === 1 && changed.has("hover")) {
      for (const each of this.panels.values()) each.chart.showHover(this.store.hover);
      return;
    }
    const ids = (this.only === null ? this.store.visible() : [this.only]).filter((id) => this.curve(id) !== undefined);
    const reason = this.reason(ids);
    this.absent.hidden = reason === null;
    if (reason !== null) setText(this.absent, reason);
    this.grid.hidden = reason !== null;
    if (this.store.curves === null) return;
    this.offer();
    this.reset.hidden = this.settings.zoom === null;
    if (this.only === null) this.drawLegend(ids);
    if (reason === null) this.drawPanels(ids);
  }

  reason(ids) {
    if (this.store.curves === null) return "The curves are being loaded.";
    if (ids.length) return null;
    return this.store.members.size && this.store.filter ? "No member that passes the filter has finished an epoch." : "No epoch has ended yet.";
  }

  curve(id) {
    const all = this.store.curves?.members;
    const found = all && Object.hasOwn(all, id) ? all[id] : undefined;
    return found?.epoch.length ? found : undefined;
  }

  /** Offers the figures and axes that there are. */
  offer() {
    const names = this.figures();
    const { settings } = this;
    settings.metrics = (settings.metrics ?? []).filter((name) => names.includes(name));
    if (settings.metrics.length === 0) settings.metrics = names.filter((name) => !(name in OTHERS)).slice(0, MOST_AT_FIRST[Number(this.only !== null)]);
    if (settings.metrics.length === 0) settings.metrics = names.slice(0, 1);
    const known = JSON.stringify([names, settings.metrics, settings.axis, this.store.run.samples]);
    if (known === this.known) return;
    this.known = known;
    const focused = this.chips.contains(document.activeElement) ? document.activeElement.dataset.metric : null;
    fill(this.chips, names.map((name) => h("button", {
      type: "button", class: "toggle", "data-metric": name, "aria-pressed": String(settings.metrics.includes(name)), onclick: () => this.flip(name),
    }, figureName(name))));
    if (focused !== null) [...this.chips.children].find((each) => each.dataset.metric === focused)?.focus();
    const axes = Object.entries(AXES).filter(([name]) => name !== "samples" || this.store.run.samples);
    fill(this.samples, choice("over", axes.map(([name, [text]]) => [name, text]), settings.axis, (axis) => this.set({ axis })));
  }

  flip(name) {
    const chosen = new Set(this.settings.metrics);
    if (!chosen.delete(name)) chosen.add(name);
    if (chosen.size) this.set({ metrics: this.figures().filter((each) => chosen.has(each)) });
  }

  /** Which members are drawn one by one: those selected, all while they are few, and the best. */
  strong(ids) {
    const { store } = this;
    this.few = [];
    if (this.only !== null) return new Set(ids);
    const chosen = ids.filter((id) => store.selection.has(id));
    if (store.selection.size === 0 && ids.length <= SERIES.length) this.few = ids;
    return new Set([...(this.few.length ? ids : chosen.slice(0, MOST_STRONG)), store.best()].filter((id) => id !== null));
  }

  drawLegend(ids) {
    const { store } = this;
    const named = [...this.strong(ids)].filter((id) => this.curve(id) && ids.includes(id));
    const left = ids.filter((id) => store.selection.has(id)).length - named.filter((id) => store.selection.has(id)).length;
    const key = JSON.stringify([named, named.map((id) => store.colour(id)), [...store.selection], left, store.best()]);
    if (key === this.legendKey) return;
    this.legendKey = key;
    const focused = this.legend.contains(document.activeElement) ? document.activeElement.dataset.member : null;
    fill(this.legend,
      named.map((id) => h("button", {
        type: "button", class: "member-key", "data-member": id, "aria-pressed": String(store.selection.has(id)),
        onclick: () => store.toggle(id), onpointerenter: () => store.setHover(id), onpointerleave: () => store.setHover(null),
      }, h("span", { class: "swatch", style: { background: this.colour(id) } }), h("span", { class: "name" }, visible(id)), id === store.best() && h("span", { class: "soft" }, " best"))),
      left > 0 && h("span", { class: "soft" }, `and ${count(left, "other")} selected`));
    if (focused !== null) [...this.legend.children].find((each) => each.dataset?.member === focused)?.focus();
    this.legendKeys.refresh();
  }

  colour(id) {
    const { store } = this;
    if (store.selection.has(id) || store.members.size <= SERIES.length) return store.colour(id);
    if (this.few.includes(id)) return SERIES[this.few.indexOf(id)];
    return id === store.best() ? HIGHLIGHT : SERIES[0];
  }

  /** The points of a member's figure; kept until the member has others. */
  series(id, metric) {
    const curve = this.curve(id);
    const values = Object.hasOwn(curve.values, metric) ? curve.values[metric] : [];
    const last = curve.t.length - 1;
    const { axis, halflife } = this.settings;
    const key = `${axis} ${halflife} ${last} ${curve.t[last]} ${values.length}`;
    const name = JSON.stringify([id, metric]);
    let found = this.cache.get(name);
    if (found?.key !== key) {
      const { run, spans } = this.store;
      const first = spans.get(id)?.[0];
      const origins = { run: run.started ?? curve.t[0], own: first?.[5] ?? first?.[4] ?? curve.t[0], samples: run.samples };
      // An evaluation within an epoch has not all figures: it breaks no line of the others.
      const at = [...values.keys()].filter((i) => values[i] !== null || Number.isInteger(curve.epoch[i]));
      const all = positions(curve, axis, origins);
      const [xs, raw] = [at.map((i) => all[i]), at.map((i) => values[i])];
      found = { key, at, xs, raw, ys: smooth(raw, xs, halflife) };
      this.cache.set(name, found);
    }
    return found;
  }

  drawPanels(ids) {
    const { settings } = this;
    for (const [metric, each] of this.panels) {
      if (settings.metrics.includes(metric)) continue;
      each.chart.close();
      each.card.root.remove();
      this.panels.delete(metric);
    }
    settings.metrics.forEach((metric, i) => {
      if (!this.panels.has(metric)) this.panels.set(metric, this.makePanel(metric));
      const { root } = this.panels.get(metric).card;
      if (this.grid.children[i] !== root) this.grid.insertBefore(root, this.grid.children[i] ?? null);
    });
    const strong = this.strong(ids);
    const all = settings.metrics.map((metric) => this.drawPanel(metric, ids, strong));
    this.outliers.querySelector("input").checked = !all.includes(false);
  }

  makePanel(metric) {
    const name = figureName(metric);
    const box = card({ title: name, table: () => this.tabulate(metric), onPick: (id) => this.store.toggle(id), onShown: () => this.update(new Set(["settings"])) });
    const chart = new LineChart({
      label: `${name}: curves of the members. Arrow keys go from line to line, Enter selects.`,
      height: HEIGHT,
      onHover: (id) => this.store.setHover(id),
      onPick: (id) => this.store.toggle(id),
      onZoom: (zoom) => this.set({ zoom: zoom && zoom[1] > zoom[0] ? zoom : null }),
      describe: (series, index) => this.describe(metric, series, index),
    });
    box.body.appendChild(chart.root);
    box.root.dataset.metric = metric;
    return { card: box, chart };
  }

  drawPanel(metric, ids, strong) {
    const { store, settings } = this;
    const { card: box, chart } = this.panels.get(metric);
    const lines = ids.map((id) => this.line(id, metric, strong)).filter((line) => line.ys.length);
    const front = lines.filter((line) => line.strong);
    const series = [...lines.filter((line) => !line.strong), ...front];
    const quartiles = (settings.quartiles ?? lines.length >= MANY) && lines.length >= 4;
    if (metric === "loss") series.push(...front.map((line) => this.trainingLine(line)).filter(Boolean));
    const range = extent(series, settings.log, ...(settings.zoom ?? []));
    const absent = range?.y ? null : `No value to draw${settings.log ? ": none is above zero" : ""}.`;
    box.read(absent ?? this.reading(metric, lines, front, quartiles));
    if (absent !== null || box.asTable) {
      box.update();
      return null;
    }
    const whole = settings.axis === "epoch";
    const kind = { epoch: "whole", samples: "number" }[settings.axis] ?? "time";
    const [lo, hi] = settings.zoom ?? [whole ? range.x[0] : Math.min(0, range.x[0]), Math.max(range.x[1], range.x[0] + (whole ? 1 : 1e-6))];
    const most = inner(series, settings.log, ...(settings.zoom ?? []));
    const shown = most === null || (settings.outliers ?? length(range.y, settings.log) <= FLAT * length(most, settings.log));
    const [low, high] = limits(shown ? range.y : most, settings.log);
    chart.draw({
      series,
      band: quartiles ? band(lines, bandPositions(lines)) : [],
      x: { lo, hi, whole: range.x[1] - range.x[0], label: AXES[settings.axis][1], kind },
      y: { lo: low, hi: high, log: settings.log },
      paleness: lines.length <= 30 ? 0.5 : store.selection.size || quartiles ? Math.max(0.04, Math.min(0.22, 12 / lines.length)) : 0.5, // many do not hide the band
      zoomed: settings.zoom !== null,
    });
    if (!shown) box.read(`${this.reading(metric, lines, front, quartiles)} Triangles mark lines that leave the axis; tick "outliers" to see them whole.`);
    return shown;
  }

  line(id, metric, strong) {
    const { at, xs, ys, raw } = this.series(id, metric);
    const best = id === this.store.best();
    const front = strong.has(id);
    const colour = front ? this.colour(id) : this.store.colour(id);
    return { id, at, xs, ys, colour, strong: front, best, width: best || this.store.selection.has(id) ? 2.4 : 1.6, behind: front && this.settings.halflife ? raw : null };
  }

  trainingLine(line) {
    const { at, xs, ys } = this.series(line.id, "train_loss");
    return ys.length ? { ...line, at, xs, ys, behind: null, best: false, dash: "2 3", width: 1.2 } : null;
  }

  reading(metric, lines, front, quartiles) {
    const { axis, halflife } = this.settings;
    const others = lines.length - front.length;
    const parts = [this.only === null && count(lines.length, "member"), this.store.run.metrics.includes(metric) && "on validation", findFigure(this.store.run.figures, metric).direction].filter(Boolean);
    if (others && front.length) parts.push(`${number(others)} of them drawn pale`);
    if (quartiles) parts.push("band: quartiles and median of the members that came so far");
    if (metric === "loss" && front.some((line) => this.series(line.id, "train_loss").ys.length)) parts.push("dotted: loss on the training batches");
    if (halflife) parts.push(`smoothed with a half-life of ${number(halflife)} ${AXES[axis][2]}; pale lines: as measured`);
    if (this.store.curves.thinned) parts.push("long curves are thinned");
    return `${parts.join("; ")}.`;
  }

  describe(metric, series, index) {
    const member = this.store.members.get(series.id);
    const curve = this.curve(series.id);
    const place = series.at[index];
    const raw = curve?.values[metric]?.[place];
    const value = series.ys[index] === raw ? score(raw) : `${score(series.ys[index])} smoothed, ${score(raw)} measured`;
    const at = (curve?.t[place] ?? 0) - (this.store.run.started ?? 0);
    return [series.id, `${figureName(metric)} ${value}`, `epoch ${number((curve?.epoch[place] ?? 0) + 1)}, ${clock(at)} after the start`, hyperparameters(member?.params)];
  }

  tabulate(metric) {
    if (this.only !== null) return this.tabulateEpochs(metric);
    const { better } = findFigure(this.store.run.figures, metric);
    const up = better === null ? metric !== "train_loss" : better === "higher";
    const rows = [];
    for (const id of this.store.visible()) {
      const curve = this.curve(id);
      const values = curve && Object.hasOwn(curve.values, metric) ? curve.values[metric] : [];
      let best = -1;
      values.forEach((value, i) => value !== null && (best < 0 || (up ? value > values[best] : value < values[best])) && (best = i));
      if (best < 0) continue;
      const last = values.findLast((value) => value !== null);
      rows.push({ key: id, member: id, cells: [visible(id), curve.epoch.at(-1) + 1, last, values[best], number(curve.epoch[best] + 1), curve.t.at(-1) - (this.store.run.started ?? 0)] });
    }
    return { caption: `${figureName(metric)} of each member, as measured.`, head: ["member", ["epochs", number], ["last", score], [up ? "highest" : "lowest", score], "at epoch", ["last after", clock]], rows };
  }

  /** The epochs of one member, the last first. */
  tabulateEpochs(metric) {
    const { epoch, t, values } = this.curve(this.only);
    const names = [metric, "train_loss"].filter((name, i) => Object.hasOwn(values, name) && (i === 0 || metric === "loss"));
    const rows = epoch.map((each, i) => ({ key: each, cells: [number(each + 1), ...names.map((name) => values[name][i]), t[i] - (this.store.run.started ?? 0)] }));
    return { head: ["epoch", ...names.map((name) => [figureName(name), score]), ["after", clock]], rows: rows.reverse() };
  }

  close() {
    for (const { chart } of this.panels.values()) chart.close();
    this.store.setHover(null);
  }
}

/**
 * The span of all values but those of members that lie apart, whose medians are far beyond the quartiles of all medians;
 * null where there are none, or too few members to tell.
 */
function inner(series, log, from = -Infinity, to = Infinity) {
  const drawable = ({ xs, ys }) => ys.filter((y, i) => y !== null && y !== undefined && (!log || y > 0) && xs[i] >= from && xs[i] <= to);
  const lines = series.map(drawable).filter((ys) => ys.length).map((ys) => (log ? ys.map(Math.log) : ys));
  const medians = lines.map((ys) => quantile(Float64Array.from(ys).sort(), 0.5));
  const sorted = Float64Array.from(medians).sort();
  const [lower, upper] = [quantile(sorted, 0.25), quantile(sorted, 0.75)];
  const reach = FENCE * (upper - lower);
  const kept = lines.filter((_, i) => medians[i] >= lower - reach && medians[i] <= upper + reach).flat();
  if (medians.length < FEW || reach === 0 || kept.length === lines.flat().length) return null;
  return kept.reduce(([low, high], y) => [Math.min(low, y), Math.max(high, y)], [Infinity, -Infinity]).map((y) => (log ? Math.exp(y) : y));
}

/** How long a span is on its axis. */
function length([lo, hi], log) {
  return log ? Math.log(hi / lo) : hi - lo;
}
