/** What all figures share: the card with its title, reading and table; controls; a tip beside a mark; keys of a group of buttons. */

import { fill, h, setText } from "./dom.js";
import { ABSENT, visible } from "./format.js";

const MOST_ROWS = 1000;
const NUMBER = /^(?:[-−+]?[\d.,]+|–)/;

/**
 * Builds a card. `options`: `title`, `reading` (one line on how to read it), `width` ("", "half", "third"),
 * `controls` (nodes), `onShown()` (the figure came back), `onPick(member)`, and `table()`, the same numbers as
 * `{ caption?, head, rows }`; a name in the head is a text, or `[text, format]`; a row is a list of cells, or `{ key, member, cells }`; its first cell
 * names it. A cell is a text, null, a number with all its digits, which the column's `format` shortens where it is shown, or [text, number].
 * Returns `{ root, body, asTable, read(text), explain(reason|null), update() }`.
 */
export function card(options) {
  const reading = h("p", {}, options.reading ?? "");
  const absent = h("p", { class: "absent" });
  const body = h("div", { class: "figure-body" });
  const sheet = h("div", { class: "figure-table", hidden: true, tabindex: "0", role: "region", "aria-label": `${options.title} as a table` });
  const rows = new Map();
  const toggle = h("button", { type: "button", class: "minor as-table", "aria-pressed": "false", onclick: () => flip() }, "as a table");
  const controls = h("div", { class: "figure-controls" }, options.controls ?? [], options.table ? toggle : null);
  let isMissing = false;
  const head = h("div", { class: "figure-head" }, h("figcaption", {}, h("h3", {}, options.title), reading), controls);
  const self = {
    root: h("figure", { class: `card ${options.width ?? ""}` }, head, body, sheet),
    body,
    asTable: false,
    read: (text) => setText(reading, text),
    /** Says why there is no figure; null: there is one. */
    explain(reason) {
      isMissing = reason !== null;
      setText(absent, reason ?? "");
      arrange();
    },
    /** Brings the table up to date where it is shown. */
    update: () => self.asTable && !isMissing && fillTable(sheet, rows, { caption: `${options.title}.`, ...options.table() }, options.onPick),
  };
  function arrange() {
    if (isMissing) head.after(absent);
    else absent.remove();
    controls.hidden = isMissing;
    [body.hidden, sheet.hidden] = [isMissing || self.asTable, isMissing || !self.asTable];
  }
  function flip() {
    self.asTable = !self.asTable;
    toggle.setAttribute("aria-pressed", String(self.asTable));
    arrange();
    self.update();
    if (!self.asTable) options.onShown?.();
  }
  return self;
}

function fillTable(sheet, known, { caption, head, rows }, onPick) {
  const [names, formats] = [head.map((each) => [each].flat()[0]), head.map((each) => [each].flat()[1] ?? String)];
  const write = (cell, i) => visible(Array.isArray(cell) ? cell[0] : typeof cell === "string" ? cell : cell === null || cell === undefined ? ABSENT : formats[i](cell));
  const shown = rows.slice(0, MOST_ROWS).map((row, i) => (Array.isArray(row) ? { key: i, cells: row } : row)).map((row) => ({ ...row, cells: row.cells.map(write) }));
  const isText = head.map((_, i) => i === 0 || (shown.length > 0 && shown.every((row) => !NUMBER.test(row.cells[i]))));
  const signature = JSON.stringify([names, isText]);
  if (sheet.dataset.head !== signature) {
    known.clear();
    const heads = names.map((name, i) => h("th", { scope: "col", class: isText[i] ? "text" : null }, name));
    fill(sheet, h("table", {}, h("caption", {}), h("thead", {}, h("tr", {}, heads)), h("tbody")));
    sheet.dataset.head = signature;
  }
  const left = rows.length - shown.length;
  setText(sheet.querySelector("caption"), left ? `${caption} ${left.toLocaleString("en-US")} more rows are left out.` : caption);
  const body = sheet.querySelector("tbody");
  const wanted = new Set(shown.map((row) => row.key));
  for (const [key, row] of known) if (!wanted.has(key)) [row.remove(), known.delete(key)];
  shown.forEach((row, i) => {
    let line = known.get(row.key);
    if (line === undefined) known.set(row.key, (line = makeRow(row, isText, onPick)));
    row.cells.forEach((text, k) => setText(line.cells[k].firstElementChild ?? line.cells[k], text));
    if (body.rows[i] !== line) body.insertBefore(line, body.rows[i] ?? null);
  });
}

function makeRow(row, isText, onPick) {
  const pick = row.member !== undefined && onPick ? h("button", { type: "button", class: "pick", onclick: () => onPick(row.member) }) : null;
  const cells = isText.map((isWord, i) => (i === 0 ? h("th", { scope: "row", class: "text" }, pick) : h("td", { class: isWord ? "text" : null })));
  return h("tr", { "data-member": row.member }, cells);
}

/** A labelled list of choices: `choices` as `[[value, text], ...]`; calls `choose(value)`. */
export function choice(label, choices, value, choose) {
  const options = choices.map(([name, text]) => h("option", { value: name, selected: name === value }, text));
  const select = h("select", { "aria-label": label, onchange: () => choose(select.value) }, options);
  return h("label", { class: "choice" }, h("span", {}, label), select);
}

/** A labelled box to tick; calls `choose(true or false)`. */
export function tick(label, value, choose) {
  const box = h("input", { type: "checkbox", checked: value, onchange: () => choose(box.checked) });
  return h("label", { class: "choice" }, box, h("span", {}, label));
}

/** A short text beside a mark: `show(x, y, lines)` in pixels of `root`, `hide()`. The first line is strong. */
export function makeTip(root) {
  const box = h("div", { class: "tip", hidden: true, role: "status" });
  root.appendChild(box);
  return {
    show(x, y, lines) {
      fill(box, lines.filter(Boolean).map((line, i) => h(i ? "div" : "strong", {}, visible(line))));
      box.hidden = false;
      const [width, height] = [box.offsetWidth, box.offsetHeight];
      const left = x + 14 + width > root.clientWidth ? x - 14 - width : x + 14;
      box.style.left = `${Math.max(0, Math.min(left, root.clientWidth - width))}px`;
      box.style.top = `${y - height - 8 < 0 ? y + 16 : y - height - 8}px`;
    },
    hide: () => (box.hidden = true),
  };
}

/**
 * Makes the buttons of a container one stop of the Tab key: arrow keys, Home and End move between them.
 * Call `refresh()` after buttons came or went.
 */
export function roving(container, selector = "button") {
  const all = () => [...container.querySelectorAll(selector)].filter((each) => each.offsetParent !== null);
  const set = (current) => {
    for (const each of container.querySelectorAll(selector)) each.tabIndex = each === current ? 0 : -1;
  };
  container.addEventListener("focusin", (event) => {
    const found = event.target.closest(selector);
    if (found !== null) set(found);
  });
  container.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined || event.target.closest(selector) === null) return;
    const buttons = all();
    const to = Math.max(0, Math.min(buttons.length - 1, buttons.indexOf(event.target.closest(selector)) + move));
    event.preventDefault();
    buttons[to]?.focus();
  });
  return {
    refresh() {
      const buttons = [...container.querySelectorAll(selector)];
      if (buttons.length && !buttons.some((each) => each.tabIndex === 0 && each.hasAttribute("tabindex"))) set(buttons[0]);
      else set(buttons.find((each) => each.tabIndex === 0 && each.hasAttribute("tabindex")));
    },
  };
}
