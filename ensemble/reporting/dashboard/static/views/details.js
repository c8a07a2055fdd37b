/** Tables of what the other views have no place for, and what the run was made with. */

import { fill, h, setAttribute, setText } from "../dom.js";
import { visible } from "../format.js";
import { plainTable, section, textOf } from "../plain_table.js";
import { createTable } from "../table.js";

const CHARACTER_PX = { figure: 8.3, text: 9.6 }; // of wide fonts
const SAMPLE = 200; // rows that a column's width is measured on
const WIDTHS = [64, 330];

export const detailsView = {
  id: "details",
  title: "Details",
  needs: ["tables"],
  shown: (store) => store.run !== null,
  mount(root, page) {
    page.documents.forget("tables"); // of a run in progress they are other ones each time
    return new Details(root, page);
  },
};

class Details {
  constructor(root, page) {
    this.page = page;
    this.drawn = null;
    this.tables = []; // those with a row for each member
    this.root = root;
    fill(root, h("p", { class: "absent" }, "Reading the tables …"));
  }

  update(changed) {
    const { tables } = this.page.store;
    if (tables === null) return;
    if (tables !== this.drawn) this.build(tables);
    else if (changed.has("filter") || changed.has("members") || changed.has("view")) this.tables.forEach((each) => each.refresh());
    else if (changed.has("selection")) this.tables.forEach((each) => each.table.draw());
  }

  build(document) {
    this.close();
    this.drawn = document;
    const sections = document.tables.map((table) => (table.of_members ? this.memberTable(table) : plainTable(table)));
    const missing = document.missing.map((reason) => h("p", { class: "absent" }, visible(reason)));
    const made = document.made_with.map(([label, text]) => [h("dt", {}, visible(label)), h("dd", {}, visible(text))]);
    fill(this.root, sections, missing, h("h2", {}, "Made with"), h("dl", { class: "made" }, made));
    this.tables.forEach((each) => each.refresh());
  }

  memberTable(table) {
    const { store } = this.page;
    const rows = new Map(table.rows.map((cells) => [textOf(cells[0]), cells]));
    const grid = createTable({
      label: table.title, sort: { column: null, up: true },
      onOpen: (id) => this.page.go("member", { member: id }),
      onToggle: (id) => store.toggle(id),
      onRange: (ids) => store.select([...store.selection, ...ids]),
      onHover: (id) => store.setHover(id),
      isSelected: (id) => store.selection.has(id),
    });
    const columns = table.head.map(([title, kind], i) => ({
      id: i === 0 ? "id" : `column ${i}`, title: visible(title), text: kind === "text", width: widthOf(table, i),
      value: (cells) => keyOf(cells[i]), show: (cell, cells) => showCell(cell, cells[i], i === 0),
    }));
    grid.setColumns(columns);
    const refresh = () => {
      const passing = new Set(store.visible());
      grid.setRows([...rows.keys()].filter((id) => passing.has(id)), (id) => rows.get(id), columns);
    };
    this.tables.push({ table: grid, refresh });
    return section(table, grid.root);
  }

  close() {
    this.tables.forEach((each) => each.table.close());
    this.tables = [];
  }
}

function showCell(cell, given, isName) {
  const text = visible(textOf(given));
  setText(cell, text);
  setAttribute(cell, "title", text.length > 30 ? text : null);
  cell.classList.add("clip");
  if (isName) cell.classList.add("name");
}

function keyOf(cell) {
  return Array.isArray(cell) ? cell[1] : cell;
}

function widthOf(table, column) {
  const texts = table.rows.slice(0, SAMPLE).map((cells) => textOf(cells[column]).length);
  const most = Math.max(table.head[column][0].length + 2, ...texts);
  const wide = most * CHARACTER_PX[table.head[column][1] === "text" ? "text" : "figure"] + 22;
  return Math.round(Math.min(WIDTHS[1], Math.max(WIDTHS[0], wide)));
}
