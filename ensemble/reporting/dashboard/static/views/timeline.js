/** The view "Timeline": every attempt of every member, by node and stream group or device. */

import { arrange, epochEnds, listAttempts, nameCohort, nameDevices } from "../attempts.js";
import { fill, h, setText } from "../dom.js";
import { clock, count, duration, number, visible } from "../format.js";
import { Lanes } from "../lanes.js";
import { card, choice } from "../card.js";
import { STATES } from "../store.js";

const PACKED_FROM = 200; // members from which on rows are shared unless told otherwise
const WORDS = { starting: "starting up", ...Object.fromEntries(Object.keys(STATES).map((state) => [state, state])) };
const LATER_MS = 300; // until a zoom that has come to rest is in the address
const FITS = {
  by: (given) => ["device", "cohort"].includes(given), packed: (given) => typeof given === "boolean",
  span: (given) => Array.isArray(given) && given.length === 2 && given.every(Number.isFinite) && given[0] < given[1],
};

export const timelineView = {
  id: "timeline",
  title: "Timeline",
  needs: ["curves"],
  shown: () => true,
  mount: (root, page) => new TimelineView(root, page),
};

class TimelineView {
  constructor(root, page) {
    this.store = page.store;
    this.page = page;
    this.settings = page.settings({ by: null, packed: null, span: null }, FITS);
    this.tools = h("div", { class: "figure-tools" });
    this.legend = h("div", { class: "keys-of", role: "list", "aria-label": "colours" });
    this.absent = h("p", { class: "absent" });
    this.lanes = new Lanes({
      store: this.store,
      describe: (attempt) => this.describe(attempt),
      onPick: (id) => this.store.toggle(id),
      onZoom: () => this.noteZoom(),
    });
    this.lanes.span = this.settings.span;
    this.card = card({
      title: "Attempts", controls: [this.tools], table: () => this.tabulate(), onPick: (id) => this.store.toggle(id),
      onShown: () => this.update(new Set(["settings"])),
    });
    fill(this.card.body, this.legend, this.absent, this.lanes.root);
    fill(root, this.card.root);
  }

  noteZoom() {
    this.drawTools();
    clearTimeout(this.later);
    this.later = setTimeout(() => this.page.set({ span: this.lanes.span }), LATER_MS);
  }

  close() {
    clearTimeout(this.later);
    this.lanes.close();
  }

  set(changes) {
    Object.assign(this.settings, changes);
    this.page.set(changes);
    this.update(new Set(["settings"]));
  }

  update(changed) {
    if (changed.size === 1 && changed.has("clock")) {
      this.lanes.grow();
      return;
    }
    if (changed.size === 1 && changed.has("hover")) return;
    const rowsChange = ["reset", "spans", "filter", "settings", "view", "nodes"].some((name) => changed.has(name));
    if (this.attempts === undefined || rowsChange || (changed.has("curves") && this.isClosedByRestart)) this.arrange();
    this.drawTools();
    this.drawLegend();
    this.card.read(this.reading());
    this.card.update();
    this.absent.hidden = this.attempts.length > 0;
    this.lanes.root.hidden = this.attempts.length === 0;
    setText(this.absent, this.store.filter ? "No member that passes the filter has been placed." : "No member has been placed yet.");
    if (!this.card.asTable) this.lanes.draw();
  }

  arrange() {
    const { store } = this;
    this.attempts = listAttempts(store, store.visible());
    this.isClosedByRestart = this.attempts.some((each) => each.outcome === "interrupted");
    this.hasDevices = this.attempts.some((each) => each.devices.length);
    this.by = this.hasDevices ? this.settings.by ?? "device" : "cohort";
    this.packed = this.settings.packed ?? new Set(this.attempts.map((each) => each.id)).size >= PACKED_FROM;
    const begin = store.run.started ?? Math.min(...this.attempts.map((each) => each.placed), store.now());
    this.lanes.arrange(arrange(this.attempts, this.by, this.packed, store.nodes), begin, this.packed);
  }

  drawTools() {
    const key = JSON.stringify([this.by, this.packed, this.hasDevices, this.lanes.zoomed]);
    if (key === this.toolsKey || this.by === undefined) return;
    this.toolsKey = key;
    const button = (text, label, act) => h("button", { type: "button", class: "minor", "aria-label": label, title: label, onclick: act }, text);
    const focused = this.tools.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    fill(this.tools,
      choice("rows", [["member", "one a member"], ["place", "one a place"]], this.packed ? "place" : "member", (rows) => this.set({ packed: rows === "place" })),
      this.hasDevices && choice("by", [["device", "device"], ["cohort", "stream group"]], this.by, (by) => this.set({ by })),
      h("span", { class: "chips" },
        button("+", "zoom in", () => this.lanes.zoomBy(0.5)), button("−", "zoom out", () => this.lanes.zoomBy(2)),
        this.lanes.zoomed && button("whole run", "whole run", () => this.lanes.zoomTo(null))));
    if (focused !== null) [...this.tools.querySelectorAll("[aria-label]")].find((each) => each.getAttribute("aria-label") === focused)?.focus();
  }

  drawLegend() {
    const many = new Map();
    for (const each of this.attempts) many.set(each.outcome, (many.get(each.outcome) ?? 0) + 1);
    const starting = this.attempts.some((each) => (each.started ?? Infinity) > each.placed);
    const key = JSON.stringify([[...many], starting]);
    if (key === this.legendKey) return;
    this.legendKey = key;
    const item = (state, text) => h("span", { class: "state-key", role: "listitem", "data-outcome": state }, h("span", { class: `swatch bar-${state}` }), text);
    fill(this.legend, starting && item("starting", WORDS.starting),
      Object.keys(STATES).filter((state) => many.has(state)).map((state) => item(state, `${WORDS[state]} ${number(many.get(state))}`)));
  }

  reading() {
    const again = this.attempts.filter((each) => each.again).length;
    const moved = this.attempts.filter((each) => each.moved).length;
    const waiting = this.store.visible().filter((id) => ["waiting", "measuring"].includes(this.store.members.get(id)?.state)).length;
    const parts = [`${count(this.attempts.length, "attempt")} of ${count(new Set(this.attempts.map((each) => each.id)).size, "member")}`];
    if (again) parts.push(`${number(again)} of them tried again (↻)`);
    if (moved) parts.push(`${number(moved)} moved on (→)`);
    if (waiting) parts.push(`${count(waiting, "member")} waiting for a place`);
    return `${parts.join("; ")}. Pale: starting up. Fine lines: ends of epochs.`;
  }

  /** What the hover and a screen reader say of an attempt. */
  describe(each) {
    const { store } = this;
    const begin = this.lanes.begin;
    const end = each.ended ?? store.now();
    const devices = nameDevices(each.devices, store.nodes);
    const place = [each.node, devices, nameCohort(each.cohort)].filter(Boolean).join(", ");
    const wait = (each.started ?? end) - each.placed;
    const error = each.outcome === "failed" ? store.members.get(each.id)?.error : null;
    const epochs = epochEnds(store, each.id).filter((t) => t >= each.placed && t <= end).length;
    return [
      each.id,
      `attempt ${each.attempt + 1} on ${place}: ${WORDS[each.outcome]}`,
      `${clock(each.placed - begin)} to ${each.ended === null ? "now" : clock(end - begin)} (${duration(end - each.placed)}), of which ${duration(wait)} starting up`,
      epochs ? `${count(epochs, "epoch")} ended in it` : null,
      each.again ? "tried again after the one before" : null,
      each.moved ? "goes on in another place" : null,
      error,
    ];
  }

  tabulate() {
    const begin = this.lanes.begin ?? 0;
    const since = (t) => (t === null || t === undefined ? null : t - begin);
    const rows = this.attempts.map((each) => ({
      key: each.key, member: each.id,
      cells: [
        visible(each.id), each.attempt + 1, each.node, nameDevices(each.devices, this.store.nodes), nameCohort(each.cohort), since(each.placed), since(each.started),
        since(each.ended), (each.ended ?? this.store.now()) - each.placed, each.outcome, each.outcome === "failed" ? this.store.members.get(each.id)?.error ?? "" : "",
      ],
    }));
    return {
      caption: "Attempts, times since the run's start.",
      head: ["member", "attempt", "node", "device", "stream group", ["placed", clock], ["started", clock], ["ended", clock], ["took", duration], "how it ended", "why"], rows,
    };
  }
}
