/**
 * Draws many lines over a common axis: axes and the strong lines as SVG, all others on one canvas.
 *
 * A thousand lines of fifty points take about 3 ms this way.
 */

import { fill, svg } from "./dom.js";
import { nearest, trace } from "./curve_series.js";
import { linearTicks, logTicks, spanScale, padded, tickText, timeText, timeTicks } from "./scales.js";
import { Stage } from "./stage.js";

const BOTTOM = 40;
const TOP = 10;
const RIGHT = 16;
const MOST_LEAVING = 50; // lines that are marked where they leave the axis

/**
 * A chart. `options`: `label` (accessible name), `height`, `onHover(id or null)`, `onPick(id)`, `onZoom(span or null)`,
 * `describe(series, index)` -> lines of the hover's text.
 *
 * `draw(model)`: `series: [{ id, xs, ys, colour, strong, best, width, dash, behind: [values] }]`, `band: [[x, q1, q2, q3]]`,
 * `x: { lo, hi, label, kind: "number" | "whole" | "time" }`, `y: { lo, hi, log }`, `paleness`: opacity of those not strong.
 */
export class LineChart extends Stage {
  constructor(options) {
    super(options.height, { class: "curve-chart", tabindex: "0", role: "group", "aria-roledescription": "chart", "aria-label": options.label },
      { "aria-hidden": "true", "data-mark": "others" });
    this.options = options;
    this.model = null;
    this.clip = `clip-${Math.random().toString(36).slice(2)}`;
    this.hovered = null; // { id, index }
    this.marks = svg("svg", { class: "strong-marks", "aria-hidden": "true" });
    this.box = svg("rect", { class: "zoombox", hidden: true });
    this.canvas.after(this.marks);
    this.drag = null;
    this.listen();
  }

  listen() {
    const on = (name, listener) => this.root.addEventListener(name, listener);
    on("pointermove", (event) => this.move(event));
    on("pointerdown", (event) => this.press(event));
    on("pointerup", (event) => this.release(event));
    on("pointercancel", () => this.cancelDrag());
    on("pointerleave", () => this.drag === null && this.hover(null));
    on("dblclick", () => this.options.onZoom(null));
    on("keydown", (event) => this.key(event));
    on("blur", () => this.hover(null));
  }

  /** Draws a model; see the class. */
  draw(model) {
    this.model = model;
    this.refresh();
  }

  render(width, height) {
    const { model } = this;
    if (model === null) return;
    const yTicks = model.y.log ? logTicks(model.y.lo, model.y.hi, 6) : linearTicks(model.y.lo, model.y.hi, 6);
    const left = this.labelRoom(yTicks.map(tickText));
    this.area = { left, right: width - RIGHT, top: TOP, bottom: height - BOTTOM };
    this.x = spanScale(model.x.lo, model.x.hi, left + 4, width - RIGHT);
    this.y = spanScale(model.y.lo, model.y.hi, height - BOTTOM, TOP, model.y.log);
    const { lo, hi, kind, label } = model.x;
    const most = Math.max(2, Math.min(12, Math.floor((width - RIGHT - left) / (kind === "time" ? 74 : 58))));
    const xTicks = kind === "time" ? timeTicks(lo, hi, most) : linearTicks(lo, hi, most, kind === "whole");
    const write = kind === "time" ? timeText : tickText;
    this.drawAxes(this.area,
      { title: label, ticks: xTicks.map((value) => ({ at: this.x.at(value), label: write(value) })) },
      { ticks: yTicks.map((value) => ({ at: this.y.at(value), label: tickText(value) })) });
    this.drawCanvas();
    this.drawMarks();
  }

  drawCanvas() {
    const { canvas } = this;
    const context = this.openWithin(this.area, 2);
    context.globalAlpha = this.model.paleness;
    context.lineWidth = 1;
    context.lineJoin = "round";
    let [drawn, points] = [0, 0];
    for (const series of this.model.series) {
      if (series.strong) continue;
      context.strokeStyle = series.colour;
      context.fillStyle = series.colour;
      context.beginPath();
      trace(series, this.x, this.y, (x, y) => [context.moveTo(x, y), (points += 1)], (x, y) => [context.lineTo(x, y), (points += 1)]);
      if (series.xs.length === 1 && series.ys[0] !== null) context.fillRect(this.x.at(series.xs[0]) - 1, this.y.at(series.ys[0]) - 1, 2, 2);
      context.stroke();
      drawn += 1;
    }
    context.restore();
    canvas.dataset.count = drawn;
    canvas.dataset.points = points;
  }

  drawMarks() {
    const { width, height } = this;
    const { left, right } = this.area;
    const strong = this.model.series.filter((series) => series.strong);
    this.marks.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.hoverMark = svg("g", { class: "hovered" });
    const clip = svg("clipPath", { id: this.clip }, svg("rect", { x: left, y: 0, width: Math.max(0, right - left + 8), height: height - BOTTOM + 4 }));
    fill(this.marks, svg("defs", {}, clip),
      svg("g", { "clip-path": `url(#${this.clip})` }, this.drawBand(), strong.map((series) => this.drawLine(series)), this.hoverMark),
      this.model.series.slice(-MOST_LEAVING).map((series) => this.drawLeaving(series)),
      this.box);
    this.showHovered();
  }

  path(xs, ys) {
    let d = "";
    trace({ xs, ys }, this.x, this.y, (x, y) => (d += `M${x.toFixed(1)},${y.toFixed(1)}`), (x, y) => (d += `L${x.toFixed(1)},${y.toFixed(1)}`));
    return d;
  }

  drawBand() {
    const rows = this.model.band ?? [];
    if (rows.length === 0) return null;
    const xs = rows.map(([x]) => x);
    const floor = (value) => (this.y.log ? Math.max(value, this.y.lo) : value);
    const up = rows.map(([x, , , upper]) => `${this.x.at(x).toFixed(1)},${this.y.at(floor(upper)).toFixed(1)}`);
    const down = rows.map(([x, lower]) => `${this.x.at(x).toFixed(1)},${this.y.at(floor(lower)).toFixed(1)}`).reverse();
    return [
      svg("path", { class: "band", "data-mark": "quartiles", d: `M${[...up, ...down].join("L")}Z` }),
      svg("path", { class: "median", "data-mark": "median", d: this.path(xs, rows.map((row) => row[2])) }),
    ];
  }

  drawLine(series) {
    const { xs, ys, colour } = series;
    const dots = series.dash || xs.length > 40 ? [] : xs.map((x, i) => [x, ys[i]]);
    const last = xs.length - 1;
    return svg("g", { "data-member": series.id, "data-mark": series.dash ? "training" : series.best ? "best" : "line" },
      series.behind && svg("path", { d: this.path(xs, series.behind), stroke: colour, fill: "none", "stroke-opacity": 0.28, "stroke-width": 1 }),
      svg("path", { d: this.path(xs, ys), stroke: colour, fill: "none", "stroke-width": series.width ?? 2, "stroke-dasharray": series.dash, "stroke-linejoin": "round" }),
      dots.filter(([, y]) => y !== null && y !== undefined && !(this.y.log && y <= 0))
        .map(([x, y]) => svg("circle", { cx: this.x.at(x).toFixed(1), cy: this.y.at(y).toFixed(1), r: 2.2, fill: colour })),
      series.best && last >= 0 && this.isDrawable(ys[last])
        && svg("circle", { class: "best-ring", cx: this.x.at(xs[last]), cy: this.y.at(ys[last]), r: 5.5, fill: "none", stroke: colour, "stroke-width": 2 }));
  }

  /** A triangle at the edge of the axis where a line leaves it for the first time; null: it does not. */
  drawLeaving({ id, xs, ys, colour }) {
    const [{ lo, hi }, { left, right }] = [this.model.y, this.area];
    const at = ys.findIndex((y, i) => this.isDrawable(y) && (y < lo || y > hi) && this.x.at(xs[i]) >= left && this.x.at(xs[i]) <= right);
    if (at < 0) return null;
    const [x, up] = [this.x.at(xs[at]), ys[at] > hi ? 1 : -1];
    const y = this.y.at(up > 0 ? hi : lo);
    return svg("path", { "data-mark": "leaving", "data-member": id, fill: colour, d: `M${x - 5},${y + 8 * up}L${x},${y}L${x + 5},${y + 8 * up}Z` });
  }

  isDrawable(value) {
    return value !== null && value !== undefined && !(this.y.log && value <= 0);
  }

  /** Marks a member's line, at a point of it where `index` is given; null marks none. */
  hover(id, index = null) {
    this.hovered = id === null ? null : { id, index };
    this.showHovered();
    this.options.onHover(id);
  }

  /** Marks a line that is hovered elsewhere. */
  showHover(id) {
    if (this.hovered?.id === id) return;
    this.hovered = id === null ? null : { id, index: null };
    this.showHovered();
  }

  showHovered() {
    if (this.model === null || this.hoverMark === undefined) return;
    const series = this.hovered && this.model.series.find((each) => each.id === this.hovered.id && !each.dash);
    if (!series) {
      fill(this.hoverMark);
      this.tip.hide();
      return;
    }
    const { index } = this.hovered;
    const isPoint = index !== null && this.isDrawable(series.ys[index]);
    fill(this.hoverMark,
      svg("path", { class: "halo", d: this.path(series.xs, series.ys), fill: "none" }),
      svg("path", { d: this.path(series.xs, series.ys), stroke: series.strong ? series.colour : "currentColor", fill: "none", "stroke-width": 2.4 }),
      isPoint && svg("circle", { cx: this.x.at(series.xs[index]), cy: this.y.at(series.ys[index]), r: 4.5, fill: series.strong ? series.colour : "currentColor" }));
    if (isPoint) this.tip.show(this.x.at(series.xs[index]), this.y.at(series.ys[index]), this.options.describe(series, index));
    else this.tip.hide();
  }

  find(event) {
    const [x, y] = this.locate(event);
    return nearest(this.model.series.filter((series) => !series.dash), this.x, this.y, x, y);
  }

  move(event) {
    if (this.model === null) return;
    if (this.drag !== null) {
      this.stretch(event);
      return;
    }
    const found = this.find(event);
    this.hover(found?.series.id ?? null, found?.index ?? null);
  }

  press(event) {
    if (event.button !== 0 || this.model === null) return;
    this.drag = { from: this.locate(event), moved: false };
    if (event.pointerType === "mouse") this.root.setPointerCapture(event.pointerId);
  }

  stretch(event) {
    const [x, y] = this.locate(event);
    const [fromX, fromY] = this.drag.from;
    if (!this.drag.moved && Math.hypot(x - fromX, y - fromY) < 8) return;
    this.drag.moved = true;
    const { top, bottom } = this.area;
    for (const [name, value] of Object.entries({ x: Math.min(x, fromX), y: top, width: Math.abs(x - fromX), height: bottom - top })) {
      this.box.setAttribute(name, value);
    }
    this.box.removeAttribute("hidden");
  }

  release(event) {
    const { drag } = this;
    this.cancelDrag();
    if (drag === null) return;
    if (!drag.moved) {
      const found = this.find(event);
      if (found !== null) this.options.onPick(found.series.id);
      return;
    }
    const [a, b] = [drag.from[0], this.locate(event)[0]].map((x) => this.x.back(x)).sort((p, q) => p - q);
    this.options.onZoom([Math.max(a, this.model.x.lo), Math.min(b, this.model.x.hi)]);
  }

  cancelDrag() {
    this.drag = null;
    this.box.setAttribute("hidden", "");
  }

  /** Arrow keys go from line to line and along one, Enter selects, + and − zoom, 0 shows all. */
  key(event) {
    if (this.model === null || event.ctrlKey || event.metaKey || event.altKey) return;
    const lines = this.model.series.filter((series) => !series.dash && series.xs.length);
    const act = {
      ArrowUp: () => this.step(lines, 1), ArrowDown: () => this.step(lines, -1),
      ArrowLeft: () => this.along(lines, -1), ArrowRight: () => this.along(lines, 1),
      Enter: () => this.hovered && this.options.onPick(this.hovered.id),
      " ": () => this.hovered && this.options.onPick(this.hovered.id),
      "+": () => this.zoomBy(0.6), "-": () => this.zoomBy(1 / 0.6), "0": () => this.options.onZoom(null),
    }[event.key];
    if (act === undefined || (event.key === "0" && !this.model.zoomed)) return;
    event.preventDefault();
    event.stopPropagation();
    act();
  }

  step(lines, by) {
    const end = (series) => series.ys.findLast((value) => value !== null) ?? -Infinity;
    const sorted = [...lines].sort((a, b) => end(a) - end(b));
    const at = sorted.findIndex((series) => series.id === this.hovered?.id);
    const next = sorted[at === -1 ? (by > 0 ? 0 : sorted.length - 1) : Math.max(0, Math.min(sorted.length - 1, at + by))];
    if (next !== undefined) this.hover(next.id, next.xs.length - 1);
  }

  along(lines, by) {
    const series = lines.find((each) => each.id === this.hovered?.id);
    if (series === undefined) return this.step(lines, 1);
    const at = this.hovered.index ?? series.xs.length - 1;
    this.hover(series.id, Math.max(0, Math.min(series.xs.length - 1, at + by)));
  }

  zoomBy(factor) {
    const { lo, hi } = this.model.x;
    const [middle, half] = [(lo + hi) / 2, ((hi - lo) / 2) * factor];
    this.options.onZoom(factor > 1 && half * 2 >= this.model.x.whole ? null : [middle - half, middle + half]);
  }
}

/** Limits of an axis around values: a little room at both ends, none below zero where no value is. */
export function limits(span, log) {
  const [lo, hi] = padded(span[0], span[1], 0.04, log);
  return [!log && span[0] >= 0 && lo < 0 ? 0 : lo, hi];
}
