/** The page's help: its keys and the language of the filter. */

import { openDialog } from "./dialog.js";
import { h } from "./dom.js";

const KEYS = [
  ["/", "the filter"],
  ["Esc", "clears the filter while you type in it, otherwise the selection"],
  ["↑ ↓ Home End", "another row of the table"],
  ["Space", "selects the row's member, as a click does; Shift and a click select all members in between"],
  ["Enter", "opens the member's page"],
  ["?", "this help"],
];
const FILTERS = [
  ["cnn", "the name, the state, the place or a hyperparameter contains the text"],
  ["state:failed,paused", "the value contains one of the texts"],
  ["lr<0.1", "compares a number: < <= > >= = !="],
  ["-state:finished", "leaves out those for which the term holds"],
  ["accuracy>0.9 width=64", "several terms, with blanks between them, must all hold"],
  ['"two words"', "quotes keep blanks together"],
];

function list(rows) {
  return h("dl", { class: "key-help" }, rows.map(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)]));
}

function viewKeys(views) {
  const named = views.map((view, i) => `${i < 10 ? (i + 1) % 10 : "no key"}: ${view.title}`);
  return views.length === 0 ? [] : [["1 … 9, 0", named.join(", ")]];
}

/** Opens the help; `views`: those that have a tab, in their order. */
export function openHelp(views) {
  openDialog({
    title: "Keys and filter",
    body: [
      list([...viewKeys(views), ...KEYS]), h("h3", {}, "The filter"), list(FILTERS),
      h("p", { class: "soft after" }, "The name on the left of a comparison is a column (state, epoch, metric, node, place, cohort, attempts, waited, left_s …), a hyperparameter or a metric."),
    ],
  });
}
