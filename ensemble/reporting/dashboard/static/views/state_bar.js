/** A bar of members by state. */

import { h } from "../dom.js";
import { STATES } from "../store.js";

const ORDER = ["finished", "running", "moved", "placed", "measuring", "paused", "stopped", "interrupted", "pruned", "cancelled", "failed", "waiting"];

/** Members by state, as `[state, number]` in the order of the bar. */
export function inOrder(counts) {
  const known = (state) => (ORDER.includes(state) ? ORDER.indexOf(state) : ORDER.length);
  return Object.entries(counts).filter(([, many]) => many > 0).sort(([a], [b]) => known(a) - known(b));
}

/** The bar; its parts carry `data-mark="state"`. */
export function stateBar(counts) {
  const all = inOrder(counts);
  const label = all.map(([state, many]) => `${many} ${state}`).join(", ");
  const part = ([state, many]) => h("span", { "data-mark": "state", title: `${many} ${state}`, style: { "flex-grow": String(many), "background-color": STATES[state] ?? STATES.waiting } });
  return h("div", { class: "state-bar", role: "img", "aria-label": label || "no members" }, all.map(part));
}

/** The bar's legend. */
export function stateLegend(counts, open) {
  const item = ([state, many]) =>
    h("li", {}, h("button", { type: "button", class: "link", title: `Shows these members`, onclick: () => open(state) },
      h("span", { class: "dot", style: { "background-color": STATES[state] ?? STATES.waiting } }), `${many.toLocaleString("en-US")} ${state}`));
  return h("ul", { class: "state-legend" }, inOrder(counts).map(item));
}
