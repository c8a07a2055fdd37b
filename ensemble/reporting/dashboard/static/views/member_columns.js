/** The columns of the table of members. */

import { h, setAttribute, setText } from "../dom.js";
import { findFigure } from "../figures.js";
import { ABSENT, FORMATS, joules, number, score, shorten, value, visible } from "../format.js";
import { textOf } from "../plain_table.js";
import { STATES } from "../store.js";
import { Table } from "../table.js";

const USUAL = ["state", "epoch", "metric", "place", "waited", "left_s", "cpu_s", "energy_j"];
const MOST_PARAMS = 6; // that are shown at first
const SAMPLE = 200; // rows that a column's width is measured on
const CHARACTER_PX = 8.3;
const MOST_SHOWN = 120; // characters of a text in a cell; in print they are on several lines

/** All columns that a run has, in their order. */
export function allColumns(store) {
  const { run } = store;
  const cost = costOf(store);
  const params = (run?.params ?? []).map((name) => param(store, name));
  const others = (run?.metrics ?? []).slice(1).map((name) => metric(findFigure(run.figures, name)));
  return [
    { id: "selected", title: "✓", about: "Selected", width: 34, fixed: true, text: true, up: false, value: (row) => Number(store.selection.has(row.id)), show: (cell, row, isSelected) => Table.box(cell, isSelected, row.id) },
    { id: "number", title: "#", about: "Number, in the order of declaration", width: 56, value: (row) => row.number, show: plain((row) => String(row.number ?? "")) },
    { id: "id", title: "member", about: "Name", width: widthOf(longest(store, (row) => row.id) + 2, 190), fixed: true, text: true, value: (row) => row.id, show: name(store) },
    { id: "state", title: "state", about: "State", width: widthOf(longest(store, (row) => row.state) + 1, 118), text: true, value: (row) => row.state, show: state },
    { id: "error", title: "error", about: "Why it failed", width: 190, text: true, value: (row) => row.error, show: clipped((row) => row.error) },
    { id: "epoch", title: "epoch", about: "Epochs finished, of those declared", width: 96, value: (row) => row.done, show: epoch },
    { id: "metric", title: visible(run?.objective ?? "metric"), about: `The objective, ${visible(findFigure(run?.figures, run?.objective ?? "").title)}, in validation`, width: widthOf(Math.max(8, (run?.objective ?? "").length + 2), 190), value: (row) => row.metric, show: plain((row) => score(row.metric)) },
    ...others,
    ...params,
    ...(run?.columns ?? []).map((each) => declared(store, each, cost)),
    energy(store, cost),
    ...further(store),
    { id: "options", title: "options", about: "Training options besides the hyperparameters", width: 210, text: true, value: (row) => row.options, show: clipped((row) => row.options) },
  ];
}

/** The letters of the longest text of members. */
function longest(store, text) {
  return Math.max(0, ...[...store.members.values()].slice(0, SAMPLE).map((row) => String(text(row) ?? "").length));
}

/** A column that Python has declared; what was used is in the document's `cost`. */
function declared(store, { id, title, about, format }, cost) {
  const read = (row) => (Object.hasOwn(row, id) ? row[id] : cost(row.id, id));
  const show = format === "text" ? clipped(read) : plain((row) => FORMATS[format](read(row)));
  const letters = format === "text" ? longest(store, read) : 6;
  return { id, title, about, text: format === "text", width: widthOf(Math.max(letters, title.length + 2), 190), value: read, show };
}

/** Columns of the document `tables`; none while it is not here. */
function further(store) {
  const { tables } = store;
  return (tables?.columns ?? []).map(({ id, title, about, kind }, i) => {
    const cell = (row) => tables.members[row.id]?.[i] ?? null;
    const letters = Math.max(title.length, longest(store, (row) => textOf(cell(row))));
    return { id, title: visible(title), about: visible(about), text: kind === "text", width: widthOf(letters, 330), value: (row) => [cell(row)].flat().at(-1), show: clipped((row) => textOf(cell(row)) || null) };
  });
}

/** The columns that are shown until the reader chooses others: a Set of ids. */
export function defaultColumns(store) {
  const varied = (store.run?.varied ?? []).slice(0, MOST_PARAMS).map((each) => `param ${each}`);
  const failed = (store.run?.counts?.failed ?? 0) > 0 ? ["error"] : [];
  const usual = store.run?.ended == null ? USUAL : USUAL.filter((id) => id !== "left_s");
  return new Set([...usual, ...varied, ...failed]);
}

/** Reads a figure of a member's cost: `costOf(store)(id, "cpu_s")`; null where it is not known. */
export function costOf(store) {
  const members = store.cost?.members;
  if (members == null) return () => null;
  const at = new Map(members.columns.map((each, i) => [each, i]));
  return (id, column) => (Object.hasOwn(members.rows, id) ? members.rows[id][at.get(column)] : null) ?? null;
}

/** Members' joules: the head names their origin where all have the same, else each cell names its own. */
function energy(store, cost) {
  const members = store.cost?.members;
  const at = members?.columns.indexOf("origin");
  const origins = new Set(members == null ? [] : Object.values(members.rows).map((row) => row[at]));
  origins.delete("unavailable");
  const one = origins.size === 1 ? [...origins][0] : null;
  return {
    id: "energy_j", title: one === null ? "energy" : `energy (${one})`, about: "Energy that its own work used, and the origin of the figure", width: one === null ? 172 : 158,
    value: (row) => cost(row.id, "energy_j"),
    show: plain((row) => joules(cost(row.id, "energy_j"), one === null ? cost(row.id, "origin") : null)),
  };
}

function param(store, name) {
  const known = [...store.members.values()].slice(0, SAMPLE).map((member) => member.params?.[name] ?? null);
  const widest = Math.max(name.length + 2, ...known.map((given) => value(given).length));
  return {
    id: `param ${name}`, title: visible(name), about: `Hyperparameter ${visible(name)}`, text: known.some((given) => given !== null && typeof given !== "number"),
    width: widthOf(widest, 200),
    value: (row) => sortable(row.params?.[name]), show: clipped((row) => (row.params?.[name] === undefined ? null : value(row.params[name]))),
  };
}

function sortable(given) {
  if (given === undefined || given === null || typeof given === "number") return given ?? null;
  return typeof given === "object" ? JSON.stringify(given) : String(given);
}

function widthOf(letters, most) {
  return Math.round(Math.min(most, Math.max(64, letters * CHARACTER_PX + 28)));
}

function metric(figure) {
  const { name } = figure;
  return {
    id: `metric ${name}`, title: visible(name), about: `${visible(figure.title)}, in validation`, width: widthOf(Math.max(8, name.length + 2), 190),
    value: (row) => row.metrics?.[name] ?? null, show: plain((row) => score(row.metrics?.[name])),
  };
}

function plain(text) {
  return (cell, row) => setText(cell, text(row));
}

function clipped(text) {
  return (cell, row) => {
    const shown = text(row);
    setText(cell, shown === null || shown === undefined ? ABSENT : shorten(visible(shown), MOST_SHOWN));
    setAttribute(cell, "title", shown);
    cell.classList.add("clip");
  };
}

function name(store) {
  return (cell, row) => {
    if (cell.firstChild === null) {
      cell.append(h("span", { class: "dot" }), h("a", { tabindex: "-1" }));
      cell.classList.add("clip", "name");
    }
    const [dot, link] = cell.children;
    dot.style.backgroundColor = store.colour(row.id);
    if (setText(link, visible(row.id)).dataset.of !== row.id) {
      link.dataset.of = row.id;
      link.setAttribute("href", `#member?member=${encodeURIComponent(row.id)}`);
      link.setAttribute("title", visible(row.id));
    }
  };
}

function state(cell, row) {
  if (cell.firstChild === null) cell.append(h("span", { class: "dot" }), h("span", {}));
  cell.firstChild.style.backgroundColor = STATES[row.state] ?? STATES.waiting;
  setText(cell.lastChild, row.state ?? ABSENT);
}

function epoch(cell, row) {
  if (cell.firstChild === null) cell.append(h("span", {}), h("span", { class: "meter", "aria-hidden": "true" }, h("span", {})));
  setText(cell.firstChild, row.epochs === null ? number(row.epoch) : `${row.epoch ?? 0} / ${row.epochs}`);
  const width = `${Math.round(100 * (row.done ?? 0))}%`;
  const bar = cell.lastChild.firstChild;
  if (bar.style.width !== width) bar.style.width = width;
}
