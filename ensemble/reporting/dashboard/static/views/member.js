/** One member: how it stands, its curves, hyperparameters, attempts and log, and what can be done with it. */

import { memberButtons, verbsFor } from "../actions.js";
import { fill, h, setAttribute, setText } from "../dom.js";
import { ABSENT, clock, count, cpu, duration, joules, number, score, share, value, visible } from "../format.js";
import { LogTail } from "../log_tail.js";
import { longText } from "../long_text.js";
import { textOf } from "../plain_table.js";
import { STATES } from "../store.js";
import { Tiles } from "../tiles.js";
import { costOf } from "./member_columns.js";
import { CurvePanels } from "./curves.js";

export const memberView = {
  id: "member",
  title: "Member",
  tab: false,
  needs: ["curves", "tables"],
  renews: ["tables"],
  shown: () => true,
  mount: (root, page) => new MemberPage(root, page, page.route.member),
};

class MemberPage {
  constructor(root, page, id) {
    this.page = page;
    this.id = id;
    this.state = h("span", { class: "pill" });
    this.lead = h("p", { class: "lead" });
    this.buttons = h("div", { class: "buttons" });
    this.select = h("button", { type: "button", "aria-pressed": "false", onclick: () => page.store.toggle(id) }, "Select");
    const head = h("div", { class: "member-head" },
      h("div", { class: "title" }, h("h2", {}, h("span", { class: "dot large" }), visible(id ?? "")), this.state, h("div", { class: "tools" }, this.select, this.buttons)), this.lead);
    this.dot = head.querySelector(".dot");
    this.failure = h("section", { class: "card failure", "aria-label": "Why it failed", hidden: true });
    this.tiles = new Tiles(page, 7);
    const curves = h("section", { "aria-label": "Curves" });
    this.curves = new CurvePanels(curves, page, id);
    this.params = h("section", { class: "card half", "aria-label": "Hyperparameters" });
    this.attempts = h("section", { class: "card half", "aria-label": "Attempts" });
    this.measured = h("section", { class: "card", "aria-label": "Measured" });
    this.log = page.store.members.has(id) ? new LogTail(page, id) : null;
    this.body = h("div", { class: "grid" }, h("div", {}, this.tiles.root), curves, this.params, this.attempts, this.measured, this.log?.root);
    this.absent = h("p", { class: "absent", hidden: true }, "The run has no member of this name.");
    fill(root, h("p", { class: "crumb" }, h("a", { href: page.link("members") }, "← Members")), head, this.failure, this.absent, this.body);
  }

  update(changed) {
    const { store } = this.page;
    const member = store.members.get(this.id);
    this.absent.hidden = member !== undefined;
    this.body.hidden = member === undefined;
    if (member === undefined) return;
    const any = (...names) => names.some((name) => changed.has(name)) || changed.has("view") || changed.has("reset");
    if (any("members", "run", "selection")) this.drawHead(member);
    if (any("members", "cost", "curves")) this.drawTiles(member);
    if (any("members")) this.drawParams(member);
    if (any("spans", "clock")) this.drawAttempts();
    if (any("tables")) this.drawMeasured(store.tables);
    if (any("curves", "run", "selection", "hover")) this.curves.update(changed);
  }

  drawHead(member) {
    const { store } = this.page;
    this.dot.style.backgroundColor = store.colour(this.id);
    setText(this.state, member.state);
    this.state.style.setProperty("--state", STATES[member.state] ?? STATES.waiting);
    setAttribute(this.state, "class", `pill ${{ failed: "bad", finished: "good", pruned: "warn" }[member.state] ?? "soft"}`);
    setAttribute(this.select, "aria-pressed", store.selection.has(this.id) ? "true" : "false");
    setText(this.select, store.selection.has(this.id) ? "Selected" : "Select");
    this.drawLead(member);
    const verbs = verbsFor(this.page, member).join(" ");
    if (verbs !== this.verbs) {
      this.verbs = verbs;
      fill(this.buttons, memberButtons(this.page, [this.id]));
    }
    const failure = JSON.stringify([member.error, member.reason, member.advice]);
    if (failure === this.known) return;
    this.known = failure;
    this.failure.hidden = !member.error;
    const kind = member.reason ? ` (${visible(member.reason)})` : "";
    fill(this.failure, h("h3", { class: "bad" }, `Failed${kind}`), longText(member.error ?? "", "reason"),
      member.advice ? h("p", { class: "soft" }, visible(member.advice)) : null);
  }

  drawLead(member) {
    const parts = [member.place ? visible(member.place) : "no place", count(member.workers ?? 1, "worker"), member.options ? visible(member.options) : null];
    const text = parts.filter(Boolean).join(" · ");
    const from = member.lineage?.from;
    const key = `${text}|${from}`;
    if (key === this.leadKey) return;
    this.leadKey = key;
    const origin = from === undefined || from === null ? null : !/^member-\d+$/.test(from) ? ` · began with the weights of ${visible(from)}` : [member.lineage.whole ? " · goes on from " : " · clone of ", h("a", { href: this.page.link("member", { member: from }) }, visible(from)),
      member.lineage.whole ? ` after ${count(member.lineage.epoch ?? 0, "epoch")}` : member.lineage.warm ? `, with its weights${member.lineage.epoch === null ? "" : ` of epoch ${member.lineage.epoch}`}` : ", from scratch"];
    fill(this.lead, text, origin);
  }

  drawTiles(member) {
    const { store } = this.page;
    const cost = costOf(store);
    const best = store.best();
    const isBest = best === this.id;
    const against = best === null || isBest ? "" : `the best member, ${visible(best)}, has ${score(store.run.best.value)}`;
    const note = [isBest ? "the best member so far" : against, this.ownBest()].filter(Boolean).join("; ");
    const tiles = [
      [visible(store.run.objective ?? "metric"), score(member.metric), note, isBest ? "good" : ""],
      ["Epochs", `${number(member.epoch ?? 0)}${member.epochs === null ? "" : ` of ${number(member.epochs)}`}`, member.left_s === null ? (member.steps && member.state === "running" ? `step ${member.step ?? 0} of ${member.steps}` : "") : `about ${duration(member.left_s)} left`],
      ["Samples a second", number(member.samples_per_s), "while training"],
      ["Waits for samples", share(member.waited), `exchanging gradients ${share(member.synced)}`],
      ["CPU time", cpu(cost(this.id, "cpu_s")), `${cpu(cost(this.id, "full_cpu_s"))} with its share of all work`],
      [`Energy (${cost(this.id, "origin") ?? "unavailable"})`, joules(cost(this.id, "energy_j")), `${joules(cost(this.id, "full_energy_j"))} with its share of all work`],
      ["Attempts", number(member.attempts), member.failures ? `${member.failures} failed` : "none failed", member.failures ? "bad" : ""],
    ];
    this.tiles.draw(tiles.map(([label, figure, note, tone]) => ({ label, figure, note, tone })));
  }

  /** This member's best epoch by the objective, from its curve; null while that is not here. */
  ownBest() {
    const { curves, run } = this.page.store;
    const curve = curves !== null && Object.hasOwn(curves.members, this.id) ? curves.members[this.id] : null;
    let at = -1;
    const values = curve?.values[run.objective] ?? [];
    const isBetter = run.direction === "min" ? (a, b) => a < b : (a, b) => a > b;
    values.forEach((each, i) => each !== null && (at < 0 || isBetter(each, values[at])) && (at = i));
    return at < 0 ? null : `this one's best epoch: ${number(curve.epoch[at] + 1)}, with ${score(values[at])}`;
  }

  drawParams(member) {
    const best = this.page.store.members.get(this.page.store.best());
    const isBest = best === undefined || best.id === this.id;
    const key = JSON.stringify([member.params, isBest ? null : best.params]);
    if (key === this.paramsKey) return;
    this.paramsKey = key;
    const rows = Object.entries(member.params ?? {}).map(([name, given]) => {
      const other = best?.params?.[name];
      const differs = !isBest && JSON.stringify(other) !== JSON.stringify(given);
      return h("tr", { "data-mark": "param" }, h("th", { scope: "row", class: "text" }, visible(name)), h("td", { class: "text long" }, value(given)),
        isBest ? null : h("td", { class: `text long ${differs ? "" : "soft"}` }, differs ? value(other) : "the same"));
    });
    const head = h("tr", {}, h("th", { scope: "col", class: "text" }, "name"), h("th", { scope: "col", class: "text" }, "value"), isBest ? null : h("th", { scope: "col", class: "text" }, `best, ${visible(best.id)}`));
    fill(this.params, h("h3", {}, "Hyperparameters"), rows.length === 0 ? h("p", { class: "absent" }, "It has none.") : h("div", { class: "scroll" }, h("table", {}, h("caption", { class: "unseen" }, "Hyperparameters"), h("thead", {}, head), h("tbody", {}, rows))));
  }

  /** What the other places have no figure for. */
  drawMeasured(tables) {
    const own = tables?.members[this.id] ?? [];
    const known = own.map((cell, i) => [tables.columns[i], textOf(cell)]).filter(([, text]) => text !== "");
    this.measured.hidden = known.length === 0;
    fill(this.measured, h("h3", {}, "Measured"), h("dl", { class: "made" }, known.map(([{ title, about }, text]) => [h("dt", { title: about }, visible(title)), h("dd", {}, visible(text))])));
  }

  drawAttempts() {
    const { store } = this.page;
    const spans = store.spans.get(this.id) ?? [];
    const start = store.run.started ?? 0;
    const rows = spans.map(([attempt, node, devices, cohort, placed, started, ended, outcome]) =>
      h("tr", { "data-mark": "attempt" },
        h("td", { class: "text" }, String(attempt + 1)),
        h("td", { class: "text" }, visible([node, ...devices.filter((device) => device !== null)].filter(Boolean).join(", ")), cohort === null ? null : h("span", { class: "soft" }, ` group ${cohort}`)),
        h("td", {}, clock(placed - start)), h("td", {}, started === null ? ABSENT : duration(started - placed)),
        h("td", {}, duration((ended ?? store.now()) - (started ?? placed))),
        h("td", { class: `text ${outcome === "failed" ? "bad" : ""}` }, outcome)));
    const head = ["", "place", "placed at", "start-up", "trained", "outcome"].map((title, i) => h("th", { scope: "col", class: [0, 1, 5].includes(i) ? "text" : null }, title || h("span", { class: "unseen" }, "number")));
    fill(this.attempts, h("h3", {}, "Attempts"), rows.length === 0 ? h("p", { class: "absent" }, "It has not been placed yet.")
      : h("div", { class: "scroll" }, h("table", {}, h("caption", { class: "unseen" }, "Attempts"), h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows))));
  }

  close() {
    this.curves.close();
    this.log?.close();
  }
}
