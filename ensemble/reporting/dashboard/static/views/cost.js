/** The view "Cost": CPU-seconds and joules by role and member, with their origin; what it amounts to. */

import { card, choice } from "../card.js";
import { fill, h, setText } from "../dom.js";
import { cpu, joules, number, share, visible } from "../format.js";
import { plainTable } from "../plain_table.js";
import { SERIES } from "../store.js";
import { Tiles } from "../tiles.js";

const SHOWN = 40; // members with a bar of their own, until the reader asks for all
const ROLES = {
  startup: "#9aa5b4", prepare: "#d97a2b", feed: "#c9992a", verify: "#a3b34a", train: "#3b82c4", profile: "#4f9d9d", orchestrate: "#8a6fd1", ray: "#24a0b3", idle: "#b3a68c",
  other: "#6d7683",
};
const TILES = new Set(["cpu", "energy", "power", "wall"]);
const UNUSED = new Set(["idle", "other"]);
const ESTIMATED = "Estimated joules are CPU-seconds with a weight, from how busy the processors were. They were not measured: not evidence of a saving.";
const SORTS = [["direct", "direct use"], ["full", "full use"], ["number", "number"], ["name", "name"]];

export const costView = {
  id: "cost",
  title: "Cost",
  needs: ["tables"],
  renews: ["tables"],
  shown: (store) => store.run !== null,
  mount: (root, page) => new CostView(root, page),
};

class CostView {
  constructor(root, page) {
    this.page = page;
    this.first = true;
    Object.assign(this, { all: false }, page.settings({ quantity: "cpu", isFull: false, sort: "direct" }, {
      quantity: (given) => ["cpu", "energy"].includes(given), sort: (given) => SORTS.some(([name]) => name === given),
    }));
    this.tiles = new Tiles(page);
    this.origin = h("p", { class: "before-figures warn", role: "note", hidden: true }, ESTIMATED);
    this.roles = card({ title: "The whole run by role" });
    this.members = card({ title: "Members" });
    this.lines = h("section", { class: "card" });
    this.rows = h("div", {});
    this.note = h("p", { class: "reading" });
    this.more = h("button", { type: "button", onclick: () => this.set({ all: !this.all }) });
    this.legend = h("div", { class: "chart-legend" });
    this.tables = h("div", { class: "below" });
    fill(this.members.body, this.buildControls(), this.legend, this.rows, this.note, this.more);
    fill(root, this.tiles.root, this.origin, h("div", { class: "grid below" }, this.roles.root, this.members.root, this.lines), this.tables);
  }

  close() {}

  buildControls() {
    return h("div", { class: "figure-tools" },
      choice("Show", [["cpu", "CPU-seconds"], ["energy", "joules"]], this.quantity, (quantity) => this.set({ quantity })),
      choice("View", [["direct", "direct, by role"], ["full", "full: with the shared work"]], this.isFull ? "full" : "direct", (view) => this.setView(view)),
      (this.sorting = choice("Sort by", SORTS, this.sort, (sort) => this.set({ sort }))));
  }

  /** Shows direct or full use; who sorted by the one sorts by the other now. */
  setView(view) {
    const sort = ["direct", "full"].includes(this.sort) ? view : this.sort;
    this.sorting.querySelector("select").value = sort;
    this.set({ isFull: view === "full", sort });
  }

  set(choice) {
    Object.assign(this, choice);
    this.page.set({ quantity: this.quantity, isFull: this.isFull, sort: this.sort });
    this.drawMembers();
  }

  update(changed) {
    const isNew = this.first || changed.has("view") || changed.has("reset");
    this.first = false;
    const { store } = this.page;
    if (isNew || changed.has("run")) this.tiles.draw(store.run.tiles.filter(({ key }) => TILES.has(key)));
    if (isNew || changed.has("cost")) {
      this.drawRoles();
      this.drawLines();
    }
    if (isNew || changed.has("cost") || changed.has("selection") || changed.has("filter")) this.drawMembers();
    const { tables } = store;
    if ((isNew || changed.has("tables")) && tables !== null) fill(this.tables, tables.tables.map(plainTable), tables.missing.map((why) => h("p", { class: "absent" }, visible(why))));
    this.origin.hidden = !this.origins().has("estimated") && store.run.totals?.energy_origin !== "estimated";
  }

  /** The origins of all joules on the page. */
  origins() {
    const { cost, nodes } = this.page.store;
    const found = new Set((cost?.roles ?? []).filter((each) => each.energy_j !== null).map((each) => each.origin));
    for (const node of nodes) found.add(node.watts_origin);
    return found;
  }

  drawRoles() {
    const { cost } = this.page.store;
    const roles = cost?.roles ?? [];
    if (!roles.some((each) => each.cpu_s > 0 || each.energy_j)) {
      this.roles.explain("No process has reported what it used yet.");
      return;
    }
    this.roles.explain(null);
    const origins = [...this.roleOrigins()].join(" + ");
    this.roles.read("What processor time and energy went into; idle energy by who had reserved the cores and GPUs." + (origins ? ` The joules are ${origins}.` : ""));
    const bars = [this.roleBar("CPU-seconds (measured)", roles.filter((each) => !UNUSED.has(each.role)), (each) => each.cpu_s, cpu)];
    if (roles.some((each) => each.energy_j)) bars.push(this.roleBar(`joules (${origins})`, roles, (each) => each.energy_j ?? 0, joules));
    else bars.push(h("p", { class: "absent" }, "There is no energy to share out: no node has a power source that could be read, or none has reported."));
    fill(this.roles.body, bars);
  }

  roleOrigins() {
    return new Set((this.page.store.cost?.roles ?? []).filter((each) => each.energy_j).map((each) => each.origin));
  }

  roleBar(title, roles, amountOf, format) {
    const shown = roles.filter((each) => amountOf(each) > 0);
    const total = shown.reduce((sum, each) => sum + amountOf(each), 0);
    const parts = shown.map((each) => part(each.role, amountOf(each) / total, `${visible(each.word)}: ${format(amountOf(each))}`));
    const keys = shown.map((each) => key(each.role, `${visible(each.word)} ${format(amountOf(each))}, ${share(amountOf(each) / total)}`));
    return h("div", { class: "role-bar", "data-mark": title.split(" ")[0] }, h("p", { class: "dots-title" }, `${title}: ${format(total)}`), h("div", { class: "bar-track tall", "aria-hidden": "true" }, parts), h("div", { class: "chart-legend" }, keys));
  }

  /** Rows `{ id, name, parts: [[role, amount]], direct, full, origin }` of members and of what belongs to none, for the chosen quantity. */
  listRows() {
    const { store } = this.page;
    const { cost } = store;
    const at = Object.fromEntries(cost.members.columns.map((name, i) => [name, i]));
    const which = this.quantity === "cpu" ? 0 : 1;
    const [direct, full] = this.quantity === "cpu" ? ["cpu_s", "full_cpu_s"] : ["energy_j", "full_energy_j"];
    const rolesOf = (id) => (Object.hasOwn(cost.by_member_role, id) ? Object.entries(cost.by_member_role[id]) : []);
    const rows = [];
    for (const id of store.visible()) {
      if (!Object.hasOwn(cost.members.rows, id)) continue;
      const row = cost.members.rows[id];
      const parts = rolesOf(id).map(([role, sums]) => [role, sums[which] ?? 0]).filter(([, amount]) => amount > 0);
      const extra = Math.max(0, (row[at[full]] ?? 0) - (row[at[direct]] ?? 0));
      rows.push({ id, name: visible(id), number: store.members.get(id).number, parts: this.isFull && extra > 0 ? [...parts, ["shared", extra]] : parts, direct: row[at[direct]], full: row[at[full]], origin: this.quantity === "cpu" ? "measured" : this.isFull ? row[at.full_origin] : row[at.origin] });
    }
    const others = rolesOf("").map(([role, sums]) => [role, sums[which] ?? 0]).filter(([, amount]) => amount > 0);
    return { rows: this.sorted(rows), others };
  }

  sorted(rows) {
    const order = { direct: (a, b) => (b.direct ?? -1) - (a.direct ?? -1), full: (a, b) => (b.full ?? -1) - (a.full ?? -1), number: (a, b) => a.number - b.number, name: (a, b) => a.name.localeCompare(b.name, "en", { numeric: true }) };
    return rows.sort((a, b) => order[this.sort](a, b) || a.number - b.number);
  }

  drawMembers() {
    const { cost } = this.page.store;
    if (!cost || Object.keys(cost.members.rows).length === 0) {
      this.members.explain("No member has used anything yet.");
      return;
    }
    this.members.explain(null);
    const { rows, others } = this.listRows();
    const origins = new Set(rows.filter((each) => (this.isFull ? each.full : each.direct) !== null).map((each) => each.origin));
    origins.delete("unavailable");
    const of = this.quantity === "cpu" ? "CPU-seconds, measured" : `Joules, ${[...origins].join(" and ") || "unavailable"}`;
    this.members.read(`${of}. Direct is what a member used itself. Full adds its part of what serves several: of preparing and feeding by the samples that it consumed, of all else by the time for which its ranks held places.`);
    const shown = this.all ? rows : rows.slice(0, SHOWN);
    const shared = others.filter(([role]) => !UNUSED.has(role));
    const unused = this.quantity === "energy" ? others.filter(([role]) => UNUSED.has(role)) : [];
    const extra = [];
    if (!this.isFull && shared.length) extra.push({ name: "shared, by all", parts: shared });
    if (unused.length) extra.push({ name: "not the run's", parts: unused });
    const amount = (row) => row.parts.reduce((sum, [, each]) => sum + each, 0);
    // What all share may be a hundred times a member's: its bar is cut off rather than theirs made invisible.
    const largest = Math.max(...rows.map(amount), 0);
    const most = Math.max(largest, Math.min(Math.max(...extra.map(amount), 0), largest ? 3 * largest : Infinity), 1e-9);
    const nodes = [...shown, ...extra].map((row) => this.memberRow(row, amount(row), most, origins.size > 1));
    const focused = this.rows.contains(document.activeElement) ? document.activeElement.closest("[data-member]")?.dataset.member : undefined;
    fill(this.rows, nodes);
    if (focused !== undefined) [...this.rows.children].find((each) => each.dataset.member === focused)?.querySelector("button")?.focus();
    this.drawLegend([...shown, ...extra]);
    const left = rows.slice(SHOWN).reduce((sum, row) => sum + amount(row), 0);
    this.more.hidden = rows.length <= SHOWN;
    setText(this.more, this.all ? `only ${SHOWN}` : `all ${number(rows.length)}`);
    setText(this.note, this.all || rows.length <= SHOWN ? "" : `${number(rows.length - SHOWN)} other members: ${this.quantity === "cpu" ? cpu(left) : joules(left)} together.`);
  }

  memberRow(row, total, most, isMixed) {
    const { store } = this.page;
    const format = this.quantity === "cpu" ? cpu : joules;
    const known = row.id === undefined || (this.isFull ? row.full : row.direct) !== null;
    const figure = known ? format(total, isMixed && row.origin ? row.origin : undefined) : "unavailable";
    const name = row.id === undefined
      ? h("span", { class: "bar-name soft" }, row.name)
      : h("button", { type: "button", class: "name-button", "aria-pressed": String(store.selection.has(row.id)), title: row.name, onclick: () => store.toggle(row.id) }, row.name);
    const parts = row.parts.map(([role, each]) => part(role, each / Math.max(most, total), `${row.name}, ${this.wordOf(role)}: ${format(each)}`));
    return h("div", { class: `bar-row wide ${row.id !== undefined && store.isPale(row.id) ? "pale" : ""}`, "data-member": row.id },
      name, h("span", { class: total > most ? "bar-track cut" : "bar-track", title: total > most ? "cut off: longer than the scale" : null }, parts), h("span", { class: "bar-value figures" }, figure));
  }

  wordOf(role) {
    if (role === "shared") return "its part of the shared work";
    return visible(this.page.store.cost.roles.find((each) => each.role === role)?.word ?? role);
  }

  drawLegend(rows) {
    const roles = [...new Set(rows.flatMap((row) => row.parts.map(([role]) => role)))];
    const keyOf = roles.join(" ");
    if (keyOf === this.legendOf) return;
    this.legendOf = keyOf;
    fill(this.legend, roles.map((role) => key(role, this.wordOf(role))));
  }

  drawLines() {
    const lines = this.page.store.cost?.lines ?? [];
    this.lines.hidden = lines.length === 0;
    const row = ([label, text]) => [h("dt", {}, visible(label)), h("dd", {}, visible(text))];
    fill(this.lines, h("h3", {}, "In words"), this.page.store.cost?.reading ? h("p", { class: "reading" }, this.page.store.cost.reading) : null, h("dl", { class: "said" }, lines.map(row)));
  }
}

function colourOf(role) {
  return Object.hasOwn(ROLES, role) ? ROLES[role] : SERIES[9];
}

function part(role, of, title) {
  return h("span", { class: role === "shared" ? "part shared" : "part", title, "data-role": role, style: { width: `${100 * of}%`, "background-color": role === "shared" ? "#8a94a3" : colourOf(role) } });
}

function key(role, words) {
  return h("span", { class: "chart-key" }, h("span", { class: "chart-dot", style: { background: role === "shared" ? "#8a94a3" : colourOf(role) } }), words);
}
