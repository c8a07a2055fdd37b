/** Parallel coordinates: one axis for each hyperparameter, one line for each trial. Lines on a canvas, axes as SVG. */

import { fill, h, svg } from "./dom.js";
import { shorten, value } from "./format.js";
import { chooseKind, compareValues, keyOf, makeScale, possibleKinds } from "./scales.js";
import { makeTip } from "./card.js";
import { openCanvas, pixelRatio } from "./stage.js";

const HEIGHT = 360;
const TOP = 54;
const BOTTOM = HEIGHT - 34;
const ABSENT_AT = HEIGHT - 12;
const LEFT = 58;
const RIGHT = 30;
const LEAST_SPACING = 92;
const NEAR_PX = 7;
const MANY = 150; // lines drawn strong
const DASH = { finished: [], pruned: [2, 3], running: [7, 4], standing: [4, 4], failed: [1, 4], waiting: [1, 4] };

/**
 * Axes with lines. `options`: `onBrush(ids|null)` (a range was dragged or typed; null: none is left), `pick(id)`, `hover(id|null)`, `onScale()`
 * (`kinds` are others).
 * `draw(spec)`: `{ trials, axes: [{ name, of(trial), objective }], colour(trial), isStrong(id), describe(trial) }`.
 */
export class ParallelAxes {
  constructor(options) {
    this.options = options;
    this.kinds = new Map(); // what the reader chose
    this.brushes = new Map(); // axis -> { low, high } or { keys }
    this.spec = null;
    this.lines = [];
    this.drag = null;
    this.hovered = null;
    this.canvas = h("canvas", { role: "img", class: "lines" });
    this.over = h("canvas", { "aria-hidden": "true" });
    this.axes = svg("svg", {});
    this.heads = h("div", { class: "axis-heads" });
    this.stage = h("div", { class: "chart parallel", style: { height: `${HEIGHT}px` } }, this.canvas, this.over, this.axes, this.heads);
    this.tip = makeTip(this.stage);
    this.root = h("div", { class: "scroll", tabindex: "-1" }, this.stage);
    this.ranges = h("details", { class: "ranges" }, h("summary", {}, "Ranges as numbers"), (this.fields = h("div", { class: "range-fields" })));
    this.axes.addEventListener("pointerdown", (event) => this.press(event));
    this.axes.addEventListener("pointermove", (event) => this.move(event));
    this.axes.addEventListener("pointerup", (event) => this.release(event));
    this.axes.addEventListener("pointercancel", () => (this.drag = null));
    this.axes.addEventListener("pointerleave", () => this.setHover(null));
    this.observer = new ResizeObserver(() => this.spec !== null && this.root.clientWidth !== this.room && this.arrange());
    this.observer.observe(this.root);
    this.room = 0;
    this.pending = false;
  }

  close() {
    this.observer.disconnect();
  }

  draw(spec) {
    this.spec = spec;
    for (const name of [...this.brushes.keys()]) if (!spec.axes.some((axis) => axis.name === name)) this.brushes.delete(name);
    this.arrange();
    this.fillRanges();
  }

  kindOf(axis, values) {
    const chosen = this.kinds.get(axis.name);
    if (chosen !== undefined && possibleKinds(values).includes(chosen)) return chosen;
    return axis.objective && chooseKind(values) === "category" ? "linear" : chooseKind(values);
  }

  arrange() {
    const { trials, axes } = this.spec;
    this.room = this.root.clientWidth;
    if (this.room === 0) return;
    const spacing = Math.max(LEAST_SPACING, (this.room - LEFT - RIGHT) / Math.max(1, axes.length - 1));
    this.width = Math.max(this.room, LEFT + RIGHT + LEAST_SPACING * (axes.length - 1));
    this.stage.style.width = `${this.width}px`;
    this.placed = axes.map((axis, i) => {
      const values = trials.map(axis.of).filter((each) => each !== undefined && each !== null);
      const kind = this.kindOf(axis, values);
      return { ...axis, kinds: possibleKinds(values), kind, x: LEFT + i * spacing, scale: makeScale({ kind, values }, BOTTOM, TOP) };
    });
    this.lines = trials.map((trial) => ({ trial, ys: this.placed.map((axis) => this.levelOf(axis, trial)) }));
    this.drawAxes(spacing);
    this.paint();
  }

  /** Where a trial crosses an axis; below it where it lacks the value; null where it has no objective yet. */
  levelOf(axis, trial) {
    const given = axis.of(trial);
    if (given === undefined || given === null) return axis.objective ? null : ABSENT_AT;
    return axis.scale.at(given) ?? ABSENT_AT;
  }

  drawAxes(spacing) {
    const parts = [];
    const heads = [];
    for (const axis of this.placed) {
      const ticks = axis.scale.ticks.map((tick) => svg("text", { x: axis.x - 7, y: tick.at + 4, "text-anchor": "end" }, shorten(tick.label, 11)));
      parts.push(svg("g", { "data-axis": axis.name, "data-kind": axis.kind },
        svg("line", { class: "axis-line", x1: axis.x, x2: axis.x, y1: TOP, y2: BOTTOM }), ticks,
        this.lines.some((line) => !axis.objective && axis.of(line.trial) === undefined) ? svg("text", { x: axis.x - 7, y: ABSENT_AT + 4, "text-anchor": "end" }, "absent") : null,
        (axis.mark = svg("rect", { class: "brush", x: axis.x - 9, width: 18, rx: 3 })),
        svg("rect", { class: "brush-room", x: axis.x - 16, width: 32, y: TOP - 8, height: BOTTOM - TOP + 16 })));
      heads.push(this.headOf(axis, spacing));
    }
    for (const axis of this.placed) this.placeBrush(axis);
    this.axes.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.axes.style.width = `${this.width}px`;
    fill(this.axes, parts);
    const focused = [...this.heads.querySelectorAll("button")].indexOf(document.activeElement);
    fill(this.heads, heads);
    if (focused >= 0) this.heads.querySelectorAll("button")[focused]?.focus();
  }

  headOf(axis, spacing) {
    const { kinds } = axis;
    const next = kinds[(kinds.indexOf(axis.kind) + 1) % kinds.length];
    const words = { log: "log", linear: "linear", category: "values" };
    const change = () => {
      this.kinds.set(axis.name, next);
      this.options.onScale();
      this.arrange();
    };
    const button = kinds.length > 1
      ? h("button", { type: "button", class: "kind", "aria-label": `${value(axis.name)} is ${words[axis.kind]}; make it ${words[next]}`, onclick: change }, words[axis.kind])
      : null;
    const wide = Math.min(spacing - 6, 150);
    return h("div", { class: axis.objective ? "axis-head objective" : "axis-head", style: { left: `${Math.max(0, Math.min(axis.x - wide / 2, this.width - wide))}px`, width: `${wide}px` } },
      h("span", { title: value(axis.name) }, value(axis.name)), button);
  }

  placeBrush(axis) {
    const extent = this.extentOf(axis);
    axis.mark.setAttribute("y", extent?.[0] ?? TOP);
    axis.mark.setAttribute("height", extent === null ? 0 : Math.max(1, extent[1] - extent[0]));
    axis.mark.style.display = extent === null ? "none" : "inline";
  }

  extentOf(axis) {
    const brush = this.brushes.get(axis.name);
    if (brush === undefined) return null;
    if (axis.scale.kind === "category") {
      const places = axis.scale.domain.filter((each) => isWithin(brush, each)).map((each) => axis.scale.at(each));
      return places.length ? [Math.min(...places) - 8, Math.max(...places) + 8] : null;
    }
    if (brush.keys !== undefined) return null;
    const clamp = (px, otherwise) => Math.max(TOP - 4, Math.min(BOTTOM + 4, px ?? otherwise));
    return [clamp(axis.scale.at(brush.high), TOP - 4), clamp(axis.scale.at(brush.low), BOTTOM + 4)];
  }

  /** The ids of trials within all ranges; null where there is no range. */
  matches() {
    if (this.brushes.size === 0) return null;
    const tests = this.placed.filter((axis) => this.brushes.has(axis.name)).map((axis) => [axis, this.brushes.get(axis.name)]);
    return this.spec.trials.filter((trial) => tests.every(([axis, brush]) => isWithin(brush, axis.of(trial)))).map((trial) => trial.id);
  }

  clearBrushes() {
    if (this.brushes.size === 0) return;
    this.brushes.clear();
    this.fieldsKey = null;
    if (this.spec !== null) this.draw(this.spec);
  }

  /** The ranges as an address holds them: `[[name, { low, high } or { keys: [...] }], ...]`; an end that is null is open. */
  listRanges() {
    return [...this.brushes].map(([name, brush]) => [name, brush.keys === undefined ? brush : { keys: [...brush.keys] }]);
  }

  /** Sets the ranges; those that are none are left out. */
  setRanges(ranges) {
    this.brushes = new Map(ranges.filter((each) => Array.isArray(each) && each[1] instanceof Object).map(([name, { keys, low, high }]) => [String(name),
      Array.isArray(keys) ? { keys: new Set(keys) } : { low: Number.isFinite(low) ? low : -Infinity, high: Number.isFinite(high) ? high : Infinity }]));
  }

  setBrush(name, brush) {
    if (brush === null) this.brushes.delete(name);
    else this.brushes.set(name, brush);
  }

  paint() {
    this.pending = false;
    const context = openCanvas(this.canvas, this.width, HEIGHT);
    const preview = this.drag === null ? null : new Set(this.matches() ?? this.spec.trials.map((each) => each.id));
    const strong = [];
    // Hairlines are drawn many times faster than lines that are wider than a pixel of the screen.
    const hairline = 1 / pixelRatio();
    context.lineWidth = hairline;
    context.strokeStyle = "rgba(138,148,163,0.2)";
    context.beginPath();
    for (const line of this.lines) {
      if (preview === null ? this.spec.isStrong(line.trial.id) : preview.has(line.trial.id)) strong.push(line);
      else this.trace(context, line);
    }
    context.stroke();
    const many = strong.length > MANY;
    for (const line of strong.reverse()) { // the best comes last
      if (this.drag === null || !many) context.setLineDash(DASH[line.trial.phase]);
      context.lineWidth = many ? hairline : line.trial.phase === "finished" ? 1.6 : 1.1;
      context.globalAlpha = many ? 0.65 : 0.85;
      context.strokeStyle = this.spec.colour(line.trial);
      context.beginPath();
      this.trace(context, line);
      context.stroke();
    }
    context.setLineDash([]);
    context.globalAlpha = 1;
    this.canvas.setAttribute("data-lines", this.lines.length);
    this.canvas.setAttribute("data-strong", strong.length);
    this.canvas.setAttribute("aria-label", `Parallel coordinates of ${this.lines.length} trials over ${this.placed.map((axis) => value(axis.name)).join(", ")}; ${strong.length} drawn strong`);
    this.paintOver();
  }

  trace(context, line) {
    let begun = false;
    line.ys.forEach((y, i) => {
      if (y === null) return;
      if (begun) context.lineTo(this.placed[i].x, y);
      else context.moveTo(this.placed[i].x, y);
      begun = true;
    });
  }

  paintOver() {
    const context = openCanvas(this.over, this.width, HEIGHT);
    const line = this.lines.find((each) => each.trial.id === this.hovered);
    if (line === undefined) return;
    context.strokeStyle = this.spec.colour(line.trial);
    context.fillStyle = context.strokeStyle;
    context.lineWidth = 3;
    context.setLineDash(DASH[line.trial.phase]);
    context.beginPath();
    this.trace(context, line);
    context.stroke();
    line.ys.forEach((y, i) => {
      if (y === null) return;
      context.beginPath();
      context.arc(this.placed[i].x, y, 3.5, 0, 2 * Math.PI);
      context.fill();
    });
  }

  /** Marks a trial's line, wherever the pointer is. */
  setHover(id, at = null) {
    if (id === this.hovered && at === null) return; // it was marked here
    if (id === null || at === null) this.tip.hide();
    else this.tip.show(...at, this.spec.describe(this.lines.find((each) => each.trial.id === id).trial));
    if (id === this.hovered) return;
    this.hovered = id;
    this.axes.style.cursor = id === null ? "default" : "pointer";
    if (at !== null || id === null) this.options.hover?.(id);
    if (this.spec !== null) this.paintOver();
  }

  locate(event) {
    const box = this.axes.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  nearest(x, y) {
    const right = this.placed.findIndex((axis) => axis.x >= x);
    if (right < 1) return null;
    const [a, b] = [this.placed[right - 1].x, this.placed[right].x];
    let [best, found] = [NEAR_PX, null];
    for (const line of this.lines) {
      const [from, to] = [line.ys[right - 1], line.ys[right]];
      if (from === null || to === null) continue;
      const away = Math.abs(from + ((x - a) / (b - a)) * (to - from) - y) + (this.spec.isStrong(line.trial.id) ? 0 : 3);
      if (away < best) [best, found] = [away, line.trial.id];
    }
    return found;
  }

  press(event) {
    const [x, y] = this.locate(event);
    const axis = this.placed.find((each) => Math.abs(each.x - x) <= 16);
    if (axis === undefined || event.button !== 0) return;
    event.preventDefault();
    this.axes.setPointerCapture(event.pointerId);
    const within = this.extentOf(axis);
    const moves = within !== null && y > within[0] && y < within[1];
    this.drag = { name: axis.name, from: y, moves: moves ? within : null, moved: false, had: this.brushes.has(axis.name) };
    this.setHover(null);
  }

  move(event) {
    const [x, y] = this.locate(event);
    if (this.drag === null) {
      const id = Math.min(...this.placed.map((axis) => Math.abs(axis.x - x))) < 12 ? null : this.nearest(x, y);
      this.setHover(id, id === null ? null : [x, y]);
      return;
    }
    if (!this.drag.moved && Math.abs(y - this.drag.from) < 4) return;
    this.drag.moved = true;
    const axis = this.placed.find((each) => each.name === this.drag.name);
    const shift = y - this.drag.from;
    const [top, bottom] = this.drag.moves === null ? [Math.min(y, this.drag.from), Math.max(y, this.drag.from)] : this.drag.moves.map((each) => each + shift);
    this.brushes.set(axis.name, brushOf(axis, Math.max(TOP - 8, top), Math.min(BOTTOM + 8, bottom)));
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.placeBrush(this.placed.find((each) => each.name === axis.name));
      this.paint();
    });
  }

  release(event) {
    const drag = this.drag;
    this.drag = null;
    if (drag === null) {
      const id = this.nearest(...this.locate(event));
      if (id !== null) this.options.pick(id);
      return;
    }
    if (!drag.moved && drag.had) this.brushes.delete(drag.name);
    if (drag.moved || drag.had) this.announce();
  }

  announce() {
    this.fieldsKey = null;
    this.draw(this.spec);
    this.options.onBrush(this.matches());
  }

  /** The ranges as fields: what the axes offer to the pointer, for the keyboard and for exact numbers. */
  fillRanges() {
    const key = JSON.stringify(this.placed?.map((axis) => [axis.name, axis.kind, axis.kind === "category" ? axis.scale.domain : null]));
    if (key === this.fieldsKey || this.placed === undefined || this.fields.contains(document.activeElement)) return;
    this.fieldsKey = key;
    fill(this.fields, this.placed.map((axis) => (axis.kind === "category" && !axis.objective ? this.choiceField(axis) : this.numberField(axis))));
  }

  numberField(axis) {
    const brush = this.brushes.get(axis.name);
    const input = (which, label) => h("input", {
      type: "number", step: "any", value: Number.isFinite(brush?.[which]) ? brush[which] : null, "aria-label": `${value(axis.name)} ${label}`, placeholder: label,
      onchange: () => {
        const [low, high] = [...field.querySelectorAll("input")].map((each) => (each.value === "" ? null : Number(each.value)));
        this.setBrush(axis.name, low === null && high === null ? null : { low: low ?? -Infinity, high: high ?? Infinity });
        this.announce();
      },
    });
    const field = h("fieldset", { "data-range": axis.name }, h("legend", {}, value(axis.name)), input("low", "from"), input("high", "to"));
    return field;
  }

  choiceField(axis) {
    const chosen = this.brushes.get(axis.name);
    const boxes = axis.scale.domain.slice(0, 40).map((each) => {
      const box = h("input", { type: "checkbox", checked: chosen !== undefined && isWithin(chosen, each), onchange: () => {
        const keys = new Set(boxes.filter(([, other]) => other.checked).map(([given]) => keyOf(given)));
        this.setBrush(axis.name, keys.size ? { keys } : null);
        this.announce();
      } });
      return [each, box];
    });
    return h("fieldset", { "data-range": axis.name }, h("legend", {}, value(axis.name)), boxes.map(([each, box]) => h("label", {}, box, shorten(value(each), 24))));
  }
}

function brushOf(axis, top, bottom) {
  if (axis.scale.kind !== "category") return { low: axis.scale.back(bottom), high: axis.scale.back(top) };
  const within = axis.scale.domain.filter((each) => axis.scale.at(each) >= top && axis.scale.at(each) <= bottom);
  return { keys: new Set(within.sort(compareValues).map(keyOf)) };
}

function isWithin(brush, given) {
  if (brush.keys !== undefined) return brush.keys.has(keyOf(given));
  return typeof given === "number" && given >= brush.low && given <= brush.high;
}
