/** Tables that are drawn as they stand in a document: `id`, `title`, `text`, `head`, `rows`. */

import { h } from "./dom.js";
import { number, visible } from "./format.js";

/** A table's title and text above what shows its rows. */
export function section(table, body) {
  return h("section", { class: "detail", "data-table": table.id, "aria-label": table.title },
    h("div", { class: "figure-head" }, h("h2", {}, visible(table.title))), table.text === "" ? null : h("p", { class: "reading" }, visible(table.text)), body);
}

/** A table with all its rows, in a card. */
export function plainTable(table) {
  const head = table.head.map(([title, kind]) => h("th", { scope: "col", class: kind }, visible(title)));
  const rows = table.rows.map((cells) => h("tr", { "data-mark": "row" }, cells.map((cell, i) => h("td", { class: table.head[i][1] }, visible(textOf(cell))))));
  const body = h("table", {}, h("caption", { class: "unseen" }, visible(table.title)), h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows));
  return section(table, h("div", { class: "card scroll" }, body));
}

/** What a cell shows: a text, a number as the page writes numbers, or the first of a text and what it is sorted by. */
export function textOf(cell) {
  if (cell === null) return "";
  if (Array.isArray(cell)) return cell[0];
  return typeof cell === "number" ? number(cell) : cell;
}
