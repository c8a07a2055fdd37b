/** Plots of the document `quality`, drawn as they stand: calibration, gains, and what else shows whether models are right. */

import { Chart } from "../canvas_chart.js";
import { extent } from "../scales.js";
import { significant, visible } from "../format.js";
import { HIGHLIGHT, NEUTRAL, SERIES } from "../store.js";

const COLOURS = { best: SERIES[0], combined: HIGHLIGHT, reference: NEUTRAL };

/** A chart for a plot: `root`, `draw(plot, names)`, `close()`. `names`: what each model is called. */
export function plotChart(plot, store) {
  let shown = plot;
  const chart = new Chart({ title: visible(plot.title), width: "half", height: 320, pick: (id) => store.toggle(id), table: () => shown.table ?? chart.tabulate() });
  return {
    root: chart.card.root,
    close: () => chart.close(),
    draw(next, names) {
      shown = next;
      if (next.absent !== null) return chart.explain(next.absent);
      chart.read(visible(next.reading));
      const models = [...new Set(next.series.map(({ of }) => of).filter((of) => of !== "reference"))];
      const isLabelled = (series) => next.series.find((each) => each.of === series.of) === series;
      chart.draw({
        x: axis(next.x, next.series, 0),
        y: { ...axis(next.y, next.series, 1), zero: next.series.some(({ shape }) => shape === "bar") },
        series: next.series.map((series) => drawn(series, next, names, models, isLabelled(series), store)),
        said: visible(next.said ?? models.map((of) => names[of]).join("; ")),
      });
    },
  };
}

function axis({ title, range, kind }, series, at) {
  const values = series.flatMap(({ points }) => points.map((point) => point[at]));
  return { kind, whole: kind === "linear" && values.every(Number.isInteger), values: range ?? (kind === "category" ? values : extent(values)), title: visible(title), pad: range === null && kind === "linear" ? 0.04 : 0 };
}

function drawn(series, plot, names, models, isLabelled, store) {
  const { of, shape, line, points } = series;
  const colour = COLOURS[of];
  if (of === "reference") return { name: "right", colour, line: "line", dash: [5, 4], width: 1, still: true, quiet: true, points: points.map(([x, y]) => ({ x, y })) };
  const name = visible(series.label ?? names[of]);
  const isBar = shape === "bar";
  const aside = isBar && models.length > 1 ? 0.56 * (models.indexOf(of) - 0.5) : 0;
  const outer = series.name !== null && series.name !== "50 %"; // a quantile beside the median
  return {
    name, colour, shape, line: line ? "line" : null, dash: outer || series.dashed ? [4, 3] : null, quiet: !isLabelled, still: shape === null, size: isBar ? 7 : line || plot.x.kind === "category" ? 3.6 : 2.4,
    points: points.map(([x, y, { text, size, member } = {}]) => ({
      x, y, aside, size, id: member, pale: member !== undefined && store.isPale(member), colour: store.selection.has(member) ? store.colour(member) : null,
      text: text ?? `${name}${series.name ? `, ${series.name}` : ""}\n${visible(plot.x.title)} ${amount(x)}\n${visible(plot.y.title)} ${amount(y)}`,
    })),
  };
}

function amount(given) {
  return typeof given === "number" ? significant(given, 4) : visible(given);
}
