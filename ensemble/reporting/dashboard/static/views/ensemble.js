/** The view "Ensemble": the combined model against its members, calibration, what each added member gains, disagreement. */

import { card } from "../card.js";
import { extent } from "../scales.js";
import { fill, h, setText } from "../dom.js";
import { byFigure, findFigure, intervalWords } from "../figures.js";
import { count, number, score, share, visible } from "../format.js";
import { plainTable } from "../plain_table.js";
import { HIGHLIGHT, NEUTRAL, SERIES } from "../store.js";
import { Tiles } from "../tiles.js";
import { confusionCard } from "./confusion.js";
import { disagreementCard } from "./matrix.js";
import { Plots } from "./task_plots.js";

const SHOWN = 30; // members beside the combined model
const COMPARED = 2; // figures that members are compared by
const ACCENT = SERIES[0];
const EXTRA = { stack: " A stack weighs each class of each member; these are their shares in all.", function: " The run's function sees all members alike." };

export const ensembleView = {
  id: "ensemble",
  title: "Ensemble",
  needs: ["quality"],
  shown: (store) => store.run !== null,
  mount: (root, page) => new EnsembleView(root, page),
};

class EnsembleView {
  constructor(root, page) {
    this.page = page;
    this.drawn = null;
    this.built = null;
    this.plots = new Plots(page, { document: "quality", names: () => this.quality.names });
    this.head = h("h2", { class: "first-head" });
    this.note = h("p", { class: "reading", role: "status" });
    this.tiles = new Tiles(page);
    this.absent = h("p", { class: "absent", hidden: true });
    this.grid = h("div", { class: "grid below" });
    fill(root, this.head, this.note, this.tiles.root, this.absent, this.grid);
  }

  /** The cards of a task; those of another one are taken down. */
  build({ task, figures }) {
    const compared = figures.slice(0, COMPARED);
    const key = JSON.stringify([task, compared]);
    if (key === this.built) return;
    this.built = key;
    this.compared = compared;
    this.versus = card({ title: "Combined model and members", table: () => this.tabulateMembers() });
    this.weights = card({ title: "Weights of the combination", width: "half", table: () => this.tabulateWeights() });
    this.matrix = disagreementCard(this.page);
    this.confusion = confusionCard(this.page);
    this.classTables = h("div", { class: "grid wrapping", hidden: true });
    this.tables = h("div", { class: "grid wrapping" });
    fill(this.grid, this.versus.root, this.plots.root, this.confusion.root, this.classTables, this.tables, this.weights.root, this.matrix.root);
  }

  close() {
    this.plots.close();
  }

  update(changed) {
    const { store } = this.page;
    const quality = store.quality;
    if (this.drawn === quality && this.drawn !== null && !changed.has("selection") && !changed.has("view") && !changed.has("run")) return;
    const isNew = this.drawn !== quality || changed.has("view");
    this.drawn = quality;
    this.quality = quality?.missing === null || quality?.missing === undefined ? quality : null;
    this.combination = this.quality?.combination ?? null;
    this.drawHead();
    if (quality === null) return this.explainAll("The saved predictions are being compared.");
    if (this.quality === null) return this.explainAll(quality.missing);
    this.build(quality);
    this.grid.hidden = false;
    this.absent.hidden = true;
    this.drawVersus();
    this.plots.draw();
    this.drawWeights();
    if (!isNew) return this.matrix.mark();
    this.matrix.draw(quality.disagreement, Object.keys(quality.members).length);
    this.confusion.draw(quality.classes?.matrices ?? []);
    fill(this.classTables, (quality.classes?.tables ?? []).map((table) => h("div", { class: "half" }, plainTable(table))));
    this.classTables.hidden = this.classTables.children.length === 0;
    fill(this.tables, quality.tables.map((table) => h("div", { class: "half" }, plainTable(table))));
    this.tables.hidden = quality.tables.length === 0;
  }

  /** One sentence in the place of all figures. */
  explainAll(reason) {
    this.grid.hidden = true;
    setText(this.absent, visible(reason));
    this.absent.hidden = false;
  }

  /** What the combined model is, in the words of the server; what it would be, where the run has none yet. */
  drawHead() {
    const { quality } = this.page.store;
    setText(this.head, quality?.title ?? "The combined model");
    setText(this.note, visible(quality?.origin ?? ""));
    this.tiles.draw(quality?.tiles ?? []);
  }

  drawVersus() {
    const { members, combined, split, intervals, best } = this.quality;
    const measured = this.rankMembers().filter((id) => this.compared.some(({ name }) => Number.isFinite(members[id][name])));
    const shown = measured.slice(0, SHOWN);
    const left = measured.length - shown.length;
    const whiskers = intervals?.ensemble ? " A bar is the 95 % interval of the figure (bootstrap over samples)." : "";
    this.versus.explain(null);
    this.versus.read(`Each dot is a model; the line is the combined one. The axes do not begin at 0.${whiskers} "Best" is the member with the best objective on validation; on the ${split === "valid" ? "validation" : visible(split)} samples measured here another may be better.${left > 0 ? ` The best ${SHOWN} members by ${visible(this.compared[0]?.label ?? "")}; ${left} more in the table.` : ""}`);
    if (this.compared.length === 0) return this.versus.explain("No figure of this task follows from saved predictions alone: declare Recipe.split_metrics.");
    const blocks = this.compared.map((figure) => {
      const metric = figure.name;
      const spans = { combined: intervals?.ensemble?.[metric], best: intervals?.best?.[metric] };
      const values = [...shown.map((id) => members[id][metric]), combined?.[metric], ...(spans.combined ?? []), ...(spans.best ?? [])].filter(Number.isFinite);
      const [low, high] = extent(values);
      const span = high - low || Math.abs(high) || 1;
      const at = (given) => 4 + (92 * (given - low)) / span;
      const rows = shown.map((id) => this.dotRow(id, members[id][metric], combined?.[metric], at, id === best ? spans.best : undefined));
      if (combined) rows.unshift(dotRow("combined", combined[metric], combined[metric], at, "combined", HIGHLIGHT, spans.combined));
      const title = visible(figure.title);
      return h("div", { class: "dots", role: "list", "aria-label": title, "data-metric": metric }, h("p", { class: "dots-title" }, title), rows);
    });
    fill(this.versus.body, h("div", { class: "dot-blocks" }, blocks));
    this.versus.update();
  }

  rankMembers() {
    const { members } = this.quality;
    const orders = this.compared.map((figure) => [figure.name, byFigure(figure)]);
    return Object.keys(members).sort((a, b) => orders.reduce((found, [name, order]) => found || order(members[a][name], members[b][name]), 0));
  }

  dotRow(id, given, combined, at, span) {
    const { store } = this.page;
    const colour = store.selection.has(id) ? store.colour(id) : id === this.quality.best ? ACCENT : NEUTRAL;
    const button = h("button", { type: "button", class: "name-button", "aria-pressed": String(store.selection.has(id)), title: visible(id), onclick: () => store.toggle(id) }, visible(id));
    const row = dotRow(button, given, combined, at, id === this.quality.best ? "best" : "", colour, span);
    row.setAttribute("data-member", id);
    row.classList.toggle("pale", store.isPale(id));
    return row;
  }

  drawWeights() {
    const weights = Object.entries(this.combination?.weights ?? {}).sort((a, b) => b[1] - a[1]);
    if (weights.length === 0) {
      this.weights.explain(this.combination?.reason ? visible(this.combination.reason) : "No members have been combined.");
      return;
    }
    this.weights.explain(null);
    const most = weights[0][1];
    const { store } = this.page;
    const rows = weights.slice(0, SHOWN).map(([id, part]) => h("div", { class: `bar-row ${store.isPale(id) ? "pale" : ""}`, "data-member": id },
      h("button", { type: "button", class: "name-button", "aria-pressed": String(store.selection.has(id)), title: visible(id), onclick: () => store.toggle(id) }, visible(id)),
      h("span", { class: "bar-track" }, h("span", { class: "part", style: { width: `${(100 * part) / most}%`, background: HIGHLIGHT } })),
      h("span", { class: "bar-value figures" }, share(part))));
    const extra = EXTRA[this.combination.method] ?? "";
    this.weights.read(`Share of each member in the combined model (${this.combination.method}).${extra}${weights.length > SHOWN ? ` The ${SHOWN} largest of ${weights.length}.` : ""}`);
    fill(this.weights.body, rows);
    this.weights.update();
  }

  tabulateMembers() {
    const { members, combined, intervals, figures } = this.quality;
    const names = figures.filter(({ name }) => [combined, ...Object.values(members)].some((each) => Number.isFinite(each?.[name])));
    const weights = this.combination?.weights ?? {};
    const row = (name, metrics, weight) => [name, ...names.map((each) => metrics[each.name]), weight];
    const rows = this.rankMembers().map((id) => row(visible(id), members[id], Object.hasOwn(weights, id) ? weights[id] : undefined));
    const spans = [["ensemble", "combined"], ["best", visible(this.quality.best)], ["difference", "combined less the best"]].filter(([which]) => intervals?.[which])
      .map(([which, name]) => [`${name}, 95 % interval`, ...names.map((each) => intervalWords(intervals[which][each.name]) || null), null]);
    return { head: ["model", ...names.map((each) => [visible(each.label), score]), ["weight", share]], rows: [...(combined ? [row("combined", combined)] : []), ...spans, ...rows] };
  }

  tabulateWeights() {
    const rows = Object.entries(this.combination.weights).sort((a, b) => b[1] - a[1]).map(([id, part]) => [visible(id), part]);
    return { head: ["member", ["weight", share]], rows };
  }
}

function dotRow(name, given, combined, at, tag, colour, span) {
  const marks = [Number.isFinite(combined) ? h("span", { class: "dot-line", style: { left: `${at(combined)}%` } }) : null];
  if (span) marks.push(h("span", { class: "dot-span", title: `95 %: ${intervalWords(span)}`, style: { left: `${at(span[0])}%`, width: `${at(span[1]) - at(span[0])}%`, color: colour } }));
  if (Number.isFinite(given)) marks.push(h("span", { class: `dot-mark ${tag === "combined" ? "big" : ""}`, style: { left: `${at(given)}%`, background: colour } }));
  return h("div", { class: "dot-row", role: "listitem" },
    h("span", { class: "dot-name" }, name, tag === "best" ? h("span", { class: "tag", title: "best on validation" }, "best") : null), h("span", { class: "dot-track" }, marks), h("span", { class: "bar-value figures" }, score(given)));
}
