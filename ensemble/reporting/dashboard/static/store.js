/** The run as the page knows it: the server's documents, its changes, and what the reader selected. No DOM. */

import { filterProblem, matcher } from "./filter.js";

/** Colours of members: apart from each other for colour-blind readers, too, and from both backgrounds. */
export const SERIES = [
  "#3b82c4", "#d97a2b", "#207380", "#926c0b", "#3f9f8f", "#406e41", "#515cb2", "#b981ad", "#c7107b", "#bc6871", "#8a81f9", "#50a457",
];
export const HIGHLIGHT = "#d97a2b";
export const NEUTRAL = "#8a94a3";
export const STATES = {
  waiting: "#b4bcc8", placed: "#b4bcc8", running: "#3b82c4", moved: "#8fbbdf", finished: "#2f9e77", pruned: "#c9992a",
  paused: "#8a94a3", stopped: "#8a94a3", interrupted: "#8a94a3", cancelled: "#8a6fd1", failed: "#cc4f4f",
};

const SECTIONS = ["run", "nodes", "streams", "cost", "progress"];
const MOST_NOTICES = 2000;
const MOST_EPOCHS = 2000; // of one member; beyond that every other one is dropped

/** Holds one run's documents and the reader's selection, filter and hovered member; tells subscribers what changed. */
export class Store {
  constructor() {
    this.subscribers = new Set();
    this.selection = new Set();
    this.slots = new Map();
    this.filter = "";
    this.hover = null;
    this.isLive = true; // else the clock stands still
    this.session = { may_act: true, why: null };
    this.clear();
  }

  /** Forgets the documents, not the selection and the filter. */
  clear() {
    this.version = 0;
    this.offset = null;
    this.log = null;
    this.run = null;
    this.columns = [];
    this.members = new Map();
    this.order = [];
    this.spans = new Map();
    this.nodes = [];
    this.streams = [];
    this.notices = [];
    this.cost = null;
    this.progress = null;
    this.curves = null;
    this.quality = null;
    this.importances = null;
    this.tables = null;
    this.samples = null; // of a report: live ones are asked for by the page
    this.waitingEpochs = null;
    this.answers = [];
    this.logNow = 0;
    this.heardAt = 0;
    this.shown = null;
  }

  /** Takes a whole `state` document. */
  load(state) {
    const own = state.log === this.log ? this.notices.filter((each) => each.isOwn) : []; // else it is another run's
    this.clear();
    this.offset = state.offset;
    this.log = state.log;
    this.hear(state.now);
    this.takeSections(state);
    this.notices = [...(state.notices ?? []), ...own].sort((a, b) => a.at_s - b.at_s).slice(-MOST_NOTICES);
    this.columns = state.members.columns;
    for (const [id, row] of Object.entries(state.members.rows)) this.setMember(id, row);
    this.sortOrder();
    for (const [id, spans] of Object.entries(state.spans ?? {})) this.spans.set(id, spans);
    this.tell(["run", "members", "spans", "nodes", "streams", "notices", "cost", "progress", "selection"]);
  }

  /** Takes one of the documents `curves`, `quality`, `importances`, `tables`. */
  loadDocument(name, document) {
    this[name] = document;
    if (document.members) document.members = bare(document.members);
    if (name === "curves") {
      for (const curve of Object.values(document.members)) curve.values = bare(curve.values);
      const late = (this.waitingEpochs ?? []).filter(([offset]) => offset > document.offset);
      this.waitingEpochs = null;
      for (const [, epochs] of late) this.applyEpochs(epochs);
    }
    this.tell([name]);
  }

  /** Says that `curves` was asked for: epochs that arrive before it are kept for it. */
  expectCurves() {
    if (this.curves === null) this.waitingEpochs ??= [];
  }

  /** Applies a change. Returns the names of documents that are stale by it. */
  apply(change) {
    this.offset = change.offset ?? this.offset;
    this.hear(change.now);
    const changed = this.takeSections(change);
    if (change.members) {
      const before = this.members.size;
      for (const [id, row] of Object.entries(change.members)) this.setMember(id, row);
      if (this.members.size !== before) this.sortOrder();
      changed.push("members");
    }
    if (change.spans) {
      for (const [id, spans] of Object.entries(change.spans)) this.spans.set(id, spans);
      changed.push("spans");
    }
    if (change.notices?.length) {
      this.applyNotices(change.notices);
      changed.push("notices");
    }
    if (change.epochs?.length && this.waitingEpochs !== null) this.waitingEpochs.push([change.offset, change.epochs]);
    else if (change.epochs?.length && this.curves !== null) {
      this.applyEpochs(change.epochs);
      changed.push("curves");
    }
    if (change.answers?.length) {
      this.answers = [...this.answers, ...change.answers].slice(-100);
      changed.push("answers");
    }
    this.tell(changed);
    return change.stale ?? [];
  }

  /** Takes the sections of a document, and returns their names. */
  takeSections(document) {
    const names = SECTIONS.filter((name) => document[name] != null);
    for (const name of names) this[name] = document[name];
    if (document.run != null && !this.session.may_act) this.run.actions = [];
    if (document.cost != null) this.bareCost();
    return names;
  }

  bareCost() {
    this.cost.members.rows = bare(this.cost.members.rows);
    this.cost.by_member_role = bare(this.cost.by_member_role ?? {});
  }

  setMember(id, row) {
    const member = {};
    this.columns.forEach((name, i) => (member[name] = row[i] ?? null));
    member.id = id;
    member.params = bare(member.params ?? {});
    member.metrics = bare(member.metrics ?? {});
    this.members.set(id, member);
  }

  sortOrder() {
    this.order = [...this.members.keys()].sort((a, b) => (this.members.get(a).number ?? 0) - (this.members.get(b).number ?? 0));
  }

  applyEpochs(epochs) {
    for (const [id, epoch, t, values] of epochs) {
      const curve = (this.curves.members[id] ??= { epoch: [], t: [], values: bare({}) });
      let keep = curve.epoch.length;
      while (keep > 0 && curve.epoch[keep - 1] >= epoch) keep -= 1;
      curve.epoch.length = keep;
      curve.t.length = keep;
      for (const series of Object.values(curve.values)) series.length = Math.min(series.length, keep);
      if (values === null) continue;
      curve.epoch.push(epoch);
      curve.t.push(t);
      for (const name of new Set([...Object.keys(curve.values), ...Object.keys(values)])) {
        const series = (curve.values[name] ??= []);
        while (series.length < keep) series.push(null);
        series.push(values[name] ?? null);
      }
      if (curve.epoch.length > MOST_EPOCHS) thin(curve);
    }
  }

  /** Adds notices; one whose key is known takes the place of what was known of it. */
  applyNotices(notices) {
    const fresh = new Set(notices.map((each) => each.key));
    this.notices = [...this.notices.filter((each) => !fresh.has(each.key)), ...notices].slice(-MOST_NOTICES);
  }

  /** Adds a notice of this page's own, such as a refusal. */
  addNotice(level, text) {
    if (this.run === null) return;
    const at_s = Math.max(0, this.now() - (this.run.started ?? this.now()));
    this.applyNotices([{ key: Symbol(text), at_s, level, text, who: "", count: 1, isOwn: true }]); // such as a refusal: no document has it
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

function thin(curve) {
  const keep = (_, i) => i % 2 === 0 || i === curve.epoch.length - 1;
  const values = Object.entries(curve.values).map(([name, series]) => [name, series.filter(keep)]);
  curve.t = curve.t.filter(keep);
  curve.epoch = curve.epoch.filter(keep);
  curve.values = bare(Object.fromEntries(values));
}
