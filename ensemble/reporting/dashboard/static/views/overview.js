/** How the run stands, what it has used, what limits it. */

import { runButtons } from "../actions.js";
import { fill, h, setAttribute, setText } from "../dom.js";
import { compareToBest, findFigure } from "../figures.js";
import { ABSENT, count, cpu, duration, joules, number, score, share, visible, watts } from "../format.js";
import { longText } from "../long_text.js";
import { noticeList } from "./notices.js";
import { bestSoFar, stepChart } from "./step_chart.js";
import { stateBar, stateLegend } from "./state_bar.js";

const LAST_NOTICES = 6;
const MOST_IN_ROW = 6; // tiles in a row
const CHART_EVERY_MS = 1000;

export const overviewView = {
  id: "overview",
  title: "Overview",
  needs: ["curves", "quality"],
  shown: () => true,
  mount(root, page) {
    return new Overview(root, page);
  },
};

class Overview {
  constructor(root, page) {
    this.page = page;
    this.chartAt = -CHART_EVERY_MS;
    this.percent = h("span", { class: "figure" });
    this.left = h("span", { class: "soft" });
    this.buttons = h("div", { class: "buttons" });
    this.bar = h("div", {});
    this.legend = h("div", {});
    const progress = h("section", { class: "card progress", "aria-label": "Progress" },
      h("div", { class: "progress-head" }, this.percent, this.left, this.buttons), this.bar, this.legend);
    this.tiles = h("dl", { class: "tiles" });
    this.cells = new Map();
    this.facts = h("dl", { class: "facts" });
    this.limits = h("section", { class: "card rest", "aria-label": "What limits the run" }, h("h3", {}, "What limits the run"), this.facts);
    this.chart = stepChart();
    const best = h("section", { class: "card most", "aria-label": "Best so far" }, this.chart.root);
    this.notices = h("section", { class: "card", "aria-label": "Last notices" });
    fill(root, h("div", { class: "grid" }, h("div", {}, progress), h("div", {}, this.tiles), best, this.limits, this.notices));
  }

  update(changed) {
    const { store } = this.page;
    const any = (...names) => names.some((name) => changed.has(name)) || changed.has("view") || changed.has("reset");
    if (any("run", "clock", "members")) this.drawProgress(store);
    if (any("run", "quality", "clock", "members")) this.drawTiles(store);
    if (any("run")) this.drawFacts(store);
    if (any("curves", "run")) this.drawChart(store);
    if (any("notices")) this.drawNotices(store);
  }

  drawProgress({ run }) {
    const done = run.done ?? 0; // rounded down: not 100 % before its end
    setText(this.percent, `${done < 0.01 ? share(done) : `${Math.floor(100 * done)} %`} done`);
    const left = run.ended !== null ? `in ${duration(run.wall_s)}` : run.left_s === null || run.driver ? "" : `about ${duration(run.left_s)} left`;
    setText(this.left, left);
    const counts = JSON.stringify(run.counts);
    if (counts !== this.counts) {
      this.counts = counts;
      fill(this.bar, stateBar(run.counts));
      fill(this.legend, stateLegend(run.counts, (state) => this.page.go("members", { filter: `state:${state}` })));
    }
    const actions = run.actions.join(" ");
    if (actions === this.actions) return;
    this.actions = actions;
    fill(this.buttons, runButtons(this.page));
  }

  drawTiles(store) {
    const tiles = [...qualityTiles(store, this.page), ...useTiles(store)].filter(Boolean);
    const order = tiles.map(([label]) => label).join("|");
    if (order !== this.order) {
      this.order = order;
      this.tiles.style.setProperty("--tiles", String(Math.ceil(tiles.length / Math.ceil(tiles.length / MOST_IN_ROW))));
      this.cells = new Map(tiles.map(([label]) => [label, { value: h("dd", { class: "figure" }), note: h("dd", {}) }]));
      fill(this.tiles, tiles.map(([label]) => h("div", { class: "tile", "data-mark": "tile" }, h("dt", {}, label), this.cells.get(label).value, this.cells.get(label).note)));
    }
    for (const [label, value, note, tone, href] of tiles) {
      const cell = this.cells.get(label);
      setText(cell.value, value);
      setAttribute(cell.note, "class", `note ${tone ?? ""}`);
      if (!href) setText(cell.note, note ?? "");
      else if (cell.note.textContent !== note) fill(cell.note, h("a", { href }, note));
    }
  }

  drawFacts({ run }) {
    const facts = JSON.stringify(run.facts);
    if (facts === this.known) return;
    this.known = facts;
    const items = run.facts.map((fact) => h("div", { "data-mark": "fact" }, h("dt", {}, visible(fact.label)), h("dd", { class: fact.tone || null }, longText(fact.text))));
    fill(this.facts, items.length ? items : h("p", { class: "absent" }, "Nothing is known to hold it up."));
  }

  drawChart(store) {
    const now = performance.now();
    if (now - this.chartAt < CHART_EVERY_MS && store.run.ended === null && !store.run.driver && this.chartOf === (store.curves !== null)) return;
    this.chartAt = now;
    this.chartOf = store.curves !== null;
    this.chart.draw(bestSoFar(store), store.run);
  }

  drawNotices({ notices }) {
    this.notices.hidden = notices.length === 0;
    if (notices.length === 0) return;
    const more = notices.length > LAST_NOTICES ? h("p", { class: "after" }, h("a", { href: this.page.link("notices") }, `All ${count(notices.length, "notice")}`)) : null;
    fill(this.notices, h("h3", {}, "Notices"), noticeList(notices.slice(-LAST_NOTICES).reverse()), more);
  }

  close() {}
}

function qualityTiles(store, page) {
  const { run } = store;
  const total = Object.values(run.counts).reduce((sum, many) => sum + many, 0);
  const failed = run.counts.failed ?? 0;
  const name = visible(run.objective ?? "metric");
  const best = run.best;
  return [
    ["Members finished", `${number(run.counts.finished ?? 0)} of ${number(total)}`, failed ? `${failed} failed` : "none failed", failed ? "bad" : "",
      failed ? page.link("members", { filter: "state:failed" }) : null],
    [`Best ${name}${run.ended === null ? " so far" : ""}, ${splitWords("valid")}`, score(best?.value), best ? visible(best.member) : "no epoch has ended yet", "", best ? page.link("member", { member: best.member }) : null],
    combinedTile(store),
  ];
}

/** The combined model: the run's own once it has one, else what the members finished so far would be. */
export function combinedTile({ run, quality }) {
  const own = run.combined?.metrics?.ensemble;
  const metrics = own ?? quality?.combined;
  if (metrics === null || metrics === undefined) return ["Combined", ABSENT, visible(quality?.missing ?? "not before members have finished")];
  const figures = own ? run.figures : quality.figures;
  const key = metrics[run.objective] !== undefined ? run.objective : Object.keys(metrics)[0];
  if (key === undefined) return ["Combined", ABSENT, "no figure of it is known"];
  const best = own ? run.combined.metrics.best?.[key] : quality.members?.[quality.best]?.[key];
  const figure = findFigure(figures, key);
  const split = own ? run.combined.split : quality.split;
  const label = `Combined ${visible(figure.label)}${own ? "" : " so far"}${split ? `, ${splitWords(split)}` : ""}`;
  const used = Object.entries((own ? run.combined : quality.combination)?.weights ?? {}).filter(([, weight]) => weight > 0);
  if (used.length === 1) return [label, score(metrics[key]), `${visible(used[0][0])} alone: no other member is part of it`, ""];
  const [words, tone] = compareToBest(figure, metrics[key], best, own ? run.combined.noise : null);
  return [label, score(metrics[key]), Number.isFinite(best) ? `${words}, which has ${score(best)} there` : words, tone];
}

/** Where figures were measured, in words: tiles side by side may be of different samples. */
function splitWords(split) {
  return `on ${split === "valid" ? "validation" : visible(split)}`;
}

function useTiles({ run }) {
  const { totals } = run;
  const isOpen = run.ended === null;
  const nodes = typeof totals.node_energy_j === "number" ? `of ${joules(totals.node_energy_j)} for the whole of the nodes` : null;
  const spent = [nodes, totals.mean_w ? `${watts(totals.mean_w)} on average` : null].filter(Boolean).join(", ");
  return [
    ["Reuse of prepared samples", typeof totals.reuse === "number" ? `${totals.reuse.toFixed(2)}×` : ABSENT, `${number(totals.consumed)} consumed of ${number(totals.prepared)} prepared`],
    ["CPU time (measured)", cpu(totals.cpu_s), isOpen && run.wall_s ? `${number(totals.cpu_s / run.wall_s)} cores on average` : "in all"],
    [`Energy (${totals.energy_origin ?? "unavailable"})`, joules(totals.energy_j), spent],
    isOpen ? [`Power now (${totals.watts_origin ?? "unavailable"})`, watts(totals.watts), "all nodes"] : ["Wall time", duration(run.wall_s), "in all"],
    isOpen ? ["Samples a second", number(totals.samples_per_s), "all running members, while training: without validation"] : null,
    ["Models a minute", number(totals.models_per_minute), run.facts.find((fact) => /^models$/i.test(fact.label))?.text ?? "finished and pruned, from the first start to the last end"],
  ];
}
