/** What every chart stands on: a canvas in the screen's pixels, axes, a tip; drawn when its size changes, in sight only. */

import { makeTip } from "./card.js";
import { fill, h, svg } from "./dom.js";
import { shorten } from "./format.js";

const CHARACTER_PX = 6.7; // of a digit in an axis' labels
const SIGHT = "150px"; // so far outside the window a chart is kept up to date

/** The base of the charts: they have `render(width, height)`, and call `refresh()` where something else is to be drawn. */
export class Stage {
  constructor(height, attributes, canvasAttributes) {
    this.height = height;
    this.width = 0;
    this.isNear = true; // until the observer knows better: the first drawing is of all
    this.isStale = false;
    this.axes = svg("svg", { class: "axes", "aria-hidden": "true" });
    this.canvas = h("canvas", canvasAttributes);
    this.root = h("div", { ...attributes, class: `chart ${attributes.class ?? ""}`, style: { height: `${height}px` } }, this.axes, this.canvas);
    this.tip = makeTip(this.root);
    this.size = new ResizeObserver(() => (this.isStale || this.root.clientWidth !== this.width) && this.refresh());
    this.size.observe(this.root);
    this.sight = new IntersectionObserver((entries) => this.come(entries.at(-1).isIntersecting), { rootMargin: SIGHT });
    this.sight.observe(this.root);
    this.printing = () => this.come(true);
    addEventListener("beforeprint", this.printing);
  }

  /** Draws anew; out of sight only when it comes into sight. */
  refresh() {
    this.isStale = true;
    const width = this.root.clientWidth;
    if (width === 0 || (!this.isNear && this.width > 0)) return;
    this.width = width;
    this.isStale = false;
    this.render(width, this.height);
  }

  come(isNear) {
    this.isNear = isNear;
    if (isNear && this.isStale) this.refresh();
  }

  /** The pixels that the labels of an upright axis need. */
  labelRoom(labels) {
    return Math.min(130, 12 + CHARACTER_PX * Math.max(2, ...labels.map((label) => label.length)));
  }

  /**
   * Draws the axes around `area` (`left`, `right`, `top`, `bottom`). `across` and `up`: `{ ticks: [{ at, label }], title, lines }`, where `lines`
   * false leaves the lines of the grid away.
   */
  drawAxes({ left, right, top, bottom }, across, up) {
    const { width, height } = this;
    const parts = up.ticks.map(({ at, label }) => [
      svg("line", { class: "grid-line", x1: left, x2: right, y1: at, y2: at }),
      svg("text", { x: left - 7, y: at + 4, "text-anchor": "end" }, label.slice(0, 19)),
    ]);
    const most = Math.max(3, Math.floor((right - left) / Math.max(1, across.ticks.length) / CHARACTER_PX));
    for (const { at, label } of across.ticks) {
      const shown = shorten(label, most);
      const isLast = at > width - shown.length * 4;
      if (across.lines !== false) parts.push(svg("line", { class: "grid-line", x1: at, x2: at, y1: top, y2: bottom }));
      parts.push(svg("text", { x: isLast ? width - 2 : at, y: bottom + 17, "text-anchor": isLast ? "end" : "middle" }, shown));
    }
    if (across.title) parts.push(svg("text", { x: (left + right) / 2, y: height - 6, "text-anchor": "middle" }, across.title));
    if (up.title) parts.push(svg("text", { "text-anchor": "middle", transform: `translate(13 ${(top + bottom) / 2}) rotate(-90)` }, up.title));
    this.axes.setAttribute("viewBox", `0 0 ${width} ${height}`);
    fill(this.axes, parts);
  }

  /** The canvas, empty, with what is drawn cut off so many pixels outside an area; the caller restores the context. */
  openWithin({ left, right, top, bottom }, margin) {
    const context = openCanvas(this.canvas, this.width, this.height);
    context.save();
    context.beginPath();
    context.rect(left - margin, top - margin, right - left + 2 * margin, bottom - top + 2 * margin);
    context.clip();
    return context;
  }

  /** Where an event lies, in pixels of the chart. */
  locate(event) {
    const box = this.root.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  close() {
    this.size.disconnect();
    this.sight.disconnect();
    removeEventListener("beforeprint", this.printing);
  }
}

/** Pixels of a canvas for each of CSS: more than two cost time, and nobody sees them. */
export function pixelRatio() {
  return Math.min(2, window.devicePixelRatio || 1);
}

/** Sizes a canvas for the screen's pixels and clears it; coordinates are CSS pixels. */
export function openCanvas(canvas, width, height) {
  const ratio = pixelRatio();
  const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== wide || canvas.height !== high) {
    [canvas.width, canvas.height] = [wide, high];
    [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
