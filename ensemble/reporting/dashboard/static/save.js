/** Saves what the page shows: a figure as SVG or PNG, in light colours; a table as comma-separated values. */

import { h, setAttribute, svg } from "./dom.js";
import { visible } from "./format.js";
import { cutOut, recorded } from "./recorder.js";

const LEFT_OUT = "details, label, input, select, canvas[hidden], .figure-controls, .figure-tools > button, .tip, .unseen";
const SHAPE = new Set(["d", "x", "y", "x1", "x2", "y1", "y2", "dx", "cx", "cy", "r", "rx", "width", "height", "viewBox", "transform", "clip-path", "preserveAspectRatio"]);
const LOOK = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-opacity", "font-family", "font-size", "font-weight", "text-anchor", "paint-order"];
const NONE = "rgba(0, 0, 0, 0)";
const GAP = 8; // below each element
const BASELINE = 0.78; // of a line's height, from its top
const UNWRITABLE = /[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\u{10000}-\u{10ffff}]/gu; // in XML
const RUN = /^[=+\-@\uff1d\uff0b\uff0d\uff20]/; // with which a text begins that a spreadsheet would run

/**
 * A small menu. `options`: `title`, `figure()` -> the elements to be drawn, one below the other, or null; `table()` -> `{ head, rows }` as of `card`;
 * either may be absent.
 */
export function saveMenu({ title, figure, table }) {
  const name = title.replace(/[^\p{L}\p{N}._-]+/gu, "-").slice(0, 80);
  const picture = (save) => () => figure() !== null && save(drawPicture(figure()), name);
  const kinds = [figure && ["SVG", picture(saveSvg)], figure && ["PNG", picture(savePng)], table && ["CSV", () => download(csvOf(table()), "text/csv", `${name}.csv`)]];
  const menu = h("details", { class: "chooser save", onkeydown: (event) => event.key === "Escape" && close(), onfocusout: (event) => menu.contains(event.relatedTarget) || close() },
    h("summary", { class: "minor", "aria-label": `save ${title}` }, "save"));
  const close = () => menu.removeAttribute("open");
  menu.append(h("div", { class: "menu" }, kinds.filter(Boolean).map(([kind, save]) => h("button", { type: "button", onclick: () => [save(), close()] }, kind))));
  return menu;
}

/** A table, as of `card`, as comma-separated values (RFC 4180); numbers have all their digits, and no text is one that a spreadsheet runs. */
export function csvOf({ head, rows }) {
  const lines = [head.map((name) => [name].flat()[0]), ...rows.map((row) => row.cells ?? row)];
  return lines.map((cells) => `${cells.map(cellOf).join(",")}\r\n`).join("");
}

function cellOf(given) {
  const cell = Array.isArray(given) ? given[typeof given[1] === "number" ? 1 : 0] : given;
  if (typeof cell === "number") return Number.isFinite(cell) ? String(cell) : "";
  const text = (typeof cell === "object" && cell !== null ? JSON.stringify(cell) : String(cell ?? "")).split("\n").map(visible).join("\n");
  const safe = RUN.test(text) ? `'${text}` : text;
  return /[",\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

function saveSvg({ text }, name) {
  download(text, "image/svg+xml", `${name}.svg`);
}

async function savePng({ text, width, height }, name) {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await image.decode();
  const canvas = h("canvas", { width: 2 * width, height: 2 * height });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  canvas.toBlob((blob) => download(blob, "image/png", `${name}.png`));
}

function download(content, type, name) {
  const address = URL.createObjectURL(new Blob([content], { type }));
  h("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

/** What elements show, as a drawing that needs nothing else: `{ text, width, height }`. */
export function drawPicture(roots) {
  const page = document.documentElement;
  const theme = page.getAttribute("data-theme");
  page.classList.add("still");
  page.setAttribute("data-theme", "light");
  try {
    const drawing = svg("svg", {});
    let [width, height] = [0, 0];
    for (const root of roots) {
      const box = root.getBoundingClientRect();
      copy(root, drawing, { left: box.left, top: box.top - height });
      const right = width === 0 ? box.right : Math.max(...[...root.children].map((each) => each.getBoundingClientRect().right)); // a legend is as wide as the page
      [width, height] = [Math.max(width, Math.ceil(right - box.left) + 1), height + Math.ceil(box.height) + GAP];
    }
    setAll(drawing, { width, height, viewBox: `0 0 ${width} ${height}`, style: { background: "#fff" } });
    return { text: new XMLSerializer().serializeToString(drawing).replace(UNWRITABLE, "\ufffd"), width, height };
  } finally {
    setAttribute(page, "data-theme", theme);
    getComputedStyle(document.body).color; // nothing moves from the one to the other
    page.classList.remove("still");
  }
}

/** Puts what a node of the page shows into `out`; `from`: the pixel of the window that is the drawing's first. */
function copy(node, out, from) {
  if (node.nodeType === Node.TEXT_NODE) return copyText(node, out, from);
  if (!(node instanceof Element) || node.matches(LEFT_OUT)) return null;
  const style = getComputedStyle(node);
  if (style.display === "none" || style.visibility === "hidden") return null;
  const box = node.getBoundingClientRect();
  const place = { x: box.left - from.left, y: box.top - from.top, width: box.width, height: box.height };
  if (node.localName === "canvas") return out.append(svg("g", { transform: `translate(${place.x} ${place.y})` }, recorded(node.record)));
  if (node.localName === "svg") return out.append(setAll(copyShape(node), { ...place, overflow: style.overflow }));
  let inner = out;
  if (style.opacity !== "1" || style.overflow !== "visible") out.append((inner = svg("g", { opacity: style.opacity })));
  if (style.overflow !== "visible") inner.setAttribute("clip-path", cutOut(inner, svg("rect", place)));
  const rim = style.borderTopWidth !== "0px" ? style.borderTopColor : null;
  const rx = Math.min(parseFloat(style.borderTopLeftRadius), place.width / 2, place.height / 2);
  if (style.backgroundColor !== NONE || rim) inner.append(svg("rect", { ...place, rx, fill: style.backgroundColor, stroke: rim }));
  for (const child of node.childNodes) copy(child, inner, from);
  return null;
}

/** An element of a drawing with what the page's style says of it; what it inherits is left to its parent. */
function copyShape(node, inherited = {}) {
  const style = getComputedStyle(node);
  if (style.display === "none" || node.getAttribute("visibility") === "hidden") return null;
  const copied = svg(node.localName, node.localName === "clipPath" ? { id: node.id } : {});
  for (const { name, value } of node.attributes) if (SHAPE.has(name)) copied.setAttribute(name, value);
  const look = Object.fromEntries(LOOK.map((name) => [name, style.getPropertyValue(name)]));
  for (const name of LOOK) if (look[name] !== inherited[name]) copied.setAttribute(name, look[name]);
  if (style.opacity !== "1") copied.setAttribute("opacity", style.opacity);
  for (const child of node.childNodes) copied.append(...[child.nodeType === Node.TEXT_NODE ? child.cloneNode() : copyShape(child, look)].filter(Boolean));
  return copied;
}

function copyText(node, out, from) {
  const style = getComputedStyle(node.parentElement);
  const range = document.createRange();
  const lines = [];
  for (const { 0: word, index } of node.data.matchAll(/\S+/g)) {
    range.setStart(node, index);
    range.setEnd(node, index + word.length);
    const box = range.getBoundingClientRect();
    if (lines.at(-1)?.top === box.top) lines.at(-1).words.push(word);
    else if (box.width > 0) lines.push({ left: box.left, top: box.top, height: box.height, words: [word] });
  }
  for (const { left, top, height, words } of lines) {
    out.append(svg("text", {
      x: left - from.left, y: top - from.top + BASELINE * height, fill: style.color, "font-family": style.fontFamily, "font-size": style.fontSize, "font-weight": style.fontWeight,
    }, words.join(" ")));
  }
}

function setAll(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) setAttribute(node, name, value);
  return node;
}
