/** The figures of what models predict, by task: one chart for each plot of the document `quality`, drawn as it stands. */

import { Chart } from "../canvas_chart.js";
import { h } from "../dom.js";
import { extent } from "../scales.js";
import { number, significant } from "../format.js";
import { HIGHLIGHT, NEUTRAL, SERIES } from "../store.js";

/** The colours of models; what else a series is of has the next one of its own. */
const COLOURS = { best: SERIES[0], combined: HIGHLIGHT, reference: NEUTRAL };

/** A chart for a plot: `root`, `draw(plot, names)`, `close()`. `names`: what each model is called; a mark of a member selects it. */
export function plotChart(plot, store, width = "half") {
  let shown = plot;
  const table = () => ({ head: shown.table.head.map((name) => [name, number]), rows: shown.table.rows });
  const chart = new Chart({ title: plot.title, width, height: 320, pick: (id) => store.toggle(id), ...(plot.table && { table }) });
  return {
    root: chart.card.root,
    close: () => chart.close(),
    draw(next, names) {
      shown = next;
      chart.read(next.reading);
      if (next.missing) return chart.explain(next.missing);
      const models = [...new Set(next.series.map(({ of }) => of).filter((of) => of !== "reference"))];
      const isLabelled = (series) => next.series.find((each) => each.of === series.of) === series;
      return chart.draw({
        x: axis(next.x, next.series, 0),
        y: { ...axis(next.y, next.series, 1), zero: next.y.zero || next.series.some(({ shape }) => shape === "bar") },
        series: next.series.map((series) => drawn(series, next, names, models, isLabelled(series), store)),
        said: next.said ?? models.map((of) => names[of] ?? of).join("; "),
      });
    },
  };
}

/** The charts over time of a view, from the document `history`: `root`, `update(changed)`, `close()`. */
export class Plots {
  constructor(page, view) {
    Object.assign(this, { page, view, charts: new Map(), root: h("div", { class: "grid" }) });
  }

  update(changed) {
    const { store, documents } = this.page;
    if (changed.has("nodes") || changed.has("streams")) documents.renew("history");
    if (this.drawn === store.history || store.history === null) return;
    this.drawn = store.history;
    for (const plot of store.history.plots.filter(({ view }) => view === this.view)) {
      if (!this.charts.has(plot.id)) {
        this.charts.set(plot.id, plotChart(plot, store, this.view === "cost" ? "" : "half"));
        this.root.append(this.charts.get(plot.id).root);
      }
      this.charts.get(plot.id).draw(plot, {});
    }
  }

  close() {
    for (const chart of this.charts.values()) chart.close();
  }
}

function axis({ title, range, kind, whole, zero }, series, at) {
  const values = series.flatMap(({ points }) => points.map((point) => point[at]).filter((value) => value !== null));
  return { kind, values: range ?? (kind === "category" ? values : extent(values)), title, whole, zero, pad: range === null && kind === "linear" ? 0.04 : 0 };
}

function drawn(series, plot, names, models, isLabelled, store) {
  const { of, shape, line, points, label, dash, still } = series;
  const colour = Object.hasOwn(COLOURS, of) ? COLOURS[of] : SERIES[models.indexOf(of) % SERIES.length];
  if (of === "reference") return { name: label ?? "right", colour, line: "line", dash: [5, 4], width: 1, still: true, quiet: label === undefined, points: points.map(([x, y]) => ({ x, y })) };
  const name = label ?? names[of] ?? of;
  const isBar = shape === "bar";
  const aside = isBar && models.length > 1 ? 0.56 * (models.indexOf(of) - 0.5) : 0;
  const outer = series.name !== null && series.name !== "50 %"; // a quantile beside the median
  return {
    name, colour, shape, still, line: line ? "line" : null, dash: dash ?? (outer ? [4, 3] : null), quiet: label === undefined && !isLabelled, size: isBar ? 7 : line || plot.x.kind === "category" ? 3.6 : 2.4,
    points: points.map(([x, y, more]) => ({
      x, y, aside, get text() { return `${name}${series.name ? `, ${series.name}` : ""}\n${plot.x.title} ${short(x)}\n${plot.y.title} ${short(y)}`; }, ...more,
      ...(more?.id === undefined ? {} : { pale: store.isPale(more.id), colour: store.selection.has(more.id) ? store.colour(more.id) : null }),
    })),
  };
}

function short(given) {
  return typeof given === "number" ? significant(given, 4) : given;
}
