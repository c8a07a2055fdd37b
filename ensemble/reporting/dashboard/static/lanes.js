/**
 * Draws bars over time in rows of which only those in sight exist. Once a second the bars that grow are lengthened; all
 * else is drawn again when it changes.
 */

import { fill, h, setAttribute, svg } from "./dom.js";
import { epochEnds } from "./attempts.js";
import { count, visible } from "./format.js";
import { makeTip } from "./card.js";
import { spanScale, timeText, timeTicks } from "./scales.js";

const HEAD = 26; // pixels of a group's name
const AXIS = 26;
const GROWTH = 1.06; // the axis is lengthened by this factor when the run has come to its end
const LEAST_S = 20; // seconds on the axis, at least
const TICKS = 4; // pixels between ends of epochs, below which they are not drawn
const CHARACTER = 7;

/** Rows of attempts. `options`: `store`, `describe(attempt)` -> lines, `onPick(member)`, `onZoom()`. */
export class Lanes {
  constructor(options) {
    this.options = options;
    this.store = options.store;
    this.span = null; // [from, to] in seconds since the begin, or null: the whole run
    this.active = null; // key of the attempt that the keyboard is at
    this.items = [];
    this.drawn = new Map();
    this.axis = svg("svg", { class: "lanes-axis", "aria-hidden": "true" });
    this.bars = svg("svg", { class: "lanes-bars" });
    this.spacer = h("div", { class: "lanes-spacer" }, this.bars);
    this.scroller = h("div", {
      class: "lanes-scroll", tabindex: "0", role: "listbox", "aria-multiselectable": "true",
      "aria-label": "Attempts. Arrow keys go from one to the next, Enter selects its member, plus and minus zoom.",
    }, this.spacer);
    this.root = h("div", { class: "lanes" }, this.axis, this.scroller);
    this.tip = makeTip(this.root);
    this.listen();
    this.observer = new ResizeObserver(() => this.items.length && this.draw());
    this.observer.observe(this.root);
  }

  get zoomed() {
    return this.span !== null;
  }

  listen() {
    const on = (name, listener, how) => this.scroller.addEventListener(name, listener, how);
    on("scroll", () => this.drawRows(), { passive: true });
    on("wheel", (event) => this.wheel(event), { passive: false });
    on("pointerdown", (event) => this.press(event));
    on("pointermove", (event) => this.move(event));
    on("pointerup", (event) => this.release(event));
    on("pointercancel", () => (this.drag = null));
    on("pointerleave", () => this.drag || this.point(null));
    on("keydown", (event) => this.key(event));
    on("blur", () => this.mark(null));
  }

  /** Takes groups of rows (`attempts.arrange`); `begin`: Unix seconds of the axis' zero. */
  arrange(groups, begin, packed) {
    this.begin = begin;
    this.packed = packed;
    const many = groups.reduce((sum, group) => sum + group.rows.length, 0);
    this.rowHeight = many <= 40 ? 24 : many <= 120 ? 19 : 15;
    this.items = [];
    this.longest = Math.max(0, ...groups.flatMap((group) => group.rows.map((row) => visible(row.member ?? "").length)));
    let top = 0;
    for (const group of groups) {
      this.items.push({ key: `group ${group.key}`, top, height: HEAD, group });
      top += HEAD;
      for (const row of group.rows) {
        this.items.push({ key: row.key, top, height: this.rowHeight, row });
        top += this.rowHeight;
      }
    }
    this.height = top;
    this.latest = Math.max(0, ...groups.flatMap((group) => group.attempts.map((each) => (each.ended ?? each.placed) - begin)));
    this.order = this.items.flatMap((item) => item.row?.attempts.map((attempt) => ({ item, attempt })) ?? []);
  }

  /** The end of the whole run on the axis: a little ahead of the present, so that it moves seldom. */
  end() {
    const { run } = this.store;
    const now = Math.max(this.latest, (run.ended ?? this.store.now()) - this.begin);
    if (run.ended !== null) return Math.max(now * 1.01, 1);
    if (this.ahead === undefined || now > this.ahead || now < this.ahead / GROWTH ** 3) this.ahead = Math.max(LEAST_S, now * GROWTH);
    return this.ahead;
  }

  limits() {
    const end = this.end();
    if (this.span === null) return [0, end];
    const [from, to] = this.span;
    const now = this.store.now() - this.begin;
    if (this.follows && now > to) this.span = [from + (now - to) + (to - from) * 0.05, now + (to - from) * 0.05];
    return this.span;
  }

  draw() {
    this.width = this.scroller.clientWidth;
    if (this.width === 0) return;
    this.left = this.packed ? 14 : Math.min(this.longest * CHARACTER + 18, 280, Math.max(84, this.width * 0.3));
    const [from, to] = this.limits();
    this.scale = spanScale(from, to, this.left, this.width - 14);
    this.version = (this.version ?? 0) + 1;
    this.spacer.style.height = `${this.height}px`;
    this.scroller.style.height = `${Math.min(this.height, Math.max(260, window.innerHeight * 0.68)) + 2}px`;
    this.drawAxis(from, to);
    this.drawRows();
  }

  drawAxis(from, to) {
    const ticks = timeTicks(from, to, Math.max(2, Math.floor((this.width - this.left) / 84)));
    setAttribute(this.axis, "viewBox", `0 0 ${this.width} ${AXIS}`);
    setAttribute(this.axis, "width", this.width);
    this.ticks = ticks.map((value) => this.scale.at(value));
    fill(this.axis, ticks.map((value) => svg("text", { x: this.scale.at(value), y: 16, "text-anchor": "middle" }, timeText(value))));
  }

  /** Draws the rows in sight; those that are as they were stay. */
  drawRows() {
    if (this.scale === undefined) return;
    const [top, height] = [this.scroller.scrollTop, this.scroller.clientHeight];
    const [first, last] = [top - 200, top + height + 200];
    setAttribute(this.bars, "viewBox", `0 0 ${this.width} ${this.height}`);
    setAttribute(this.bars, "width", this.width);
    setAttribute(this.bars, "height", this.height);
    const wanted = new Map();
    for (const item of this.items) if (item.top + item.height > first && item.top < last) wanted.set(item.key, item);
    for (const [key, known] of this.drawn) if (!wanted.has(key)) [known.node.remove(), this.drawn.delete(key)];
    this.growing = [];
    if (this.under === undefined) this.bars.appendChild((this.under = svg("g", {})));
    fill(this.under, this.ticks.map((x) => svg("line", { class: "grid-line", x1: x, x2: x, y1: Math.max(0, first), y2: Math.min(this.height, last) })));
    for (const [key, item] of wanted) {
      const signature = this.signature(item);
      let known = this.drawn.get(key);
      if (known?.signature !== signature) {
        const node = item.group ? this.drawGroup(item) : this.drawRow(item);
        if (known) known.node.replaceWith(node);
        else this.bars.appendChild(node);
        this.drawn.set(key, (known = { node, signature, growing: node.growing ?? [] }));
      }
      this.growing.push(...known.growing);
    }
    this.now ??= this.bars.appendChild(svg("line", { class: "now", "data-mark": "now" }));
    this.bars.appendChild(this.now);
    this.grow();
  }

  signature(item) {
    if (item.group) return `${this.version} ${item.top} ${item.group.rows.length}`;
    const { store } = this;
    const parts = [this.width, this.scale.lo, this.scale.hi, item.top, item.height];
    for (const each of item.row.attempts) {
      parts.push(each.key, each.outcome, each.started, each.ended, store.selection.has(each.id), store.isPale(each.id), epochEnds(store, each.id).length);
      if (each.key === this.active) parts.push("active");
    }
    return parts.join("|");
  }

  drawGroup({ top, group }) {
    const text = `${visible(group.node)} · ${visible(group.label)}`;
    const most = Math.max(10, Math.floor((this.width - 150) / CHARACTER));
    return svg("g", { class: "lane-group", "data-node": group.node },
      svg("line", { class: "lane-line", x1: 0, x2: this.width, y1: top + 1, y2: top + 1 }),
      svg("text", { class: "lane-head", x: 2, y: top + 18 }, shortened(text, most),
        svg("tspan", { class: "lane-count", dx: 10 }, count(new Set(group.attempts.map((each) => each.id)).size, "member"))));
  }

  drawRow({ top, height, row }) {
    const growing = [];
    const label = this.packed ? null : this.drawLabel(row.member, top, height);
    const bars = row.attempts.map((attempt) => this.drawAttempt(attempt, top, height, growing));
    const node = svg("g", { class: "lane", "data-row": row.member ?? "" }, label, bars);
    node.growing = growing;
    return node;
  }

  drawLabel(id, top, height) {
    const { store } = this;
    const most = Math.max(6, Math.floor((this.left - 14) / (height < 19 ? 6 : CHARACTER)));
    const chosen = store.selection.has(id);
    return svg("text", {
      class: `lane-name ${chosen ? "chosen" : ""}`, x: this.left - 8, y: top + height / 2 + 4, "text-anchor": "end", "data-pick": id,
      style: { "font-size": height < 19 ? "10.5px" : "12px", ...(chosen ? { fill: store.colour(id) } : {}) },
    }, shortened(visible(id), most), svg("title", {}, visible(id)));
  }

  drawAttempt(each, top, height, growing) {
    const { store, scale } = this;
    const x = (t) => this.clamped(scale.at(t - this.begin));
    const end = each.ended ?? store.now();
    const [pad, tall] = [height < 19 ? 2 : 3, height - (height < 19 ? 4 : 6)];
    const [a, b, c] = [x(each.placed), x(Math.min(each.started ?? end, end)), x(end)];
    if (scale.at(end - this.begin) < this.left || a >= this.width - 13) return null;
    const rect = (name, from, to) => svg("rect", { class: name, x: from, y: top + pad, width: Math.max(to - from, 0), height: tall, rx: to - from > 6 ? 2 : 0 });
    const wait = rect("bar-starting", a, b);
    const run = each.started === null ? null : rect(`bar-${each.outcome}`, b, Math.max(c, b + 1.5));
    const chosen = store.selection.has(each.id);
    const rim = chosen ? svg("rect", { class: "chosen-bar", x: a, y: top + pad, width: Math.max(c - a, 2), height: tall, rx: 2, stroke: store.colour(each.id) }) : null;
    if (each.ended === null) growing.push({ node: run ?? wait, from: run ? b : a }, ...(rim ? [{ node: rim, from: a }] : []));
    const middle = top + height / 2;
    return svg("g", {
      role: "option", id: domId(each.key), "aria-selected": String(chosen), "aria-label": this.options.describe(each).filter(Boolean).map(visible).join(". "),
      "data-member": each.id, "data-mark": "attempt", "data-outcome": each.outcome, "data-key": each.key,
      class: `attempt ${store.isPale(each.id) ? "faded" : ""} ${this.active === each.key ? "active" : ""}`,
    }, wait, run, this.drawEpochs(each, b, c, top + pad, tall),
    rim,
    this.active === each.key && svg("rect", { class: "active-bar", x: a - 2, y: top + pad - 2, width: Math.max(c - a, 2) + 4, height: tall + 4, rx: 4 }),
    this.packed && c - b > 46 && svg("text", { class: "attempt-name", x: b + 5, y: middle + 4 }, shortened(visible(each.id), Math.floor((c - b - 8) / CHARACTER))),
    each.again && this.isInside(each.placed) && svg("text", { class: "sign", "data-mark": "retry", x: a - 1, y: middle + 4.5, "text-anchor": "middle" }, "↻"),
    each.moved && this.isInside(end) && svg("text", { class: "sign", "data-mark": "move", x: c + 2, y: middle + 4 }, "→"),
    each.outcome === "failed" && this.isInside(end) && drawCross(c, middle, Math.min(4.5, tall / 3)));
  }

  drawEpochs(each, from, to, top, tall) {
    const last = each.ended ?? Infinity;
    const xs = epochEnds(this.store, each.id).filter((t) => t >= each.placed && t <= last).map((t) => this.scale.at(t - this.begin));
    const seen = xs.filter((x) => x > from + 1 && x < to - 1);
    if (seen.length === 0 || (seen.at(-1) - seen[0]) / seen.length < TICKS) return null;
    return svg("path", { class: this.packed ? "epochs faint" : "epochs", "data-mark": "epochs", "data-count": seen.length, d: seen.map((x) => `M${x.toFixed(1)},${top}v${tall}`).join("") });
  }

  clamped(x) {
    return Math.max(this.left, Math.min(this.width - 13, x));
  }

  isInside(t) {
    const x = this.scale.at(t - this.begin);
    return x >= this.left - 1 && x <= this.width - 12;
  }

  /** Lengthens what grows and moves the line of the present; draws anew only where the axis has come to its end. */
  grow() {
    if (this.scale === undefined || this.width === 0) return;
    const now = this.store.now() - this.begin;
    const isOpen = this.store.run.ended === null;
    const [from, to] = this.limits();
    if (isOpen && (from !== this.scale.lo || to !== this.scale.hi)) {
      this.draw();
      return;
    }
    const x = this.scale.at(now);
    for (const each of this.growing) setAttribute(each.node, "width", Math.max(0, this.clamped(x) - each.from).toFixed(1));
    const shown = isOpen && x >= this.left && x <= this.width - 13;
    for (const [name, value] of Object.entries({ x1: x, x2: x, y1: 0, y2: this.height, visibility: shown ? "visible" : "hidden" })) setAttribute(this.now, name, value);
  }

  // -- zoom and pointer -------------------------------------------------------------------------------------------

  /** Shows `[from, to]` in seconds since the begin; null shows the whole run. */
  zoomTo(span) {
    const end = this.end();
    if (span !== null) {
      const length = Math.max(0.2, span[1] - span[0]);
      const from = Math.max(0, Math.min(span[0], end - length));
      span = length >= end ? null : [from, from + length];
    }
    this.span = span;
    this.follows = span !== null && this.store.run.ended === null && span[1] >= this.store.now() - this.begin;
    this.draw();
    this.options.onZoom();
  }

  zoomBy(factor, around = null) {
    const [from, to] = this.limits();
    const middle = around ?? (from + to) / 2;
    this.zoomTo([middle - (middle - from) * factor, middle + (to - middle) * factor]);
  }

  wheel(event) {
    if (!event.ctrlKey && !event.metaKey && !event.shiftKey && event.deltaX === 0) return;
    event.preventDefault();
    const [from, to] = this.limits();
    if (event.ctrlKey || event.metaKey) this.zoomBy(event.deltaY > 0 ? 1.25 : 0.8, this.scale.back(this.place(event)[0]));
    else if (this.zoomed) this.pan((((event.deltaX || event.deltaY) / 600) * (to - from)));
  }

  pan(by) {
    if (this.zoomed) this.zoomTo([this.span[0] + by, this.span[1] + by]);
  }

  place(event) {
    const box = this.scroller.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top + this.axis.clientHeight];
  }

  press(event) {
    if (event.button !== 0) return;
    this.drag = { x: event.clientX, span: this.limits(), moved: false, target: event.target };
  }

  move(event) {
    if (!this.drag) {
      this.point(event.target.closest?.("[data-key]") ?? null, event);
      return;
    }
    const by = event.clientX - this.drag.x;
    if (!this.drag.moved && Math.abs(by) < 6) return;
    this.drag.moved = true;
    if (!this.zoomed) return;
    const seconds = (by * (this.drag.span[1] - this.drag.span[0])) / (this.width - this.left - 14);
    this.zoomTo([this.drag.span[0] - seconds, this.drag.span[1] - seconds]);
  }

  release(event) {
    const { drag } = this;
    this.drag = null;
    if (!drag || drag.moved) return;
    const found = drag.target.closest?.("[data-key], [data-pick]");
    const id = found?.dataset.member ?? found?.dataset.pick;
    if (id !== undefined) this.options.onPick(id);
    this.point(event.target.closest?.("[data-key]") ?? null, event);
  }

  point(node, event) {
    const found = node && this.order.find(({ attempt }) => attempt.key === node.dataset.key);
    this.store.setHover(found ? found.attempt.id : null);
    if (!found) this.tip.hide();
    else this.tip.show(...this.place(event), this.options.describe(found.attempt));
  }

  // -- keyboard ---------------------------------------------------------------------------------------------------

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const [from, to] = this.limits();
    const aside = event.shiftKey ? { ArrowLeft: () => this.pan((from - to) * 0.2), ArrowRight: () => this.pan((to - from) * 0.2) } : {};
    const act = aside[event.key] ?? {
      ArrowDown: () => this.go(1), ArrowRight: () => this.go(1), ArrowUp: () => this.go(-1), ArrowLeft: () => this.go(-1),
      Home: () => this.go(-Infinity), End: () => this.go(Infinity), "+": () => this.zoomBy(0.5), "-": () => this.zoomBy(2),
      Enter: () => this.pickActive(), " ": () => this.pickActive(),
    }[event.key];
    if (act === undefined) return;
    event.preventDefault();
    act();
  }

  go(by) {
    const at = this.order.findIndex(({ attempt }) => attempt.key === this.active);
    const next = this.order[Math.max(0, Math.min(this.order.length - 1, at + by))];
    if (next === undefined) return;
    const { top, height } = next.item;
    if (top < this.scroller.scrollTop) this.scroller.scrollTop = top - HEAD;
    if (top + height > this.scroller.scrollTop + this.scroller.clientHeight) this.scroller.scrollTop = top + height - this.scroller.clientHeight + 4;
    this.mark(next.attempt.key, next);
  }

  pickActive() {
    const found = this.order.find(({ attempt }) => attempt.key === this.active);
    if (found) this.options.onPick(found.attempt.id);
  }

  mark(key, found) {
    this.active = key;
    this.drawRows();
    setAttribute(this.scroller, "aria-activedescendant", key === null ? null : domId(key));
    if (key === null) this.tip.hide();
    else this.tip.show(this.clamped(this.scale.at(found.attempt.placed - this.begin)), found.item.top - this.scroller.scrollTop + AXIS + 4, this.options.describe(found.attempt));
  }

  close() {
    this.observer.disconnect();
    this.store.setHover(null);
  }
}

/** A name for an element, from any text. */
function domId(key) {
  return `attempt-${[...key].map((each) => each.codePointAt(0).toString(36)).join("-")}`;
}

function shortened(text, most) {
  const tail = Math.max(1, Math.floor(most / 2)); // names differ at their ends
  return text.length <= most ? text : `${text.slice(0, Math.max(1, most - tail - 1))}…${text.slice(-tail)}`;
}

function drawCross(x, y, size) {
  const d = `M${x - size},${y - size}L${x + size},${y + size}M${x - size},${y + size}L${x + size},${y - size}`;
  return svg("g", { class: "cross", "data-mark": "failed" }, svg("path", { class: "rim", d }), svg("path", { d }));
}
