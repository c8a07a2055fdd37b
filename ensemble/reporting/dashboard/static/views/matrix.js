/** The card of the disagreement between members: a matrix whose strongest cells are the pairs that differ most. */

import { card } from "../card.js";
import { fill, h, svg } from "../dom.js";
import { score, share, shorten, visible } from "../format.js";

const NUMBERED = 12; // members or classes in a matrix whose cells bear numbers
const TOP = 18; // above the cells
export const LEFT = 128;
export const LETTERS = 14; // of a name beside the cells

/** Builds the card: `root`, `draw(disagreement, total)`, `mark()` where the selection has changed. */
export function disagreementCard(page) {
  let found = null;
  const self = card({ title: "Disagreement of members", width: "half", table: () => tabulate(found) });
  const { store } = page;
  function mark() {
    for (const head of self.body.querySelectorAll(".matrix-head")) {
      const isChosen = store.selection.has(head.getAttribute("data-member"));
      head.classList.toggle("chosen", isChosen);
      head.setAttribute("aria-pressed", String(isChosen));
    }
  }
  function draw(disagreement, total) {
    found = disagreement;
    if (!found || found.members.length < 2) {
      self.explain("It needs two members with saved predictions.");
      return;
    }
    self.explain(null);
    const { members, matrix } = found;
    const most = Math.max(...matrix.flat(), 1e-9);
    self.read(`${found.reading} Members that differ gain more together. The strongest colour is ${shown(found, most)}.${total > members.length ? ` The best ${members.length} of ${total} members.` : ""}`);
    const side = Math.max(11, Math.min(34, Math.floor(420 / members.length)));
    const words = (i, j, part) => (i === j ? visible(members[i]) : `${visible(members[i])} and ${visible(members[j])}: ${shown(found, part)}`);
    const number = (i, j, part) => (i !== j && found.unit === "share" ? (100 * part).toFixed(part < 0.0995 ? 1 : 0) : null);
    const cells = matrix.flatMap((row, i) => row.map((part, j) => ({ i, j, words: words(i, j, part), label: number(i, j, part), opacity: i === j ? 0 : 0.06 + 0.8 * (part / most) })));
    const heads = members.map((id, i) => head(page, id, i, side));
    const ranks = members.map((_, j) => (side < 16 && j % 5 ? null : svg("text", { x: LEFT + (j + 0.5) * side, y: 12, "text-anchor": "middle" }, j + 1)));
    fill(self.body, grid({ many: members.length, side, top: TOP, cells, label: `Disagreement of ${members.length} members`, role: "group" }, ranks, heads));
    mark();
    self.update();
  }
  return { root: self.root, draw, mark };
}

/**
 * A square of cells `{ i, j, words, opacity, label, class, href }` in row `i` and column `j`, `side` px wide, `top` px below the figure's edge and
 * `LEFT` beside it; `heads` are drawn before them. The labels are shown where the cells are few.
 */
export function grid({ many, side, top, cells, label, role, kind = "" }, ...heads) {
  const [width, height] = [LEFT + many * side + 2, top + many * side + 2];
  const drawn = cells.map(({ i, j, words, opacity, label: text, class: name, href }) => {
    const [x, y] = [LEFT + j * side, top + i * side];
    const isShown = many <= NUMBERED && text !== null;
    return svg(href ? "a" : "g", { href }, svg("title", {}, words), svg("rect", { "data-mark": `${i},${j}`, class: name, x, y, width: side - 1, height: side - 1, "fill-opacity": opacity }),
      isShown ? svg("text", { x: x + 0.5 * side, y: y + 0.5 * side + 4, "text-anchor": "middle", class: opacity > 0.5 ? "on-mark" : null }, text) : null);
  });
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, svg("svg", { class: `matrix ${kind}`, width, height, viewBox: `0 0 ${width} ${height}`, role, "aria-label": label }, heads, drawn));
}

function head(page, id, i, side) {
  const choose = () => page.store.toggle(id);
  const press = (event) => (event.key === "Enter" || event.key === " ") && (event.preventDefault(), choose());
  const name = visible(id);
  return svg("text", {
    x: LEFT - 6, y: 22 + (i + 0.5) * side, "text-anchor": "end", class: "matrix-head", "data-member": id, tabindex: "0", role: "button", onclick: choose, onkeydown: press,
  }, svg("title", {}, name), `${shorten(name, LETTERS)} ${i + 1}`);
}

function tabulate(found) {
  const { members, matrix } = found;
  const head = ["member", ...members.map((_, i) => [String(i + 1), (part) => shown(found, part)])];
  return { head, rows: members.map((id, i) => [`${i + 1} ${visible(id)}`, ...matrix[i].map((part, j) => (i === j ? null : part))]) };
}

function shown({ unit }, part) {
  return unit === "share" ? share(part) : score(part);
}
