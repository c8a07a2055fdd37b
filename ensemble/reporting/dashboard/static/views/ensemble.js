/** The view "Ensemble": the combined model against its members, calibration, confusions, uncertainty; all of it as the server made it. */

import { fill, h, setText } from "../dom.js";
import { visible } from "../format.js";
import { plainTable } from "../plain_table.js";
import { Tiles } from "../tiles.js";
import { confusionCard } from "./confusion.js";
import { Plots } from "./plots.js";

export const ensembleView = {
  id: "ensemble",
  title: "Ensemble",
  needs: ["quality"],
  shown: (store) => store.run !== null,
  mount: (root, page) => new EnsembleView(root, page),
};

class EnsembleView {
  constructor(root, page) {
    this.store = page.store;
    this.plots = new Plots(page, { document: "quality", names: () => this.store.quality.names });
    this.confusion = confusionCard();
    this.head = h("h2", { class: "first-head" }, "The combined model");
    this.note = h("p", { class: "reading", role: "status" });
    this.tiles = new Tiles(page);
    this.absent = h("p", { class: "absent" }, "The saved predictions are being compared.");
    this.tables = h("div", { class: "grid wrapping" });
    fill(root, this.head, this.note, this.tiles.root, this.absent, h("div", { class: "grid below" }, this.plots.root, this.confusion.root, this.tables));
  }

  update(changed) {
    const { quality } = this.store;
    if (quality === null) return;
    this.plots.update(changed);
    if (this.drawn === quality && !changed.has("view")) return;
    this.drawn = quality;
    setText(this.head, quality.title);
    setText(this.note, visible(quality.origin));
    setText(this.absent, visible(quality.missing ?? ""));
    this.absent.hidden = quality.missing === null;
    this.tiles.draw(quality.tiles);
    this.confusion.draw(quality.matrices);
    fill(this.tables, quality.tables.map((table) => h("div", { class: table.id === "models" ? null : "half" }, plainTable(table))));
  }

  close() {
    this.plots.close();
  }
}
