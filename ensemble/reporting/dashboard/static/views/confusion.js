/** The card of the confusion matrix: rows are true classes, columns predicted ones, the diagonal is right. */

import { card } from "../card.js";
import { fill, h, svg } from "../dom.js";
import { count, number, share, shorten, visible } from "../format.js";
import { grid, LEFT, LETTERS } from "./matrix.js";

const TOP = 18; // above the matrix, where the names of its columns fit side by side
const TURNED = 100; // where they stand upright
const TRUE_PREDICTED = "true \\ predicted";
const NAMES = { combined: "combined model", best: "best member" };

/** Builds the card: `root`, `draw(matrices)`. A cell of a live page leads to its samples. */
export function confusionCard(page) {
  let matrices = [];
  let chosen = "combined";
  const choices = h("span", { class: "choices", role: "group", "aria-label": "model" });
  const self = card({ title: "Confusion of classes", controls: choices, table: () => tabulate(pick()) });
  const pick = () => matrices.find(({ of }) => of === chosen) ?? matrices[0];
  function draw(given) {
    if (given) matrices = given;
    self.root.hidden = matrices.length === 0;
    if (matrices.length === 0) return;
    const { of, names, cells } = pick();
    const button = (each) => h("button", { type: "button", class: "minor", "aria-pressed": String(each.of === of), onclick: () => { chosen = each.of; draw(); } }, NAMES[each.of]);
    fill(choices, matrices.length > 1 ? matrices.map(button) : []);
    const side = Math.max(14, Math.min(44, Math.floor(520 / names.length)));
    const wrong = cells.filter(([t, p]) => t !== p);
    const most = wrong.reduce((worst, cell) => (cell[2] > (worst?.[2] ?? 0) ? cell : worst), null);
    const worst = most ? ` Most often ${visible(names[most[0]])} is taken for ${visible(names[most[1]])}: ${count(most[2], "sample")}, ${share(most[3])} of the class.` : "";
    self.read(`Of the ${NAMES[of]}. A row is a true class, a column what it is predicted as; colour is the share of the true class, frames are right predictions.${worst}`);
    const shown = names.map((name) => shorten(visible(name), LETTERS));
    const isTurned = shown.some((name) => name.length * 7 > side);
    const top = isTurned ? TURNED : TOP;
    const link = (i, j) => (page.store.isLive ? page.link("samples", { set: new Map(Object.entries({ of, true: String(i), predicted: String(j) })) }) : null);
    const marks = names.flatMap((_, i) => names.map((__, j) => cellOf(names, i, j, cells.find(([t, p]) => t === i && p === j), link(i, j))));
    const named = (i, place) => svg("text", place, svg("title", {}, visible(names[i])), shown[i]);
    const rows = names.map((_, i) => named(i, { "data-axis": "true", x: LEFT - 6, y: top + (i + 0.5) * side + 4, "text-anchor": "end" }));
    const middle = (j) => LEFT + (j + 0.5) * side;
    const columns = names.map((_, j) => named(j, { "data-axis": "predicted", ...(isTurned ? { transform: `translate(${middle(j) + 4} ${top - 6}) rotate(-90)` } : { x: middle(j), y: top - 6, "text-anchor": "middle" }) }));
    columns.push(svg("text", { x: LEFT - 6, y: top - 6, "text-anchor": "end" }, TRUE_PREDICTED));
    fill(self.body, grid({ many: names.length, side, top, cells: marks, label: `Confusion of ${names.length} classes`, role: page.store.isLive ? "group" : "img", kind: "confusion" }, columns, rows));
    self.update();
  }
  self.root.hidden = true;
  return { root: self.root, draw };
}

function cellOf(names, i, j, cell, href) {
  const [many, part] = cell ? [cell[2], cell[3]] : [0, 0];
  const words = i === j ? `${visible(names[i])}: ${count(many, "sample")} right (${share(part)})` : `${visible(names[i])} taken for ${visible(names[j])}: ${count(many, "sample")} (${share(part)})`;
  return { i, j, words, opacity: part ? 0.08 + 0.8 * part : 0.02, label: many ? number(many) : null, class: i === j ? "right" : null, href: many ? href : null };
}

/** The matrix as a table: names of classes on both axes. */
export function tabulate({ names, cells }) {
  const at = new Map(cells.map(([t, p, many]) => [`${t},${p}`, many]));
  const head = [TRUE_PREDICTED, ...names.map((name) => [visible(name), number])];
  return { head, rows: names.map((name, i) => [visible(name), ...names.map((_, j) => at.get(`${i},${j}`) ?? 0)]) };
}
