/** A drawing context that notes what is drawn as elements of SVG; it has what the charts use of a canvas' context. */

import { svg } from "./dom.js";

let cuts = 0;

/** Adds a clip path with this shape to an element; returns what the attribute `clip-path` says for it. */
export function cutOut(into, shape) {
  const id = `cut-${(cuts += 1)}`;
  into.append(svg("clipPath", { id }, shape));
  return `url(#${id})`;
}

/** Returns what `paint(context)` draws, a group. */
export function recorded(paint) {
  const root = svg("g", {});
  const kept = [];
  let [into, d, dash] = [root, "", []];
  const add = (look) => d !== "" && into.append(svg("path", { d, ...look }));
  const rect = (x, y, width, height) => (d += `M${x},${y}h${width}v${height}h${-width}Z`);
  const context = {
    globalAlpha: 1, fillStyle: "#000", strokeStyle: "#000", lineWidth: 1, lineJoin: "miter", rect,
    setTransform: () => {}, clearRect: () => {}, setLineDash: (given) => (dash = given),
    save: () => kept.push(into), restore: () => (into = kept.pop()),
    beginPath: () => (d = ""), closePath: () => (d += "Z"),
    moveTo: (x, y) => (d += `M${x.toFixed(2)},${y.toFixed(2)}`), lineTo: (x, y) => (d += `L${x.toFixed(2)},${y.toFixed(2)}`),
    arc: (x, y, r) => (d += `M${x - r},${y}a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0Z`), // a whole circle
    fill: () => add({ fill: context.fillStyle, "fill-opacity": context.globalAlpha }),
    stroke: () => add({
      fill: "none", stroke: context.strokeStyle, "stroke-opacity": context.globalAlpha, "stroke-width": context.lineWidth,
      "stroke-linejoin": context.lineJoin, "stroke-dasharray": dash.join(" ") || null,
    }),
    clip: () => {
      const inner = svg("g", { "clip-path": cutOut(into, svg("path", { d })) });
      into.append(inner);
      into = inner;
    },
    fillRect: (...place) => {
      d = "";
      rect(...place);
      context.fill();
    },
  };
  paint(context);
  return root;
}
