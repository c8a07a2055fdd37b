/** The curves of one member: a figure for each metric, the loss in training beside the loss in validation. */

import { extent, positions } from "../curve_series.js";
import { h, setText } from "../dom.js";
import { clock, score, visible } from "../format.js";
import { LineChart, limits } from "../line_chart.js";
import { card } from "../card.js";

const HEIGHT = 250;
const MOST = 4; // figures
const USUAL_COLOUR = "#3b82c4";

/** The figures: `{ root, update(), close() }`. */
export function memberCurves(page, id) {
  return new MemberCurves(page, id);
}

class MemberCurves {
  constructor(page, id) {
    this.page = page;
    this.id = id;
    this.absent = h("p", { class: "absent" });
    this.empty = h("div", { class: "card" }, h("h3", {}, "Curves"), this.absent);
    this.root = h("div", { class: "grid" }, this.empty);
    this.panels = new Map();
    this.known = null;
  }

  update() {
    const { curves } = this.page.store;
    const curve = curves !== null && Object.hasOwn(curves.members, this.id) ? curves.members[this.id] : null;
    const known = curve === null ? String(curves === null) : `${curve.epoch.length} ${curve.epoch.at(-1)} ${curve.t.at(-1)}`;
    if (known === this.known) return;
    this.known = known;
    const names = this.metrics(curve);
    const reason = curves === null ? "Reading the curves …" : names.length === 0 ? "No epoch has ended yet." : null;
    this.empty.hidden = reason === null;
    setText(this.absent, reason ?? "");
    for (const [name, each] of this.panels) {
      if (names.includes(name)) continue;
      each.chart.close();
      each.card.root.remove();
      this.panels.delete(name);
    }
    for (const name of names) this.draw(name, curve);
  }

  /** The metrics that this member has reported, the objective first. */
  metrics(curve) {
    if (curve === null || curve.epoch.length === 0) return [];
    const named = this.page.store.run.metrics.filter((name) => Object.hasOwn(curve.values, name));
    const known = named.includes("loss") || !Object.hasOwn(curve.values, "train_loss") ? named : [...named, "train_loss"];
    return known.slice(0, MOST);
  }

  make(name) {
    const title = name === "train_loss" ? "loss on the training batches" : visible(name);
    const box = card({ title, width: "half", table: () => this.tabulate(name), onShown: () => this.redraw() });
    const chart = new LineChart({
      label: `${title} of ${visible(this.id)} after each epoch`, height: HEIGHT, onHover: () => {}, onPick: () => {}, onZoom: () => {},
      describe: (series, index) => [series.name, `epoch ${series.xs[index]}: ${score(series.ys[index])}`],
    });
    box.body.appendChild(chart.root);
    this.root.appendChild(box.root);
    return { card: box, chart };
  }

  draw(name, curve) {
    if (!this.panels.has(name)) this.panels.set(name, this.make(name));
    const { card: box, chart } = this.panels.get(name);
    const both = name === "loss" && Object.hasOwn(curve.values, "train_loss");
    const series = (both ? ["loss", "train_loss"] : [name]).map((each) => this.series(each, curve));
    box.read(both ? "On the validation split after each epoch; dotted: on the training batches." : name === "train_loss" ? "After each epoch." : "On the validation split after each epoch.");
    box.update();
    const range = extent(series, false);
    if (box.asTable || range?.y == null) return;
    const [lo, hi] = limits(range.y, false);
    const last = Math.max(range.x[1], range.x[0] + 1);
    chart.draw({ series, band: [], x: { lo: range.x[0], hi: last, whole: last - range.x[0], label: "epoch", kind: "whole" }, y: { lo, hi, log: false }, paleness: 1, zoomed: false });
  }

  series(name, curve) {
    const { store } = this.page;
    const colour = store.members.size <= 10 || store.selection.has(this.id) ? store.colour(this.id) : USUAL_COLOUR;
    const isTraining = name === "train_loss";
    return {
      id: this.id, name: isTraining ? "loss on the training batches" : visible(name), xs: positions(curve, "epoch", {}), ys: curve.values[name], colour,
      strong: true, best: false, width: isTraining ? 1.4 : 2, dash: isTraining ? "2 3" : undefined,
    };
  }

  redraw() {
    this.known = null;
    this.update();
  }

  tabulate(name) {
    const curve = this.page.store.curves.members[this.id];
    const start = this.page.store.run.started ?? 0;
    const names = name === "loss" && Object.hasOwn(curve.values, "train_loss") ? ["loss", "train_loss"] : [name];
    const rows = curve.epoch.map((epoch, i) => ({ key: String(epoch), cells: [String(epoch + 1), ...names.map((each) => score(curve.values[each][i])), clock(curve.t[i] - start)] }));
    const head = ["epoch", ...names.map((each) => (each === "train_loss" ? "training" : visible(each))), "after"];
    return { caption: `${visible(name)} after each epoch.`, head, rows: rows.reverse() };
  }

  close() {
    for (const { chart } of this.panels.values()) chart.close();
  }
}
