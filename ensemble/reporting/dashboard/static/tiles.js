/** Tiles with the main figures, side by side: `{ label, figure, note?, tone?, about?, link? }`, the texts as they are shown. */

import { fill, h, setAttribute, setText } from "./dom.js";
import { visible } from "./format.js";

/** Draws tiles of a page into `root`, so many in a row at most; those that are there stay. */
export class Tiles {
  constructor(page, most = 6) {
    this.most = most;
    this.page = page;
    this.root = h("dl", { class: "tiles", hidden: true });
    this.labels = null;
  }

  draw(tiles) {
    this.root.hidden = tiles.length === 0;
    const labels = JSON.stringify(tiles.map(({ label, about }) => [label, Boolean(about)]));
    if (labels !== this.labels) this.build(labels, tiles);
    tiles.forEach(({ figure, note, tone, about, link }, i) => {
      const [, value, said, more] = this.root.children[i].children;
      setText(value, visible(figure));
      setAttribute(said, "class", `note ${tone ?? ""}`);
      if (link == null) setText(said, visible(note ?? ""));
      else if (said.textContent !== visible(note)) fill(said, h("a", { href: this.page.link(...link) }, visible(note)));
      if (about) setText(more, visible(about));
    });
  }

  build(labels, tiles) {
    this.labels = labels;
    this.root.style.setProperty("--tiles", String(Math.ceil(tiles.length / Math.ceil(tiles.length / this.most)) || 1));
    fill(this.root, tiles.map(({ label, about }) =>
      h("div", { class: "tile", "data-mark": "tile" }, h("dt", {}, visible(label)), h("dd", { class: "figure" }), h("dd", {}), about && h("dd", { class: "note" }))));
  }
}
