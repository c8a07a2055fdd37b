/** Runs side by side, as the server's document of them has it: charts, differences, declarations. */

import { choice } from "../card.js";
import { fill, h } from "../dom.js";
import { visible } from "../format.js";
import { plainTable } from "../plain_table.js";
import { colourAt, plotChart } from "./plots.js";

const RUNNING_MS = 15000;

export const compareView = { id: "compare", title: "Runs compared", tab: false, ofRuns: true, mount: (root, page) => new CompareView(root, page) };

class CompareView {
  constructor(root, page) {
    Object.assign(this, { root, page, charts: [], asked: null });
    [this.head, this.notes, this.plots, this.tables] = ["figure-tools", "", "grid", ""].map((kind) => h("div", { class: kind }));
    fill(root, this.head, this.notes, this.plots, this.tables);
  }

  update() {
    const keys = (this.page.route.set.get("runs") ?? "").split(",").filter(Boolean);
    if (keys.join() !== this.asked) this.ask(keys);
  }

  /** Asks for the document; again while a run goes on. */
  async ask(keys) {
    clearTimeout(this.timer);
    const asked = (this.asked = keys.join());
    try {
      const found = await this.page.source.ask(`compare?runs=${encodeURIComponent(asked)}`);
      if (asked !== this.asked) return;
      this.draw(found);
      if (found.runs.some((run) => run.state.word === "running")) this.timer = setTimeout(() => this.ask(keys), RUNNING_MS);
    } catch (error) {
      if (asked === this.asked) fill(this.notes, h("p", { class: "absent" }, `They cannot be compared: ${visible(error.message)}.`));
    }
  }

  draw({ runs, notes, plots, tables }) {
    const [keys, names] = [runs.map((run) => run.key), runs.map((run) => visible(run.name))];
    const moveFirst = (key) => this.page.go("compare", { set: new Map([["runs", [key, ...keys.filter((each) => each !== key)].join()]]) });
    const link = (key, i) => h("a", { class: "chart-key", href: `#overview?run=${key}` }, h("span", { class: "swatch", style: { background: colourAt(i) } }), names[i]);
    fill(this.head, choice("compared with", keys.map((key, i) => [key, names[i]]), keys[0], moveFirst), keys.map(link));
    fill(this.notes, notes.map((note) => h("p", { class: "reading", "data-mark": "note" }, visible(note))));
    const drawn = JSON.stringify([names, plots]);
    if (drawn !== this.drawn) {
      this.drawn = drawn;
      this.charts.splice(0).forEach((chart) => chart.close());
      this.charts.push(...plots.map((plot) => plotChart(plot, this.page.store, { width: "half", names: () => names, isPale: () => false })));
      fill(this.plots, this.charts.map((chart) => chart.root));
      this.charts.forEach((chart, i) => chart.draw(plots[i]));
    }
    fill(this.tables, tables.map(plainTable));
  }

  close() {
    clearTimeout(this.timer);
    this.asked = null;
    this.charts.forEach((chart) => chart.close());
  }
}
