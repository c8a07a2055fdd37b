/** A drawing context that notes what is drawn as elements of SVG; it has what the charts use of a canvas' context. */

import { svg } from "./dom.js";

let cuts = 0;

/** `root`: what was drawn, a group. */
export class Recorder {
  constructor() {
    Object.assign(this, { globalAlpha: 1, fillStyle: "#000", strokeStyle: "#000", lineWidth: 1, lineJoin: "miter", dash: [], d: "", kept: [] });
    this.root = this.into = svg("g", {});
  }

  /** Adds a clip path with this shape to an element; returns what the attribute `clip-path` says for it. */
  static cut(into, shape) {
    const id = `cut-${(cuts += 1)}`;
    into.append(svg("clipPath", { id }, shape));
    return `url(#${id})`;
  }

  setTransform() {}

  clearRect() {}

  save() {
    this.kept.push(this.into);
  }

  restore() {
    this.into = this.kept.pop();
  }

  setLineDash(dash) {
    this.dash = dash;
  }

  beginPath() {
    this.d = "";
  }

  moveTo(x, y) {
    this.d += `M${x.toFixed(2)},${y.toFixed(2)}`;
  }

  lineTo(x, y) {
    this.d += `L${x.toFixed(2)},${y.toFixed(2)}`;
  }

  closePath() {
    this.d += "Z";
  }

  rect(x, y, width, height) {
    this.d += `M${x},${y}h${width}v${height}h${-width}Z`;
  }

  /** A whole circle. */
  arc(x, y, r) {
    this.d += `M${x - r},${y}a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0Z`;
  }

  clip() {
    const inner = svg("g", { "clip-path": Recorder.cut(this.into, svg("path", { d: this.d })) });
    this.into.append(inner);
    this.into = inner;
  }

  stroke() {
    this.add({
      fill: "none", stroke: this.strokeStyle, "stroke-opacity": this.globalAlpha, "stroke-width": this.lineWidth, "stroke-linejoin": this.lineJoin,
      "stroke-dasharray": this.dash.join(" ") || null,
    });
  }

  fill() {
    this.add({ fill: this.fillStyle, "fill-opacity": this.globalAlpha });
  }

  fillRect(x, y, width, height) {
    this.beginPath();
    this.rect(x, y, width, height);
    this.fill();
  }

  add(look) {
    if (this.d !== "") this.into.append(svg("path", { d: this.d, ...look }));
  }
}
