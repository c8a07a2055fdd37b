/** The run as the page knows it: the server's documents, its changes, and what the reader selected. No DOM. */

import { filterProblem, matcher } from "./filter.js";

/** Colours of members: apart from each other for colour-blind readers, too, and from both backgrounds. */
export const SERIES = [
  "#3b82c4", "#d97a2b", "#207380", "#926c0b", "#3f9f8f", "#406e41", "#515cb2", "#b981ad", "#c7107b", "#bc6871", "#8a81f9", "#50a457",
];
/** Black or white, whichever is read better on a colour. */
export function inkOn(colour) {
  const [red, green, blue] = [1, 3, 5].map((at) => (parseInt(colour.slice(at, at + 2), 16) / 255) ** 2.2);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 ? "#000" : "#fff";
}

export const HIGHLIGHT = "#d97a2b";
export const NEUTRAL = "#8a94a3";
export const STATES = {
  waiting: "#b4bcc8", placed: "#b4bcc8", running: "#3b82c4", moved: "#8fbbdf", finished: "#2f9e77", pruned: "#c9992a",
  paused: "#8a94a3", stopped: "#8a94a3", interrupted: "#8a94a3", cancelled: "#8a6fd1", failed: "#cc4f4f",
};

/** Holds one run's documents and the reader's selection, filter and hovered member; tells subscribers what changed. */
export class Store {
  constructor() {
    this.subscribers = new Set();
    this.selection = new Set();
    this.slots = new Map();
    this.filter = "";
    this.hover = null;
    this.isLive = true; // else the clock stands still
    this.clear();
  }

  /** Forgets the documents, not the selection and the filter. */
  clear() {
    this.offset = null;
    this.stamps = {};
    this.run = null;
    this.members = new Map();
    this.order = [];
    this.spans = new Map();
    this.nodes = [];
    this.notices = [];
    this.cost = null;
    this.curves = null;
    this.quality = null;
    this.importances = null;
    this.tables = null;
    this.answers = [];
    this.logNow = 0;
    this.heardAt = 0;
    this.shown = null;
  }

  /** Takes a `state` document. Returns the names of the documents that have become others since the last one. */
  load(state) {
    const own = this.run?.run_id === state.run.run_id ? this.notices.filter((each) => each.isOwn) : []; // else it is another run's
    const stale = Object.keys(state.stamps).filter((name) => this.run !== null && state.stamps[name] !== this.stamps[name]);
    const { columns, rows } = state.members;
    for (const name of ["offset", "stamps", "run", "nodes", "cost", "answers"]) this[name] = state[name];
    this.cost.members.rows = bare(this.cost.members.rows);
    this.hear(state.now);
    this.notices = [...state.notices, ...own].sort((a, b) => a.at_s - b.at_s);
    this.members = new Map(Object.entries(rows).map(([id, row]) => [id, makeMember(columns, row)]));
    this.order = [...this.members.keys()].sort((a, b) => this.members.get(a).number - this.members.get(b).number);
    this.spans = new Map(Object.entries(state.spans));
    this.tell(["run", "members", "spans", "nodes", "notices", "cost", "answers"]);
    return stale;
  }

  /** Takes one of the documents `curves`, `quality`, `importances`, `tables`. */
  loadDocument(name, document) {
    this[name] = document;
    if (document.members) document.members = bare(document.members);
    if (name === "curves") for (const curve of Object.values(document.members)) curve.values = bare(curve.values);
    this.tell([name]);
  }

  /** Adds a notice of this page's own, such as a refusal. */
  addNotice(level, text) {
    if (this.run === null) return;
    const at_s = Math.max(0, this.now() - (this.run.started ?? this.now()));
    this.notices = [...this.notices, { at_s, level, text, who: "", count: 1, isOwn: true }];
    this.tell(["notices"]);
  }

  hear(now) {
    if (typeof now !== "number") return;
    this.logNow = now;
    this.heardAt = performance.now();
  }

  /** The present time by the log's clock, in Unix seconds; an ended run's end; the last event where nothing drives the run. */
  now() {
    if (this.run === null) return 0;
    if (this.run.ended !== null) return this.run.ended;
    if (this.run.driver) return this.run.updated ?? this.logNow;
    if (!this.isLive) return this.logNow;
    return this.logNow + (performance.now() - this.heardAt) / 1000;
  }

  /** Calls `listener(changed)` with a Set of section names after every change; returns what ends that. */
  subscribe(listener) {
    this.subscribers.add(listener);
    return () => this.subscribers.delete(listener);
  }

  tell(sections) {
    if (sections.length === 0) return;
    const changed = new Set(sections);
    if (changed.has("members") || changed.has("filter")) this.shown = null;
    for (const listener of [...this.subscribers]) listener(changed);
  }

  /** The member that is best so far, or null. */
  best() {
    return this.run?.best?.member ?? null;
  }

  /** A member's colour: its own where there are twelve at most, or while it is selected; else neutral, the best marked. */
  colour(id) {
    if (this.members.size <= SERIES.length) return SERIES[Math.max(0, this.order.indexOf(id)) % SERIES.length];
    if (this.selection.has(id)) return SERIES[this.slots.get(id) % SERIES.length];
    return id === this.best() ? HIGHLIGHT : NEUTRAL;
  }

  /** True where others are selected and this one is not: it is drawn pale. */
  isPale(id) {
    return this.selection.size > 0 && !this.selection.has(id);
  }

  /** Selects these members and no others. */
  select(ids) {
    const next = new Set(ids);
    if (next.size === this.selection.size && [...next].every((id) => this.selection.has(id))) return;
    this.selection = next;
    for (const id of [...this.slots.keys()]) if (!next.has(id)) this.slots.delete(id);
    this.giveSlots();
    this.tell(["selection"]);
  }

  /** Selects a member, or no longer. */
  toggle(id) {
    const next = new Set(this.selection);
    if (!next.delete(id)) next.add(id);
    this.select(next);
  }

  /** Gives each selected member the first colour that no other one has. */
  giveSlots() {
    const taken = new Set(this.slots.values());
    let slot = 0;
    for (const id of this.selection) {
      if (this.slots.has(id)) continue;
      while (taken.has(slot)) slot += 1;
      this.slots.set(id, slot);
      taken.add(slot);
    }
  }

  /** Sets the filter's text. */
  setFilter(text) {
    if (text === this.filter) return;
    this.filter = text;
    this.tell(["filter"]);
  }

  /** Sets the member under the pointer, or null. */
  setHover(id) {
    if (id === this.hover) return;
    this.hover = id;
    this.tell(["hover"]);
  }

  /** The members that pass the filter, in the order of their numbers. */
  visible() {
    if (this.shown === null) {
      const passes = this.filter.trim() === "" ? null : matcher(this.filter);
      this.shown = passes === null ? this.order : this.order.filter((id) => passes(this.members.get(id)));
    }
    return this.shown;
  }

  /** What is wrong with the filter, in one line, or null. */
  problem() {
    return this.members.size === 0 ? null : filterProblem(this.filter, this.members.values());
  }
}

/** The same keys without a prototype: a member, metric or hyperparameter may be called `constructor` or `__proto__`. */
function bare(object) {
  return Object.assign(Object.create(null), object);
}

/** A member as an object, from its row. */
function makeMember(columns, row) {
  const member = Object.fromEntries(columns.map((name, i) => [name, row[i]]));
  return { ...member, params: bare(member.params), metrics: bare(member.metrics) };
}
