/** Texts of any length: the first lines of a long one, all of it behind "more". */

import { h } from "./dom.js";
import { visible } from "./format.js";

const LONG = 400; // characters

/** A text as an element; of a long one the first lines are shown, the whole on demand. */
export function longText(text, kind = null) {
  const shown = visible(text);
  if (shown.length <= LONG) return h("span", { class: kind }, shown);
  const all = h("span", { class: `clamped ${kind ?? ""}` }, shown);
  const more = h("button", { type: "button", class: "link more", "aria-expanded": "false", onclick: () => turn() }, "more");
  function turn() {
    const isOpen = !all.classList.toggle("clamped");
    more.setAttribute("aria-expanded", String(isOpen));
    more.textContent = isOpen ? "less" : "more";
  }
  return h("span", { class: "long-text" }, all, more);
}
