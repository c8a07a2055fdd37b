/** The figures of what models predict, by task: one chart for each plot of the document `quality`, drawn as it stands. */

import { Chart } from "../canvas_chart.js";
import { extent } from "../scales.js";
import { significant } from "../format.js";
import { HIGHLIGHT, NEUTRAL, SERIES } from "../store.js";

/** The colour of a run, or of another of many things that are drawn together, by its place. */
export function colourAt(place) {
  return SERIES[place] ?? `hsl(${Math.round(place * 137.5) % 360} 52% 52%)`;
}

const COLOURS = { best: SERIES[0], combined: HIGHLIGHT, reference: NEUTRAL };

/** A chart for a plot: `root`, `draw(plot, names)`, `close()`. `names`: what each model, or run by its place, is called; many have no legend. */
export function plotChart(plot) {
  const chart = new Chart({ title: plot.title, width: "half", height: 320 });
  return {
    root: chart.card.root,
    close: () => chart.close(),
    draw(next, names) {
      chart.read(next.reading);
      const models = [...new Set(next.series.map(({ of }) => of).filter((of) => of !== "reference"))];
      const isLabelled = (series) => next.series.find((each) => each.of === series.of) === series;
      chart.draw({
        x: axis(next.x, next.series, 0),
        y: { ...axis(next.y, next.series, 1), zero: next.series.some(({ shape }) => shape === "bar") },
        series: next.series.map((series) => drawn(series, next, names, models, isLabelled(series))),
        said: models.map((of) => names[of]).join("; "),
      });
    },
  };
}

function axis({ title, range, kind, whole }, series, at) {
  const values = series.flatMap(({ points }) => points.map((point) => point[at]));
  return { kind, values: range ?? (kind === "category" ? values : extent(values)), title, whole, pad: range === null && kind === "linear" ? 0.04 : 0 };
}

function drawn(series, plot, names, models, isLabelled) {
  const { of, shape, line, points } = series;
  const colour = COLOURS[of] ?? colourAt(of);
  if (of === "reference") return { name: "right", colour, line: "line", dash: [5, 4], width: 1, still: true, quiet: true, points: points.map(([x, y]) => ({ x, y })) };
  const name = names[of];
  const isBar = shape === "bar";
  const aside = isBar && models.length > 1 ? 0.56 * (models.indexOf(of) - 0.5) : 0;
  const outer = series.name !== null && series.name !== "50 %"; // a quantile beside the median
  return {
    name, colour, shape, line: line ? "line" : null, dash: outer ? [4, 3] : null, quiet: !isLabelled || names.length > SERIES.length, size: isBar ? 7 : line || plot.x.kind === "category" ? 3.6 : 2.4,
    points: points.map(([x, y, { text, size } = {}]) => ({
      x, y, aside, size, text: text ?? `${name}${series.name ? `, ${series.name}` : ""}\n${plot.x.title} ${significant(x, 4)}\n${plot.y.title} ${significant(y, 4)}`,
    })),
  };
}
