/** The runs of a folder. */

import { fill, h } from "../dom.js";
import { ABSENT, cpu, duration, joules, moment, number, score, visible } from "../format.js";
import { stateBar } from "./state_bar.js";

function row(run) {
  const failed = run.counts?.failed ?? 0;
  const total = Object.values(run.counts ?? {}).reduce((sum, many) => sum + many, 0);
  return h("tr", { "data-mark": "run" },
    h("th", { scope: "row", class: "text" }, h("a", { href: `#overview?run=${encodeURIComponent(run.key)}` }, visible(run.name)), h("div", { class: "soft small" }, visible(run.dir))),
    h("td", { class: "text" }, h("span", { class: `pill ${run.state.tone}` }, run.state.word)),
    h("td", { class: "wide" }, stateBar(run.counts ?? {}), h("div", { class: "soft small" }, `${Math.round(100 * (run.done ?? 0))} %${failed ? `, ${failed} failed` : ""}`)),
    h("td", {}, number(total)),
    h("td", {}, run.best ? score(run.best.value) : ABSENT, h("div", { class: "soft small" }, run.best ? visible(run.objective ?? "") : "")),
    h("td", {}, run.used ? cpu(run.used.cpu_s) : ABSENT),
    h("td", {}, run.used ? joules(run.used.energy_j, run.used.energy_origin) : ABSENT),
    h("td", {}, moment(run.started)),
    h("td", {}, duration(run.wall_s)));
}

export const runsView = {
  id: "runs",
  title: "Runs",
  tab: false,
  needs: [],
  shown: () => true,
  mount(root, page) {
    return {
      update(changed) {
        if (!["runs", "view"].some((name) => changed.has(name))) return;
        if (page.runs.length === 0) {
          fill(root, h("p", { class: "absent" }, "No run is here yet. One that begins in this folder appears by itself."));
          return;
        }
        const newest = [...page.runs].sort((a, b) => (b.started ?? 0) - (a.started ?? 0));
        const head = ["run", "state", "progress", "members", "best", "CPU time", "energy", "started", "took"].map((title, i) => h("th", { scope: "col", class: i < 3 ? "text" : null }, title));
        fill(root, h("div", { class: "card scroll" }, h("table", { class: "runs" }, h("caption", { class: "unseen" }, "Runs"), h("thead", {}, h("tr", {}, head)), h("tbody", {}, newest.map(row)))));
      },
      close() {},
    };
  },
};
