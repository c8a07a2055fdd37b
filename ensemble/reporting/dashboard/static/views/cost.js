/** The view "Cost": what the run used, by role, and what it amounts to. What each member used is in the columns of the view "Members". */

import { fill, h } from "../dom.js";
import { visible } from "../format.js";
import { plainTable } from "../plain_table.js";
import { Tiles } from "../tiles.js";

const TILES = new Set(["cpu", "energy", "power", "wall"]);

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
    this.store = page.store;
    this.tiles = new Tiles(page);
    this.lines = h("section", { class: "card" });
    this.tables = h("div", { class: "below" });
    fill(root, this.tiles.root, h("div", { class: "grid below" }, this.lines), this.tables);
  }

  /** Draws one document, so that all figures on the screen are of one moment. */
  update() {
    const { tables } = this.store;
    if (tables === null || tables === this.drawn) return;
    this.drawn = tables;
    this.tiles.draw(tables.tiles.filter(({ key }) => TILES.has(key)));
    const row = ([label, text]) => [h("dt", {}, visible(label)), h("dd", {}, visible(text))];
    fill(this.lines, h("h3", {}, "In words"), h("dl", { class: "said" }, tables.lines.map(row)));
    fill(this.tables, tables.tables.map(plainTable), tables.missing.map((why) => h("p", { class: "absent" }, visible(why))));
  }

  close() {}
}
