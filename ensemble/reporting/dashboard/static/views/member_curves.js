/** The curves of one member: a figure for each metric, the loss in training beside the loss in validation. */

import { Chart } from "../canvas_chart.js";
import { h, setText } from "../dom.js";
import { clock, score, visible } from "../format.js";

const MOST = 4; // figures
const USUAL_COLOUR = "#3b82c4";
const TRAINING = "train_loss";

/** The figures in `root`. */
export class MemberCurves {
  constructor(page, id) {
    this.page = page;
    this.id = id;
    this.absent = h("p", { class: "absent" });
    this.empty = h("div", { class: "card" }, h("h3", {}, "Curves"), this.absent);
    this.root = h("div", { class: "grid" }, this.empty);
    this.charts = new Map();
    this.known = null;
  }

  curve() {
    const { curves } = this.page.store;
    return curves !== null && Object.hasOwn(curves.members, this.id) ? curves.members[this.id] : null;
  }

  update() {
    const curve = this.curve();
    const isRead = this.page.store.curves !== null;
    const known = curve === null ? String(isRead) : `${curve.epoch.length} ${curve.epoch.at(-1)} ${curve.t.at(-1)}`;
    if (known === this.known) return;
    this.known = known;
    const names = this.metrics(curve);
    this.empty.hidden = names.length > 0;
    setText(this.absent, isRead ? "No epoch has ended yet." : "Reading the curves …");
    for (const [name, chart] of this.charts) if (!names.includes(name)) [chart.close(), chart.card.root.remove(), this.charts.delete(name)];
    for (const name of names) this.draw(name, curve);
  }

  /** The metrics that this member has reported, the objective first. */
  metrics(curve) {
    if (curve === null || curve.epoch.length === 0) return [];
    const named = this.page.store.run.metrics.filter((name) => Object.hasOwn(curve.values, name));
    const known = named.includes("loss") || !Object.hasOwn(curve.values, TRAINING) ? named : [...named, TRAINING];
    return known.slice(0, MOST);
  }

  draw(name, curve) {
    if (!this.charts.has(name)) {
      const chart = new Chart({ title: wordOf(name), width: "half", height: 250, table: () => this.tabulate(name) });
      this.charts.set(name, chart);
      this.root.appendChild(chart.card.root);
    }
    const names = shownWith(name, curve);
    const chart = this.charts.get(name);
    chart.read(`${name === TRAINING ? "After" : "On the validation split after"} each epoch${names.length > 1 ? "; dotted: on the training batches" : ""}.`);
    chart.draw({
      x: { kind: "linear", values: curve.epoch.map((epoch) => epoch + 1), whole: true, pad: 0.01, title: "epoch" },
      y: { kind: "linear", values: names.flatMap((each) => curve.values[each]), pad: 0.04 },
      series: names.map((each) => this.series(each, curve)),
    });
  }

  series(name, curve) {
    const { store } = this.page;
    const isTraining = name === TRAINING;
    return {
      name: wordOf(name), quiet: true, shape: curve.epoch.length > 40 || isTraining ? null : "dot", size: 2.4, line: "line", dash: isTraining ? [2, 3] : null, width: isTraining ? 1.4 : 2,
      colour: store.members.size <= 10 || store.selection.has(this.id) ? store.colour(this.id) : USUAL_COLOUR,
      points: curve.values[name].map((y, i) => ({ x: curve.epoch[i] + 1, y, text: `${wordOf(name)}\nepoch ${curve.epoch[i] + 1}: ${score(y)}` })),
    };
  }

  tabulate(name) {
    const curve = this.curve();
    const names = shownWith(name, curve);
    const since = (t) => clock(t - (this.page.store.run.started ?? 0));
    const rows = curve.epoch.map((epoch, i) => ({ key: String(epoch), cells: [String(epoch + 1), ...names.map((each) => score(curve.values[each][i])), since(curve.t[i])] }));
    return { head: ["epoch", ...names.map(wordOf), "after"], rows: rows.reverse() };
  }

  close() {
    for (const chart of this.charts.values()) chart.close();
  }
}

/** The metrics in the figure of one: the loss in training stands beside the loss. */
function shownWith(name, curve) {
  return name === "loss" && Object.hasOwn(curve.values, TRAINING) ? ["loss", TRAINING] : [name];
}

function wordOf(name) {
  return name === TRAINING ? "loss on the training batches" : visible(name);
}
