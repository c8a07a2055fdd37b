/** The view "Pipeline": of each shared stream how samples flow from the source to the members, and where it is slow. */

import { fill, h, setText, svg } from "../dom.js";
import { count, memory, number, share, visible } from "../format.js";
import { card, roving } from "../card.js";

const MOST_MEMBERS = 24; // members named beside a stream
const HOLDING = new Set(["placed", "running", "measuring"]);
const LEVELS = {
  workers: ["workers had work", "of them"], ring: ["the ring was full", "of its samples"], waiting: ["a member waited", "of the time"],
  link: ["links were used", "of the transfers that may be under way"],
};

export const pipelineView = {
  id: "pipeline",
  title: "Pipeline",
  needs: [],
  shown: () => true,
  mount: (root, page) => new PipelineView(root, page),
};

class PipelineView {
  constructor(root, page) {
    this.store = page.store;
    this.summary = h("p", { class: "pipeline-summary" });
    this.absent = h("p", { class: "absent" });
    this.cards = new Map();
    this.list = h("div", { class: "streams" });
    this.table = card({ title: "Streams by node", table: () => this.tabulate() });
    this.table.read("Counts of all feeders in turn, rates between its last two reports, levels from the first sample on: workers busy, ring full, links used, a member waited.");
    fill(root, this.summary, this.absent, this.list, h("div", { class: "grid" }, this.table.root));
    this.table.root.querySelector("button").click(); // it is a table, nothing else
    this.table.root.querySelector(".as-table").hidden = true;
  }

  close() {
    this.store.setHover(null);
  }

  update(changed) {
    if (changed.size === 1 && (changed.has("clock") || changed.has("hover"))) return;
    const { store } = this;
    const shown = store.streams.filter((group) => group.is_shown); // older ones are rows of the table
    setText(this.summary, this.summarize());
    this.absent.hidden = shown.length > 0;
    setText(this.absent, this.reason());
    this.table.root.hidden = shown.length === 0;
    this.table.update();
    shown.forEach((group, i) => {
      const { cohort } = group;
      if (!this.cards.has(cohort)) this.cards.set(cohort, this.makeCard(cohort));
      const card = this.cards.get(cohort);
      const members = this.membersOf(cohort);
      const signature = JSON.stringify([group, store.run.samples, members.map(({ id, waited, private: alone }) => [id, waited, alone, store.colour(id), store.selection.has(id), store.isPale(id)])]);
      if (card.signature !== signature) this.drawCard(card, group, members);
      card.signature = signature;
      if (this.list.children[i] !== card.root) this.list.insertBefore(card.root, this.list.children[i] ?? null);
    });
    for (const [cohort, card] of this.cards) if (!shown.some((group) => group.cohort === cohort)) [card.root.remove(), this.cards.delete(cohort)];
  }

  summarize() {
    const totals = this.store.run.totals ?? {};
    if (!totals.prepared) return "";
    const reuse = typeof totals.reuse === "number" ? `: each was used ${totals.reuse.toFixed(2)} times` : "";
    return `${number(totals.prepared)} samples prepared, ${number(totals.consumed)} consumed in the whole run${reuse}.`;
  }

  reason() {
    const lost = (this.store.run.facts ?? []).filter(({ label }) => label === "pipeline").map(({ text }) => visible(text));
    return lost.length ? `Nothing is shared: ${lost.join("; ")}.` : "No feeder has reported: every member prepares its own samples, or none has been read yet.";
  }

  /** Members that read a cohort's stream now, of an ended run all that did; those that wait most first. */
  membersOf(cohort) {
    const { store } = this;
    const isOpen = store.run.ended === null;
    return store.visible().map((id) => store.members.get(id))
      .filter((member) => member.cohort === cohort && (!isOpen || HOLDING.has(member.state)))
      .sort((a, b) => (b.waited ?? -1) - (a.waited ?? -1) || a.number - b.number);
  }

  makeCard(cohort) {
    const root = h("section", { class: "card stream", "data-cohort": cohort ?? "", "aria-label": cohort === null ? "stream" : `stream of group ${cohort}` });
    return { root, keys: roving(root, "button[data-member]"), signature: null };
  }

  drawCard(card, whole, members) {
    const focused = card.root.contains(document.activeElement) ? document.activeElement.dataset.member : null;
    const limit = whole.limit ? `Limited by ${visible(whole.limit)}.` : "What limits it is not known yet.";
    fill(card.root,
      h("div", { class: "figure-head" },
        h("div", {}, h("h3", {}, whole.cohort === null ? "Stream" : `Stream group ${whole.cohort}`), h("p", { class: whole.slow && whole.slow !== "members" ? "limit warn" : "limit soft" }, limit)),
        h("p", { class: "soft figures" }, whole.nodes.length > 3 ? count(whole.nodes.length, "node") : whole.nodes.map(visible).join(", "))),
      whole.lost.map((text) => h("p", { class: "lost bad", "data-mark": "lost" }, visible(text))),
      this.drawFlow(whole, members.length),
      this.drawMembers(whole, members));
    card.keys.refresh();
    if (focused) [...card.root.querySelectorAll("[data-member]")].find((each) => each.dataset.member === focused)?.focus();
  }

  drawFlow(whole, attached) {
    const { levels, slow } = whole;
    const samples = this.store.run.samples;
    const reuse = whole.prepared ? whole.consumed / whole.prepared : null;
    const waits = whole.nodes.length > 1;
    const bad = whole.skipped ? h("p", { class: "warn", "data-mark": "bad" }, `${count(whole.skipped, "bad record")} skipped`) : null;
    const members = whole.members || attached;
    return h("ol", { class: "flow" },
      box("source", "Source", samples ? `${number(samples)} samples` : null, [samples ? "an epoch" : "read record by record", bad], null, slow),
      arrow(null, null, 1),
      box("preparation", "Stages", count(whole.workers ?? 0, "worker"), [
        whole.cache && `cache: ${whole.cache}`, whole.restarts ? h("p", { class: "warn" }, `${count(whole.restarts, "worker")} restarted`) : null,
      ], ["workers", levels.workers], slow),
      arrow("prepared", whole.prepared_per_s, 1, whole.prepared),
      waits && [
        box("links", "Links", count(whole.nodes.length, "node"), [whole.design && `${visible(whole.design)} design`, whole.sent_bytes ? `${memory(whole.sent_bytes)} sent` : "nothing sent"], ["link", levels.link], slow),
        arrow(null, null, 1),
      ],
      box("ring", "Ring", whole.capacity ? `${number(whole.capacity)} samples` : null, [whole.ring_bytes ? `${memory(whole.ring_bytes)} of shared memory` : null], ["ring", levels.ring], slow),
      arrow("consumed", whole.consumed_per_s, Math.min(5, Math.max(1, members)), whole.consumed, reuse),
      box("members", "Members", count(members, "member"), [whole.detached ? h("p", { class: "warn" }, `${number(whole.detached)} left and work alone`) : null], ["waiting", levels.waiting], slow));
  }

  drawMembers(whole, members) {
    if (members.length === 0) return null;
    const { store } = this;
    const left = members.length - MOST_MEMBERS;
    return h("div", { class: "attached", role: "group", "aria-label": "members of the stream and how long they wait for data" },
      members.slice(0, MOST_MEMBERS).map(({ id, waited, private: alone }) => h("button", {
        type: "button", class: `reader ${store.isPale(id) ? "pale" : ""}`, "data-member": id, "data-mark": "reader", "aria-pressed": String(store.selection.has(id)),
        onclick: () => store.toggle(id), onpointerenter: () => store.setHover(id), onpointerleave: () => store.setHover(null),
      },
      h("span", { class: "wait-fill", style: { width: `${100 * Math.min(1, waited ?? 0)}%` } }),
      h("span", { class: "swatch", style: { background: store.colour(id) } }), h("span", { class: "name" }, visible(id)),
      h("span", { class: "soft figures" }, [waited !== null && `waits ${share(waited)}`, alone > 0 && `${share(alone)} of its batches prepared alone`].filter(Boolean).join(", ")))),
      left > 0 && h("span", { class: "soft" }, `and ${count(left, "member")} that wait less`));
  }

  tabulate() {
    const rows = this.store.streams.flatMap((group) => group.streams).map((each) => ({
      key: JSON.stringify([each.node, each.cohort]),
      cells: [
        each.node, each.cohort, each.prepared, each.consumed, each.prepared ? each.consumed / each.prepared : null, each.prepared_per_s, each.consumed_per_s,
        ...["workers", "ring", "link", "waiting"].map((name) => each.levels?.[name]), each.sent_bytes || null, each.skipped || null, each.lost ? "lost" : this.store.run.ended !== null ? "ended" : "feeding",
      ],
    }));
    return {
      caption: "Feeders of all streams.", rows,
      head: ["node", "group", ...["prepared", "consumed", "reuse", "prepared/s", "consumed/s"].map((name) => [name, number]),
        ...["busy", "ring", "links", "waited"].map((name) => [name, share]), ["sent", memory], ["bad", number], "state"],
    };
  }
}

function box(part, title, figure, notes, level, slow) {
  const isSlow = part === slow;
  const [name, value] = level ?? [null, null];
  const said = typeof value === "number" ? `${LEVELS[name][0]}: ${share(value)} ${LEVELS[name][1]}` : null;
  return h("li", { class: isSlow ? "flow-box slow" : "flow-box", "data-part": part },
    h("div", { class: "flow-title" }, title, isSlow && h("span", { class: "slow-word", "data-mark": "slow" }, part === "members" ? "sets the pace" : "slow here")),
    figure && h("div", { class: "flow-figure" }, figure),
    said && h("div", { class: "level", "data-level": name, title: said },
      h("span", { class: "level-bar", role: "meter", "aria-label": LEVELS[name][0], "aria-valuemin": "0", "aria-valuemax": "1", "aria-valuenow": value.toFixed(3), "aria-valuetext": said },
        h("span", { class: `level-fill level-${name}`, style: { width: `${100 * Math.min(1, Math.max(0, value))}%` } })),
      h("span", { class: "soft" }, `${LEVELS[name][0]} ${share(value)}`)),
    notes.filter(Boolean).map((note) => (typeof note === "string" ? h("p", { class: "soft" }, note) : note)));
}

/** An arrow between two boxes: a line for each reader where it fans out, the rate above, the count below. */
function arrow(what, rate, lines, total = null, reuse = null) {
  const middle = 15;
  const ends = Array.from({ length: lines }, (_, i) => (lines === 1 ? middle : 4 + (22 * i) / (lines - 1)));
  const drawing = svg("svg", { viewBox: "0 0 60 30", class: "flow-arrow", "aria-hidden": "true", preserveAspectRatio: "none" },
    ends.map((y) => svg("path", { d: `M0,${middle}C26,${middle} 26,${y} 54,${y}M49,${y - 3.5}L55,${y}L49,${y + 3.5}`, "data-mark": "flow" })));
  const text = (value, name) => (value === null ? null : h("span", { class: name }, value));
  return h("li", { class: "flow-step", "data-flow": what },
    text(rate === null || what === null ? null : `${number(rate)}/s`, "rate figures"), drawing,
    text(what === null || total === null ? null : `${number(total)} ${what}`, "soft figures"),
    text(reuse === null ? null : `used ${reuse.toFixed(2)} times`, "reuse figures"));
}
