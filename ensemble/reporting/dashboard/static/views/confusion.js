/** The card of the confusion matrix: rows are true classes, columns predicted ones, the diagonal is right. */

import { card } from "../card.js";
import { fill, h, svg } from "../dom.js";
import { count, number, share, shorten, visible } from "../format.js";

const NUMBERED = 12; // classes in a matrix whose cells bear numbers
const LEFT = 128; // of the names of true classes
const LETTERS = 14; // of a name beside the cells
const TOP = 18; // above the matrix, where the names of its columns fit side by side
const TURNED = 100; // where they stand upright
const TRUE_PREDICTED = "true \\ predicted";

/** Builds the card: `root`, `draw(matrices)`. */
export function confusionCard() {
  let matrices = [];
  let chosen = "combined model";
  const choices = h("span", { class: "choices", role: "group", "aria-label": "model" });
  const self = card({ title: "Confusion of classes", controls: choices, table: () => tabulate(pick()) });
  const pick = () => matrices.find(({ of }) => of === chosen) ?? matrices[0];
  function draw(given) {
    if (given) matrices = given;
    self.root.hidden = matrices.length === 0;
    if (matrices.length === 0) return;
    const { of, names, cells } = pick();
    const button = (each) => h("button", { type: "button", class: "minor", "aria-pressed": String(each.of === of), onclick: () => { chosen = each.of; draw(); } }, each.of);
    fill(choices, matrices.length > 1 ? matrices.map(button) : []);
    const side = Math.max(14, Math.min(44, Math.floor(520 / names.length)));
    const wrong = cells.filter(([t, p]) => t !== p);
    const most = wrong.reduce((worst, cell) => (cell[2] > (worst?.[2] ?? 0) ? cell : worst), null);
    const worst = most ? ` Most often ${visible(names[most[0]])} is taken for ${visible(names[most[1]])}: ${count(most[2], "sample")}, ${share(most[3])} of the class.` : "";
    self.read(`Of the ${of}. A row is a true class, a column what it is predicted as; colour is the share of the true class, frames are right predictions.${worst}`);
    const shown = names.map((name) => shorten(visible(name), LETTERS));
    const isTurned = shown.some((name) => name.length * 7 > side);
    const top = isTurned ? TURNED : TOP;
    const marks = names.flatMap((_, i) => names.map((__, j) => cellOf(names, i, j, cells.find(([t, p]) => t === i && p === j))));
    const named = (i, place) => svg("text", place, svg("title", {}, visible(names[i])), shown[i]);
    const rows = names.map((_, i) => named(i, { "data-axis": "true", x: LEFT - 6, y: top + (i + 0.5) * side + 4, "text-anchor": "end" }));
    const middle = (j) => LEFT + (j + 0.5) * side;
    const columns = names.map((_, j) => named(j, { "data-axis": "predicted", ...(isTurned ? { transform: `translate(${middle(j) + 4} ${top - 6}) rotate(-90)` } : { x: middle(j), y: top - 6, "text-anchor": "middle" }) }));
    columns.push(svg("text", { x: LEFT - 6, y: top - 6, "text-anchor": "end" }, TRUE_PREDICTED));
    fill(self.body, grid({ many: names.length, side, top, cells: marks, label: `Confusion of ${names.length} classes`, heads: [columns, rows] }));
    self.update();
  }
  self.root.hidden = true;
  return { root: self.root, draw };
}

/** A square of cells `{ i, j, words, opacity, label, class }` in row `i` and column `j`, `side` px wide, `top` px below the figure's edge. */
function grid({ many, side, top, cells, label, heads }) {
  const [width, height] = [LEFT + many * side + 2, top + many * side + 2];
  const drawn = cells.map(({ i, j, words, opacity, label: text, class: kind }) => {
    const [x, y] = [LEFT + j * side, top + i * side];
    const isShown = many <= NUMBERED && text !== null;
    return svg("g", {}, svg("title", {}, words), svg("rect", { "data-mark": `${i},${j}`, class: kind, x, y, width: side - 1, height: side - 1, "fill-opacity": opacity }),
      isShown ? svg("text", { x: x + 0.5 * side, y: y + 0.5 * side + 4, "text-anchor": "middle", class: opacity > 0.5 ? "on-mark" : null }, text) : null);
  });
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, svg("svg", { class: "matrix confusion", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, heads, drawn));
}

function cellOf(names, i, j, cell) {
  const [many, part] = cell ? [cell[2], cell[3]] : [0, 0];
  const words = i === j ? `${visible(names[i])}: ${count(many, "sample")} right (${share(part)})` : `${visible(names[i])} taken for ${visible(names[j])}: ${count(many, "sample")} (${share(part)})`;
  return { i, j, words, opacity: part ? 0.08 + 0.8 * part : 0.02, label: many ? number(many) : null, class: i === j ? "right" : null };
}

/** The matrix as a table: names of classes on both axes. */
function tabulate({ names, cells }) {
  const at = new Map(cells.map(([t, p, many]) => [`${t},${p}`, many]));
  const head = [TRUE_PREDICTED, ...names.map((name) => [visible(name), number])];
  return { head, rows: names.map((name, i) => [visible(name), ...names.map((_, j) => at.get(`${i},${j}`) ?? 0)]) };
}
