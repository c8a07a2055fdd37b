/** All members in a table: sorted, filtered, with the columns that the reader wants. */

import { memberButtons, verbsFor } from "../actions.js";
import { fill, h, setText } from "../dom.js";
import { count } from "../format.js";
import { read, write } from "../storage.js";
import { createTable } from "../table.js";
import { allColumns, defaultColumns } from "./member_columns.js";

const SORT = { column: "number", up: true };

export const membersView = {
  id: "members",
  title: "Members",
  needs: [],
  renews: ["tables"],
  shown: () => true,
  mount: (root, page) => new Members(root, page),
};

class Members {
  constructor(root, page) {
    this.page = page;
    const set = page.settings({ columns: null, sort: SORT }, { columns: isObject, sort: (given) => isObject(given) && typeof given.up === "boolean" });
    this.changes = set.columns ?? read("columns") ?? {};
    this.known = "";
    if (Object.values(this.changes).includes(true)) page.documents.fetch("tables"); // a column may be of them
    this.table = createTable({
      label: "Members", sort: { ...set.sort },
      onSort: (sort) => page.set({ sort }),
      onOpen: (id) => page.go("member", { member: id }),
      onToggle: (id) => page.store.toggle(id),
      onRange: (ids) => page.store.select([...page.store.selection, ...ids]),
      onHover: (id) => page.store.setHover(id),
      isSelected: (id) => page.store.selection.has(id),
      rowClass: (row) => (row.id === page.store.best() ? "top" : null),
    });
    this.count = h("p", { class: "soft", role: "status" });
    this.bulk = h("div", { class: "buttons", hidden: true });
    this.chooser = h("details", { class: "chooser" }, h("summary", { class: "button" }, "Columns"));
    this.chooser.addEventListener("toggle", () => {
      if (!this.chooser.open) return;
      if (page.store.tables === null) page.documents.fetch("tables");
      this.drawChooser();
    });
    this.chooser.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      this.chooser.open = false;
      this.chooser.firstChild.focus();
      event.preventDefault();
    });
    this.table.root.addEventListener("click", (event) => this.follow(event));
    const all = h("button", { type: "button", onclick: () => page.store.select(page.store.visible()) }, "Select all shown");
    this.all = all;
    fill(root, h("div", { class: "toolbar" }, this.count, this.bulk, h("span", { class: "grow" }), all, this.chooser), this.table.root);
  }

  update(changed) {
    const { store } = this.page;
    const rows = ["members", "filter", "cost", "run", "view", "columns", "tables", "reset"];
    if (changed.has("tables") && this.chooser.open) this.drawChooser();
    if (rows.some((name) => changed.has(name))) this.drawRows(store);
    else if (changed.has("selection")) this.table.draw();
    const shown = store.visible().length;
    setText(this.count, shown === store.members.size ? count(shown, "member") : `${count(shown, "member")} of ${store.members.size}`);
    this.all.disabled = shown === 0;
    if (["selection", "view", "run", "members"].some((name) => changed.has(name))) this.drawBulk();
  }

  drawRows(store) {
    const columns = this.chosenColumns();
    const known = columns.map((column) => `${column.id} ${column.title} ${column.width}`).join("|");
    if (known !== this.known) {
      this.known = known;
      this.table.setColumns(columns);
    }
    this.table.setRows(store.visible(), (id) => store.members.get(id), columns);
  }

  /** A plain click on a name opens the member's page, with the present selection and filter. */
  follow(event) {
    const link = event.target.closest("a");
    if (link === null || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    this.page.go("member", { member: link.dataset.of });
  }

  chosenColumns() {
    const all = allColumns(this.page.store);
    const usual = defaultColumns(this.page.store);
    return all.filter((column) => column.fixed || (this.changes[column.id] ?? usual.has(column.id)));
  }

  drawChooser() {
    const shown = new Set(this.chosenColumns().map((column) => column.id));
    const boxes = allColumns(this.page.store).filter((column) => !column.fixed).map((column) => {
      const box = h("input", { type: "checkbox", onchange: () => this.choose(column.id, box.checked) });
      box.checked = shown.has(column.id);
      return h("label", { title: column.about }, box, column.title);
    });
    this.chooser.querySelector("fieldset")?.remove();
    const usual = h("button", { type: "button", onclick: () => this.chooseUsual() }, "Default columns");
    this.chooser.appendChild(h("fieldset", { class: "menu" }, h("legend", { class: "soft" }, "Columns shown"), boxes, usual));
  }

  choose(id, isShown) {
    this.changes[id] = isShown;
    write("columns", this.changes);
    this.page.set({ columns: this.changes });
    this.page.note(new Set(["columns"]));
  }

  chooseUsual() {
    this.changes = {};
    write("columns", this.changes);
    this.page.set({ columns: null });
    this.drawChooser();
    this.page.note(new Set(["columns"]));
  }

  /** What can be asked for the selected members. */
  drawBulk() {
    const { page } = this;
    const { members, selection } = page.store;
    const ids = [...selection].filter((id) => members.has(id));
    const key = JSON.stringify(ids.map((id) => [id, ...verbsFor(page, members.get(id))]));
    if (key === this.bulkKey) return;
    this.bulkKey = key;
    fill(this.bulk, memberButtons(page, ids));
    this.bulk.hidden = this.bulk.querySelector("button") === null;
  }

  close() {
    this.table.close();
  }
}

function isObject(given) {
  return typeof given === "object" && given !== null && !Array.isArray(given);
}
