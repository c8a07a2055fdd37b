/** The view "Placement": each node, its cores and GPUs, and who is on them now; of a run that stands still when most were at work. */

import { fill, h, setAttribute, setText } from "../dom.js";
import { clock, count, hyperparameters, memory, number, share, visible, watts } from "../format.js";
import { card, makeTip, roving } from "../card.js";
import { plainTable } from "../plain_table.js";
import { busiest, holders, layOut, rowsOf } from "../places.js";
import { inkOn } from "../store.js";

const PER_ROW = 16; // cores side by side
const MOST_PIECES = 400; // members drawn one by one on a device
const LETTER = 6.6; // pixels

export const placementView = {
  id: "placement",
  title: "Placement",
  needs: ["tables"],
  renews: ["tables"],
  shown: () => true,
  mount: (root, page) => new PlacementView(root, page),
};

class PlacementView {
  constructor(root, page) {
    this.store = page.store;
    this.cards = new Map();
    this.grid = h("div", { class: "nodes" });
    this.absent = h("p", { class: "absent" });
    this.card = card({
      title: "Nodes", table: () => this.tabulate(), onPick: (id) => this.store.toggle(id), onShown: () => this.update(new Set(["settings"])),
    });
    this.holder = h("div", { class: "nodes-holder" }, this.absent, this.grid);
    fill(this.card.body, this.holder);
    this.tables = h("div", { class: "below" });
    fill(root, h("div", { class: "grid" }, this.card.root), this.tables);
    this.tip = makeTip(this.holder);
    const on = (name, listener) => this.grid.addEventListener(name, listener);
    on("pointerover", (event) => this.point(event.target.closest("[data-member]")));
    on("pointerleave", () => this.point(null));
    on("focusin", (event) => this.point(event.target.closest("[data-member]")));
    on("focusout", () => this.point(null));
    on("click", (event) => {
      const piece = event.target.closest("[data-member]");
      if (piece !== null) this.store.toggle(piece.dataset.member);
    });
  }

  close() {
    this.store.setHover(null);
  }

  isLive() {
    return this.store.run.ended === null && !this.store.run.driver;
  }

  update(changed) {
    if (changed.size === 1 && changed.has("hover")) return;
    const { store } = this;
    if (this.shown !== store.tables) fill(this.tables, ((this.shown = store.tables)?.places ?? []).map(plainTable));
    const isPresent = this.isLive();
    const begin = store.run.started ?? store.now();
    const at = isPresent ? store.now() : busiest(store, store.order) ?? store.now();
    if (changed.size === 1 && changed.has("clock")) return;
    const shown = new Set(store.visible());
    this.isPresent = isPresent;
    this.nodes = layOut(store, holders(store, store.order, at));
    this.absent.hidden = this.nodes.length > 0;
    setText(this.absent, "No node has joined yet.");
    this.card.read(this.reading(at, begin));
    this.card.update();
    if (!this.card.asTable) this.drawNodes(shown);
  }

  reading(at, begin) {
    const ids = new Set(this.nodes.flatMap((each) => each.cores.pieces.map((piece) => piece.id)));
    const here = this.nodes.filter((each) => !each.node.gone);
    const cores = here.reduce((sum, each) => sum + each.cores.capacity, 0);
    const free = here.reduce((sum, each) => sum + Math.max(0, each.cores.capacity - each.cores.held), 0);
    const gpus = here.flatMap((each) => each.gpus);
    const when = this.isPresent ? "" : ` at ${clock(at - begin)}, when most were at work`;
    const parts = [`${count(ids.size, "member")} on ${count(here.length, "node")}${when}`, `${number(free)} of ${count(cores, "core")} not reserved`];
    if (gpus.length) parts.push(`${number(gpus.filter((each) => each.pieces.length === 0).length)} of ${count(gpus.length, "GPU")} without a member`);
    return `${parts.join("; ")}. Widths are the shares that members asked for; cores are not pinned.`;
  }

  drawNodes(shown) {
    const known = new Set();
    this.width = this.holder.clientWidth;
    this.nodes.forEach((each, i) => {
      const { name } = each.node;
      known.add(name);
      if (!this.cards.has(name)) this.cards.set(name, this.makeCard(name));
      const card = this.cards.get(name);
      this.drawCard(card, each, shown);
      if (this.grid.children[i] !== card.root) this.grid.insertBefore(card.root, this.grid.children[i] ?? null);
    });
    for (const [name, card] of this.cards) if (!known.has(name)) [card.root.remove(), this.cards.delete(name)];
  }

  look(id, shown) {
    const { store } = this;
    return [store.colour(id), store.selection.has(id), store.isPale(id) || !shown.has(id)];
  }

  makeCard(name) {
    const body = h("div", {});
    const root = h("section", { class: "node", "data-node": name, "aria-label": `node ${visible(name)}` }, body);
    return { root, body, keys: roving(root, "button[data-member]"), parts: new Map() };
  }

  drawCard(card, each, shown) {
    const { node, cores, gpus } = each;
    const focused = card.root.contains(document.activeElement) ? document.activeElement.dataset.place : null;
    setAttribute(card.root, "class", node.gone ? "node gone" : "node");
    const used = this.memoryOf(cores);
    const head = [visible(node.name), node.gone, this.isPresent ? node.watts : null, node.watts_origin];
    const pieces = (device) => [this.width, device.capacity, device.held, device.pieces.map((piece) => [piece, this.look(piece.id, shown)])];
    keep(card.body, [
      part(card, "head", head, () => h("div", { class: "node-head" }, h("h3", {}, head[0]), node.gone && h("span", { class: "pill bad" }, "gone"),
        head[2] !== null && h("span", { class: "soft figures" }, `${watts(node.watts)} (${node.watts_origin ?? "unavailable"})`))),
      node.note && part(card, "note", node.note, () => h("p", { class: "reading" }, visible(node.note))),
      part(card, "gauges", [node.gone, this.isPresent, node.cpu_use, used], () => h("div", {},
        this.isPresent && !node.gone && gauge("cores busy", node.cpu_use, cores.capacity, `${number(node.cpu_use)} of ${number(cores.capacity)}`),
        gpus.length === 0 && node.memory_gb && gauge("memory of members", used, node.memory_gb, `${memory(used * 2 ** 30)} of ${number(node.memory_gb)} GiB`))),
      cores.capacity + cores.pieces.length > 0 && part(card, "cores", pieces(cores), () => this.drawDevice("Cores", cores, shown, { place: "cores", unit: "core", perRow: PER_ROW })),
      gpus.length > 0 && part(card, "gpus", gpus.length, () => h("div", { class: "gpus" })),
    ]);
    if (gpus.length) {
      keep(card.parts.get("gpus").node, gpus.map((gpu, i) => {
        const box = part(card, `gpu ${gpu.gpu.id}`, Boolean(gpu.gpu.quarantined), () => h("div", { class: gpu.gpu.quarantined ? "gpu quarantined" : "gpu", "data-device": gpu.gpu.id }));
        keep(box, [
          part(card, `device ${gpu.gpu.id}`, pieces(gpu), () => this.drawDevice(`GPU ${i}`, gpu, shown, { place: gpu.gpu.id, unit: "GPU", perRow: 1 })),
          part(card, `state ${gpu.gpu.id}`, [gpu.gpu, this.isPresent, this.memoryOf(gpu)], () => this.drawState(gpu)),
        ]);
        return box;
      }));
    }
    card.keys.refresh();
    if (focused && document.activeElement.dataset.place !== focused) [...card.root.querySelectorAll("[data-place]")].find((piece) => piece.dataset.place === focused)?.focus();
  }

  memoryOf(device) {
    return device.pieces.reduce((sum, { id }) => sum + (this.store.members.get(id)?.memory_gb ?? 0), 0);
  }

  drawState(device) {
    const { gpu } = device;
    const own = this.memoryOf(device);
    const others = gpu.memory_gb !== null && gpu.free_gb !== null ? Math.max(0, gpu.memory_gb - gpu.free_gb) : 0;
    const said = `${number(own + others)} of ${number(gpu.memory_gb)} GiB`;
    const more = [others >= 0.05 && `${number(others)} GiB of others`, gpu.name, gpu.parent && `a slice of ${gpu.parent}`, this.isPresent && gpu.watts !== null && watts(gpu.watts)].filter(Boolean).map(visible).join(" · ");
    return h("div", {},
      gpu.memory_gb && gauge("memory", own + others, gpu.memory_gb, said),
      this.isPresent && gauge("utilization", gpu.use, 1, share(gpu.use)),
      more && h("p", { class: "soft" }, more),
      gpu.quarantined && h("p", { class: "bad" }, `quarantined: ${visible(gpu.quarantined)}`));
  }

  drawDevice(title, device, shown, { place, unit, perRow }) {
    const over = device.held > device.capacity + 1e-6 && device.capacity > 0;
    const said = over ? `${number(device.held)} asked for, of ${count(device.capacity, unit)}` : perRow === 1
      ? `${share(device.capacity > 0 ? device.held / device.capacity : 0)} reserved` : `${number(device.held)} of ${count(device.capacity, unit)} reserved`;
    let drawn = 0;
    const units = Math.min(perRow, Math.max(device.capacity, device.held));
    const room = perRow === 1 ? Math.min(165, this.width - 90) : Math.min(400, this.width) - 62;
    const rows = rowsOf(device, perRow).map((row) => h("div", { class: "device-row", style: { width: `${(100 * row.units) / units}%` } },
      row.units > 1 && h("span", { class: "core-lines", style: { "background-size": `${100 / row.units}% 100%` } }),
      row.pieces.map((piece) => (drawn += 1) <= MOST_PIECES && this.drawPiece(piece, (100 * piece.share) / row.units, (room * row.units) / units, shown, place)),
      row.free > 0 && h("span", { class: "free", "data-mark": "free", style: { width: `${(100 * row.free) / row.units}%` } })));
    return h("div", { class: "device", role: "group", "aria-label": `${title}, ${said}` },
      h("div", { class: "device-head" }, h("span", { class: "strong" }, title), h("span", { class: over ? "warn figures" : "soft figures" }, said)),
      rows, drawn > MOST_PIECES && h("p", { class: "reading" }, `${number(drawn - MOST_PIECES)} more; all of them as a table.`));
  }

  drawPiece({ id, starting }, percent, room, shown, place) {
    const { store } = this;
    const name = visible(id);
    const letters = Math.floor(((percent / 100) * room - 5) / LETTER);
    const text = [name, name.replace(/^member-/, "")].find((each) => each.length <= letters) ?? "";
    return h("button", {
      type: "button", class: `piece ${starting ? "starting" : ""} ${store.isPale(id) || !shown.has(id) ? "pale" : ""}`, "data-member": id, "data-place": `${place} ${id}`,
      "data-mark": "piece", "aria-pressed": String(store.selection.has(id)), "aria-label": `${name} on ${visible(place)}`, style: { width: `${percent}%`, background: store.colour(id), color: inkOn(store.colour(id)), "--stripe": inkOn(store.colour(id)) === "#fff" ? "rgb(0 0 0 / 30%)" : "rgb(255 255 255 / 45%)" },
    }, text);
  }

  point(node) {
    const id = node?.dataset.member ?? null;
    this.store.setHover(id);
    if (id === null) {
      this.tip.hide();
      return;
    }
    const member = this.store.members.get(id);
    const [box, outer] = [node.getBoundingClientRect(), this.holder.getBoundingClientRect()];
    const rate = member?.samples_per_s ? `, ${number(member.samples_per_s)} samples/s` : "";
    const asked = member?.shares ? [member.shares.cpus && `${number(member.shares.cpus)} cores`, member.shares.gpus && `${number(member.shares.gpus)} of a GPU`].filter(Boolean).join(" and ") : "";
    this.tip.show(box.left - outer.left + box.width / 2, box.top - outer.top, [
      id, `${member?.state ?? ""}${rate}`, asked && `asked for ${asked}${member.workers > 1 ? ` for each of ${member.workers} workers` : ""}`,
      member?.memory_gb ? memory(member.memory_gb * 2 ** 30) : null, hyperparameters(member?.params),
    ]);
  }

  tabulate() {
    const rows = [];
    for (const { node, cores, gpus } of this.nodes) {
      const devices = gpus.some((gpu) => gpu.pieces.length) ? gpus.map((gpu, i) => [`GPU ${i}`, gpu]) : [["cores", cores]];
      for (const [name, device] of devices) {
        for (const { id, share: part } of device.pieces) {
          const member = this.store.members.get(id);
          rows.push({ key: JSON.stringify([node.name, name, id]), member: id, cells: [visible(id), node.name, name, part, member?.memory_gb, member?.state ?? ""] });
        }
      }
    }
    return { caption: "Members and their places.", head: ["member", "node", "device", ["share", number], ["GiB", number], "state"], rows };
  }
}

/** A piece of a card, built anew only where what it shows has changed. */
function part(card, key, shown, build) {
  const signature = JSON.stringify(shown);
  const known = card.parts.get(key);
  if (known?.signature === signature) return known.node;
  const node = build();
  card.parts.set(key, { signature, node });
  return node;
}

/** Makes these nodes the children of a container; those that are there stay. */
function keep(container, nodes) {
  const wanted = nodes.filter(Boolean);
  for (const child of [...container.childNodes]) if (!wanted.includes(child)) child.remove();
  wanted.forEach((node, i) => container.childNodes[i] !== node && container.insertBefore(node, container.childNodes[i] ?? null));
}

function gauge(label, value, most, said) {
  if (value === null || value === undefined || !(most > 0)) return null;
  const part = Math.max(0, Math.min(1, value / most));
  return h("div", { class: "gauge" }, h("span", { class: "soft" }, label),
    h("span", { class: "gauge-bar", role: "meter", "aria-label": label, "aria-valuenow": part.toFixed(3), "aria-valuemin": "0", "aria-valuemax": "1", "aria-valuetext": said },
      h("span", { class: part > 0.97 ? "gauge-fill full" : "gauge-fill", style: { width: `${100 * part}%` } })),
    h("span", { class: "figures" }, said));
}
