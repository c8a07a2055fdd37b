/** The view "Search": importances of hyperparameters, and the server's figures of the trials. */

import { card } from "../card.js";
import { fill, h } from "../dom.js";
import { share, value } from "../format.js";
import { HIGHLIGHT } from "../store.js";
import { Plots } from "./plots.js";

export const searchView = {
  id: "search",
  title: "Search",
  needs: ["importances"],
  shown: (store) => store.run !== null && store.members.size > 1 && (store.run.mode === "search" || store.run.varied.length > 0),
  mount: (root, page) => new SearchView(root, page),
};

class SearchView {
  constructor(root, page) {
    this.store = page.store;
    this.importances = card({ title: "Importance of hyperparameters", table: () => this.tabulate() });
    this.plots = new Plots(page, { document: "importances", isPale: (id) => page.store.isPale(id) || !page.store.visible().includes(id) });
    fill(root, h("div", { class: "grid" }, this.importances.root), h("div", { class: "below" }, this.plots.root));
  }

  update(changed) {
    if (this.drawn !== this.store.importances || changed.has("view")) this.drawImportances();
    this.plots.update(changed);
  }

  drawImportances() {
    const document = (this.drawn = this.store.importances);
    const missing = document === null ? "They are being computed." : document.missing;
    this.importances.explain(missing);
    if (missing !== null) return;
    const most = Math.max(...document.importances.map(([, , , high]) => high), 1e-9);
    const percent = (part) => `${(100 * part) / most}%`;
    const row = ([name, part, low, high]) => h("div", { class: "bar-row", "data-mark": name },
      h("span", { class: "bar-name", title: value(name) }, value(name)),
      h("span", { class: "bar-track" }, h("span", { class: "part", style: { width: percent(part), background: "var(--accent)" } }),
        high > low && h("span", { class: "dot-span", title: `${share(low)} … ${share(high)}`, style: { left: percent(low), width: percent(high - low), color: HIGHLIGHT } })),
      h("span", { class: "bar-value figures" }, share(part)));
    this.importances.read(document.method);
    fill(this.importances.body, document.importances.map(row));
    this.importances.update();
  }

  tabulate() {
    return { head: ["hyperparameter", ["importance", share], ["lowest", share], ["highest", share]], rows: this.store.importances.importances.map(([name, ...parts]) => [value(name), ...parts]) };
  }

  close() {
    this.plots.close();
  }
}
