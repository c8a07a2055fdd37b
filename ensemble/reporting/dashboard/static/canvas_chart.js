/** Figures drawn by hand: marks on a canvas, axes as SVG, the same numbers as a table. Light with thousands of marks. */

import { card } from "./card.js";
import { fill, h, svg } from "./dom.js";
import { significant, value, visible } from "./format.js";
import { makeScale } from "./scales.js";
import { Stage } from "./stage.js";

const NEAR_PX = 22;

/**
 * A chart in a card. `options` as of `card`, and `height` (px), `pick(id)` (a mark was chosen), `label` (of the figure).
 * `draw(spec)`: `{ x, y, series, legend }`; `x` and `y` are options of `makeScale` with `label` as `title`.
 * A series: `{ name, colour, points: [{ x, y, id?, text?, size?, colour?, pale?, aside? }], shape: "dot"|"ring"|"cross"|null, size, line: "line"|"steps"|null,
 * dash, width, quiet (not in the legend), still (no hover) }`. A point with `y` null interrupts a line;
 * `aside` (-0.5 … 0.5) moves it beside its place, so that equal values do not hide each other.
 */
export class Chart extends Stage {
  constructor(options) {
    super(options.height, {}, { tabindex: "0", role: "img", "aria-label": options.title });
    this.options = options;
    this.make = null; // makes what is to be drawn
    this.places = [];
    this.active = -1;
    this.card = card({ table: () => this.tabulate(), ...options, onShown: () => this.refresh() });
    this.legend = h("div", { class: "chart-legend" });
    fill(this.card.body, this.legend, this.root);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.leave());
    this.canvas.addEventListener("click", () => this.choose());
    this.canvas.addEventListener("keydown", (event) => this.press(event));
    this.canvas.addEventListener("blur", () => this.leave());
  }

  /** Draws `spec`, or what the function `spec` returns. */
  draw(spec) {
    if (this.make === null) this.card.explain(null);
    this.make = typeof spec === "function" ? spec : () => spec;
    this.refresh();
    this.card.update();
  }

  explain(reason) {
    this.make = null;
    this.card.explain(reason);
  }

  read(text) {
    this.card.read(text);
  }

  render(width, height) {
    if (this.make === null) return;
    const spec = this.make();
    const { x, y, series } = spec;
    const left = this.labelRoom(makeScale({ ...y, ticks: 5 }, height, 0).ticks.map((tick) => tick.label)) + (y.title ? 18 : 0);
    const area = { left, right: width - 12, top: 8, bottom: height - (x.title ? 42 : 24) };
    const across = makeScale({ ...x, ticks: Math.max(2, Math.min(x.ticks ?? 8, Math.floor((area.right - left) / 70))) }, left, area.right);
    const up = makeScale({ ...y, ticks: 5 }, area.bottom, area.top);
    this.drawAxes(area, { ticks: across.ticks, title: x.title, lines: across.kind !== "category" }, { ticks: up.ticks, title: y.title });
    this.drawMarks(area, across, up, spec);
    this.drawLegend(series);
    this.active = Math.min(this.active, this.places.length - 1);
  }

  drawMarks(box, across, up, { series, said }) {
    const context = this.openWithin(box, 9);
    this.places = [];
    let marks = 0;
    for (const each of series) {
      const aside = across.kind === "category" ? (0.55 * (box.right - box.left)) / Math.max(1, across.domain.length) : 14;
      const placed = each.points.map((point) => ({ point, series: each, x: shifted(across.at(point.x), (point.aside ?? 0) * aside), y: point.y === null ? null : up.at(point.y) }));
      if (each.line) strokeLine(context, each, placed);
      if (each.shape) marks += fillMarks(context, each, placed.filter((at) => at.x !== null && at.y !== null));
      else marks += placed.filter((at) => at.y !== null).length;
      if (!each.still) for (const at of placed) if (at.x !== null && at.y !== null) this.places.push(at);
    }
    context.restore();
    this.places.sort((a, b) => a.x - b.x);
    this.canvas.setAttribute("data-marks", marks);
    this.canvas.setAttribute("aria-label", `${this.options.title}: ${said ?? `${marks} marks`}. Arrow keys go from mark to mark.`);
  }

  drawLegend(series) {
    const shown = series.filter((each) => !each.quiet && each.name);
    const key = shown.map((each) => [each.name, each.colour, each.shape, each.dash].join("|")).join("\n");
    if (key === this.legendKey) return;
    this.legendKey = key;
    fill(this.legend, shown.map((each) => h("span", { class: "chart-key" }, swatch(each), each.name)));
    this.legend.hidden = shown.length === 0;
  }

  /** The points as they are drawn; what is the same in all of them is left out. */
  tabulate() {
    const { x, y, series } = this.make();
    const shortened = ({ label }) => label ?? ((given) => (typeof given === "number" ? significant(given, 4) : value(given)));
    const rows = series.filter((each) => !each.still).flatMap((each) => each.points.filter((point) => point.y !== null)
      .map((point) => [visible(point.id ?? ""), each.name ?? "", point.x, point.y]));
    const heads = ["member", "", [x.title ?? this.options.title, shortened(x)], [y.title ?? "value", shortened(y)]];
    const kept = [0, 1, 2, 3].filter((i) => i > 1 || new Set(rows.map((row) => row[i])).size > 1);
    return { head: kept.map((i) => heads[i]), rows: rows.map((row) => kept.map((i) => row[i])) };
  }

  point(event) {
    const [x, y] = this.locate(event);
    let [best, found] = [NEAR_PX ** 2, -1];
    this.places.forEach((at, i) => {
      const away = (at.x - x) ** 2 + (at.y - y) ** 2;
      if (away < best) [best, found] = [away, i];
    });
    this.show(found);
  }

  show(index) {
    this.active = index;
    const at = this.places[index];
    this.canvas.style.cursor = at?.point.id !== undefined && this.options.pick ? "pointer" : "default";
    if (at === undefined) this.tip.hide();
    else this.tip.show(at.x, at.y, (at.point.text ?? at.series.name ?? "").split("\n"));
  }

  leave() {
    this.show(-1);
  }

  choose() {
    const id = this.places[this.active]?.point.id;
    if (id !== undefined) this.options.pick?.(id);
  }

  press(event) {
    const step = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
    if (step !== undefined) {
      event.preventDefault();
      this.show(Math.max(0, Math.min(this.places.length - 1, this.active + step)));
    } else if ((event.key === "Enter" || event.key === " ") && this.active >= 0) {
      event.preventDefault();
      this.choose();
    }
  }
}

function shifted(at, by) {
  return at === null ? null : at + by;
}

function strokeLine(context, series, placed) {
  context.strokeStyle = series.colour;
  context.lineWidth = series.width ?? 1.5;
  context.setLineDash(series.dash ?? []);
  context.beginPath();
  let last = null;
  for (const at of placed) {
    const isGap = at.x === null || at.y === null;
    if (!isGap && last === null) context.moveTo(at.x, at.y);
    else if (!isGap) {
      if (series.line === "steps") context.lineTo(at.x, last.y);
      context.lineTo(at.x, at.y);
    }
    last = isGap ? null : at;
  }
  context.stroke();
  context.setLineDash([]);
}

function fillMarks(context, series, placed) {
  for (const at of placed) {
    const size = at.point.size ?? series.size ?? 3.6;
    context.globalAlpha = at.point.pale ? 0.16 : 0.88;
    context.fillStyle = context.strokeStyle = at.point.colour ?? series.colour;
    context.lineWidth = 1.5;
    context.beginPath();
    if (series.shape === "cross") {
      context.moveTo(at.x - size, at.y - size);
      context.lineTo(at.x + size, at.y + size);
      context.moveTo(at.x + size, at.y - size);
      context.lineTo(at.x - size, at.y + size);
      context.stroke();
    } else {
      context.arc(at.x, at.y, size, 0, 2 * Math.PI);
      if (series.shape === "ring") context.stroke();
      else context.fill();
    }
  }
  context.globalAlpha = 1;
  return placed.length;
}

/** The mark of a series as a small picture for a legend. */
function swatch({ colour, shape, line, dash }) {
  const parts = [];
  if (line) parts.push(svg("line", { x1: 1, x2: 19, y1: 7, y2: 7, stroke: colour, "stroke-width": 2, "stroke-dasharray": dash?.join(" ") ?? null }));
  if (shape === "cross") parts.push(svg("path", { d: "M7 4l6 6m0-6l-6 6", stroke: colour, "stroke-width": 1.6, fill: "none" }));
  else if (shape) parts.push(svg("circle", { cx: 10, cy: 7, r: 3.8, fill: shape === "ring" ? "none" : colour, stroke: colour, "stroke-width": 1.5 }));
  return svg("svg", { class: "chart-swatch", viewBox: "0 0 20 14", "aria-hidden": "true" }, parts);
}
