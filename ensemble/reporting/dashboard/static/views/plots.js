/** The figures that the server describes (`ensemble.reporting.dashboard.plots`), each drawn as it stands. */

import { Chart } from "../canvas_chart.js";
import { h } from "../dom.js";
import { extent } from "../scales.js";
import { number, significant, visible } from "../format.js";
import { HIGHLIGHT, NEUTRAL, SERIES, STATES } from "../store.js";

/** The colours of models; what else a series is of has the next one of its own. */
const COLOURS = { best: SERIES[0], combined: HIGHLIGHT, reference: NEUTRAL };

/** The colour of a run, or of another of many things that are drawn together, by its place. */
export function colourAt(place) {
  return SERIES[place] ?? `hsl(${Math.round(place * 137.5) % 360} 52% 52%)`;
}

/** A chart for a plot: `root`, `draw(plot)`, `close()`; a mark of a member selects it. `options` as of `Plots`. */
export function plotChart(plot, store, options) {
  let shown = plot;
  options = { names: () => ({}), isPale: (id) => store.isPale(id), ...options };
  const table = () => (shown.table ? { head: shown.table.head.map((name) => [name, number]), rows: shown.table.rows } : chart.tabulate());
  const chart = new Chart({ title: visible(plot.title), height: 320, pick: (id) => store.toggle(id), ...options, table });
  return {
    root: chart.card.root,
    close: () => chart.close(),
    draw(next) {
      const names = options.names();
      shown = next;
      chart.read(visible(next.reading));
      if (next.absent) return chart.explain(next.absent);
      const models = [...new Set(next.series.map(({ of }) => of).filter((of) => of !== "reference"))];
      const isLabelled = (series) => next.series.find((each) => each.of === series.of) === series;
      return chart.draw({
        x: axis(next.x, next.series, 0),
        y: { ...axis(next.y, next.series, 1), zero: next.y.zero },
        series: next.series.map((series) => drawn(series, next, names, models, isLabelled(series), store, options)),
        said: visible(next.said ?? models.map((of) => names[of] ?? of).join("; ")),
      });
    },
  };
}

/**
 * The charts of plots of a document: `root`, `update(changed)`, `draw()`, `close()`. `options`: `document` (its name), `width`, `names()` of models, `isPale(id)` of members' marks.
 */
export class Plots {
  constructor(page, options) {
    Object.assign(this, { page, options: { width: "half", ...options } });
    this.charts = new Map();
    this.root = h("div", { class: "grid" });
  }

  /** Draws what is new. */
  update(changed) {
    if (this.page.store[this.options.document] !== this.drawn || ["selection", "filter", "view"].some((name) => changed.has(name))) this.draw();
  }

  draw() {
    const { store } = this.page;
    const { document } = this.options;
    this.drawn = store[document];
    const plots = (this.drawn?.plots ?? []);
    for (const [id, chart] of this.charts) if (!plots.some((plot) => plot.id === id)) [chart.close(), chart.root.remove(), this.charts.delete(id)];
    for (const plot of plots) {
      if (!this.charts.has(plot.id)) this.charts.set(plot.id, plotChart(plot, store, this.options));
      this.charts.get(plot.id).draw(plot);
      this.root.append(this.charts.get(plot.id).root);
    }
  }

  close() {
    for (const chart of this.charts.values()) chart.close();
  }
}

function axis({ title, range, kind, zero, whole }, series, at) {
  const values = series.flatMap(({ points }) => points.map((point) => point[at])).filter((value) => value !== null);
  return { kind, values: range ?? (kind === "category" ? values : extent(values)), title: visible(title), whole: whole ?? (kind === "linear" && values.every(Number.isInteger)), zero, pad: range === null && kind === "linear" ? 0.04 : 0 };
}

function drawn(series, plot, names, models, isLabelled, store, { isPale }) {
  const { of, shape, line, points, label, still, state } = series;
  const colour = state !== undefined ? STATES[state] : Object.hasOwn(COLOURS, of) ? COLOURS[of] : colourAt(typeof of === "number" ? of : models.indexOf(of));
  if (of === "reference") return { name: "right", colour, line: "line", dash: [5, 4], width: 1, still: true, quiet: true, points: points.map(([x, y]) => ({ x, y })) };
  const name = visible(label ?? names[of] ?? of);
  return {
    name, colour, shape, still, line: line === true ? "line" : line || null, quiet: ((label ?? null) === null && !isLabelled) || models.length > SERIES.length, size: series.size ?? (line || plot.x.kind === "category" ? 3.6 : 2.4),
    points: points.map(([x, y, more]) => ({
      x, y, get text() { return `${name}\n${visible(plot.x.title)} ${short(x)}\n${visible(plot.y.title)} ${short(y)}`; }, ...more, id: more?.member,
      colour: store.selection.has(more?.member) ? store.colour(more.member) : null,
      pale: more?.member !== undefined && isPale(more.member),
    })),
  };
}

function short(given) {
  return typeof given === "number" ? significant(given, 4) : visible(given);
}
