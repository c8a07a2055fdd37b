/** What is printed: all views of a run, one below the other, light and in the width of a sheet. */

import { fill, h } from "./dom.js";

const SECTIONS = [
  "view", "run", "members", "spans", "nodes", "streams", "notices", "cost", "curves", "quality", "importances", "tables",
];

/** Puts all views with a tab in the place of the shown one; returns what takes them away again. */
export function layOutForPrint(page) {
  const root = document.documentElement;
  const theme = root.getAttribute("data-theme");
  root.setAttribute("data-theme", "light");
  const sheet = h("div", { class: "sheets", "data-view": "print" });
  const app = document.getElementById("app");
  app.classList.add("printing");
  app.appendChild(sheet);
  const mounted = page.views.filter((view) => view.tab !== false && view.print !== false && view.shown(page.store)).map((view) => mount(sheet, view, page));
  return () => {
    for (const each of mounted) each?.close();
    sheet.remove();
    app.classList.remove("printing");
    if (theme === null) root.removeAttribute("data-theme");
    else root.setAttribute("data-theme", theme);
  };
}

/** A view that cannot be drawn takes no other with it. */
function mount(sheet, view, page) {
  const root = h("section", { "data-print": view.id });
  sheet.append(h("h1", { class: "sheet" }, view.title), root);
  try {
    const set = page.kept.get(view.id) ?? new Map();
    const mounted = view.mount(root, Object.assign(Object.create(page), { route: { ...page.route, set } }));
    mounted.update(new Set(SECTIONS));
    return mounted;
  } catch (error) {
    fill(root, h("p", { class: "absent" }, `It cannot be drawn: ${error.message}.`));
    return null;
  }
}
