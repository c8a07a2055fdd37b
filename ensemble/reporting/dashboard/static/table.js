/**
 * A table of many rows, of which only those in sight are in the document. Columns are
 * `{ id, title, about, text, width, value(row), show(cell, row) }`: `value` is sorted by (null comes last), `show`
 * fills a cell that is used for one row after the other, `text` aligns to the left.
 */

import { fill, h, setAttribute } from "./dom.js";

const ROW_PX = 33;
const SPARE = 8; // rows drawn above and below those in sight
const PAGE = 20;
const NARROW = 0.75; // of a column's width, on a phone, where letters are smaller

/** Builds a table. `options`: `label`, `onOpen(id)`, `onToggle(id)`, `onRange(ids)`, `onHover(id)`, `isSelected(id)`, `sort`. */
export function createTable(options) {
  return new Table(options);
}

export class Table {
  constructor(options) {
    this.options = options;
    this.prefix = `row-${Math.random().toString(36).slice(2, 8)}`;
    this.columns = [];
    this.ids = [];
    this.sorted = [];
    this.row = () => null;
    this.sort = options.sort ?? { column: null, up: true };
    this.active = null;
    this.anchor = null;
    this.pool = [];
    this.groups = h("colgroup", {});
    this.head = h("tr", {});
    this.above = h("tr", { class: "spacer", "aria-hidden": "true" }, h("td", {}));
    this.below = h("tr", { class: "spacer", "aria-hidden": "true" }, h("td", {}));
    this.body = h("tbody", {}, this.above, this.below);
    this.grid = h("table", { role: "grid", class: "grid-table", tabindex: "0", "aria-label": options.label, "aria-multiselectable": "true",
      onkeydown: (event) => this.press(event) }, this.groups, h("thead", {}, this.head), this.body);
    this.root = h("div", { class: "table-scroll", onscroll: () => this.scrolled() }, this.grid);
    this.body.addEventListener("click", (event) => this.click(event));
    this.body.addEventListener("pointerover", (event) => options.onHover?.(this.idAt(event.target)));
    this.body.addEventListener("pointerleave", () => options.onHover?.(null));
    this.resize = new ResizeObserver(() => this.draw());
    this.resize.observe(this.root);
  }

  /** Sets the columns; `width` is in pixels. */
  setColumns(columns) {
    this.columns = columns;
    const isNarrow = matchMedia("(max-width: 640px)").matches;
    const narrow = ({ width, fixed }) => (isNarrow ? Math.max(27, (fixed ? 0.87 : NARROW) * width) : width);
    fill(this.groups, columns.map((column) => h("col", { style: { width: `${narrow(column)}px` } })));
    fill(this.head, columns.map((column) => this.heading(column)));
    this.grid.style.minWidth = `${columns.reduce((sum, column) => sum + narrow(column), 0)}px`;
    this.grid.setAttribute("aria-colcount", columns.length);
    for (const spacer of [this.above, this.below]) setAttribute(spacer.firstChild, "colspan", columns.length);
    this.pool.forEach((line) => line.node.remove());
    this.pool = [];
    this.markSort();
  }

  /** Sets the rows by their ids; `row(id)` gives what the columns' functions get; `columns` are the same ones anew. Draws. */
  setRows(ids, row, columns) {
    this.columns = columns;
    this.ids = ids;
    this.row = row;
    this.order();
    this.draw();
  }

  heading(column) {
    const button = h("button", { type: "button", class: "sort", title: column.about ?? column.title, onclick: () => this.sortBy(column.id) }, column.title);
    return h("th", { scope: "col", class: column.text ? "text" : null, "data-column": column.id }, button);
  }

  sortBy(id) {
    const column = this.columns.find((each) => each.id === id);
    this.sort = this.sort.column === id ? { column: id, up: !this.sort.up } : { column: id, up: column.up ?? Boolean(column.text) };
    this.options.onSort?.(this.sort);
    this.markSort();
    this.order();
    this.root.scrollTop = 0;
    this.draw();
  }

  markSort() {
    for (const cell of this.head.children) {
      const sorted = cell.dataset.column === this.sort.column;
      setAttribute(cell, "aria-sort", sorted ? (this.sort.up ? "ascending" : "descending") : null);
    }
  }

  order() {
    const column = this.columns.find((each) => each.id === this.sort.column);
    if (column === undefined) {
      this.sorted = [...this.ids];
    } else {
      const sign = this.sort.up ? 1 : -1;
      const keyed = this.ids.map((id, place) => ({ id, place, key: column.value(this.row(id)) ?? null }));
      keyed.sort((a, b) => {
        if (a.key === null || b.key === null) return a.key === b.key ? a.place - b.place : a.key === null ? 1 : -1;
        return sign * compare(a.key, b.key) || a.place - b.place;
      });
      this.sorted = keyed.map((each) => each.id);
    }
    this.places = null;
  }

  placeOf(id) {
    this.places ??= new Map(this.sorted.map((each, place) => [each, place]));
    return this.places.get(id) ?? -1;
  }

  scrolled() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.draw(true);
    });
  }

  /** Draws the rows in sight; `onlyNew`: those that are there already have not changed. */
  draw(onlyNew = false) {
    const isWhole = getComputedStyle(this.root).overflowY === "visible"; // it is printed
    const height = this.root.clientHeight;
    const first = isWhole ? 0 : Math.max(0, Math.floor(this.root.scrollTop / ROW_PX) - SPARE);
    const last = isWhole ? this.sorted.length : Math.min(this.sorted.length, Math.ceil((this.root.scrollTop + height) / ROW_PX) + SPARE);
    this.space(this.above, first);
    this.space(this.below, this.sorted.length - last);
    while (this.pool.length < last - first) this.pool.push(this.line());
    this.roll(first);
    this.pool.forEach((line, i) => {
      if (onlyNew && line.place === first + i && !line.node.hidden === first + i < last) return;
      this.fillLine(line, first + i, first + i < last);
    });
    setAttribute(this.grid, "aria-rowcount", this.sorted.length + 1);
    const shown = this.active !== null && this.placeOf(this.active) >= first && this.placeOf(this.active) < last;
    setAttribute(this.grid, "aria-activedescendant", shown ? `${this.prefix}-${this.placeOf(this.active)}` : null);
  }

  /** Moves lines from one end to the other, so that those which stay in sight keep their rows. */
  roll(first) {
    const by = first - (this.pool[0]?.place ?? first);
    if (by === 0 || Math.abs(by) >= this.pool.length) return;
    const moved = by > 0 ? this.pool.splice(0, by) : this.pool.splice(by);
    if (by > 0) this.pool.push(...moved);
    else this.pool.unshift(...moved);
    const before = by > 0 ? this.below : this.pool[moved.length].node;
    for (const line of moved) this.body.insertBefore(line.node, before);
  }

  space(node, rows) {
    node.style.height = `${rows * ROW_PX}px`;
    node.hidden = rows === 0;
  }

  line() {
    const cells = this.columns.map((column) => h("td", { class: column.text ? "text" : null }));
    const node = h("tr", { style: { height: `${ROW_PX}px` } }, cells);
    this.body.insertBefore(node, this.below);
    return { node, cells, place: null };
  }

  fillLine(line, place, isShown) {
    line.place = place;
    line.node.hidden = !isShown;
    if (!isShown) return;
    const id = this.sorted[place];
    const row = this.row(id);
    const isSelected = this.options.isSelected(id);
    setAttribute(line.node, "id", `${this.prefix}-${place}`);
    setAttribute(line.node, "data-member", id);
    setAttribute(line.node, "aria-rowindex", place + 2);
    setAttribute(line.node, "aria-selected", isSelected ? "true" : "false");
    const kinds = [this.options.rowClass?.(row), id === this.active ? "active" : null, place % 2 ? "odd" : null].filter(Boolean);
    setAttribute(line.node, "class", kinds.join(" ") || null);
    this.columns.forEach((column, i) => column.show(line.cells[i], row, isSelected));
  }

  /** What a cell shows of a row that can be selected; the row takes the click. */
  static box(cell, isSelected, name) {
    if (cell.firstChild === null) cell.appendChild(h("input", { type: "checkbox", tabindex: "-1" }));
    cell.firstChild.checked = isSelected;
    setAttribute(cell.firstChild, "aria-label", name);
  }

  idAt(target) {
    return target.closest("tr[data-member]")?.getAttribute("data-member") ?? null;
  }

  click(event) {
    const id = this.idAt(event.target);
    if (id === null || event.target.closest("a, button") !== null) return;
    this.active = id;
    if (event.shiftKey && this.anchor !== null) {
      const [from, to] = [this.placeOf(this.anchor), this.placeOf(id)].sort((a, b) => a - b);
      if (from >= 0) this.options.onRange?.(this.sorted.slice(from, to + 1));
    } else {
      this.anchor = id;
      this.options.onToggle(id);
    }
    this.grid.focus({ preventScroll: true });
    this.draw();
  }

  press(event) {
    if (event.target !== this.grid || event.ctrlKey || event.metaKey || event.altKey) return;
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: PAGE, PageUp: -PAGE, Home: -Infinity, End: Infinity };
    if (steps[event.key] !== undefined) this.move(steps[event.key]);
    else if (event.key === "Enter" && this.active !== null) this.options.onOpen(this.active);
    else if (event.key === " " && this.active !== null) this.options.onToggle((this.anchor = this.active));
    else return;
    event.preventDefault();
  }

  move(by) {
    if (this.sorted.length === 0) return;
    const from = this.active === null ? -1 : this.placeOf(this.active);
    const place = Math.min(this.sorted.length - 1, Math.max(0, from + by));
    this.active = this.sorted[place];
    const head = this.head.offsetHeight;
    const top = place * ROW_PX;
    const { scrollTop, clientHeight } = this.root;
    if (top < scrollTop) this.root.scrollTop = top;
    else if (top + ROW_PX + head > scrollTop + clientHeight) this.root.scrollTop = top + ROW_PX + head - clientHeight;
    this.draw();
  }

  close() {
    this.resize.disconnect();
  }
}

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), undefined, { numeric: true });
}
