/** The runs of a folder: sorted, filtered, and picked to be compared. */

import { fill, h, setAttribute, setText } from "../dom.js";
import { filterProblem, matcher } from "../filter.js";
import { count, moment, share, visible } from "../format.js";
import { createTable, Table } from "../table.js";
import { stateBar } from "./state_bar.js";

const picked = new Set(); // keys of runs; they stay while the page does

/** A column as the server wrote it: a run has its texts in `cells`, and what they are sorted and filtered by in `params`. */
function plain(id, title, width, isText = false, isEmpty = (run) => [null, undefined, "", 0].includes(run.params[id])) {
  const show = (cell, run) => [setText(cell, visible(run.cells[id])), setAttribute(cell, "title", isText ? visible(run.cells[id]) : null), cell.classList.add("clip")];
  return { id, title, width, text: isText, value: (run) => run.params[id], show, isEmpty };
}

const COLUMNS = [
  { id: "picked", title: "✓", about: "Picked", width: 34, text: true, up: false, value: (run) => Number(picked.has(run.key)), show: (cell, run, on) => Table.box(cell, on, visible(run.cells.name)) },
  { id: "id", title: "run", width: 190, text: true, value: (run) => run.params.name,
    show: (cell, run) => [fill(cell, h("a", { href: `#overview?run=${run.key}`, title: visible(run.dir) }, visible(run.cells.name))), cell.classList.add("clip", "name")] },
  { id: "done", title: "progress", width: 108, value: (run) => run.done, show: (cell, run) => fill(cell, stateBar(run.counts), h("span", { class: "soft small" }, share(run.done))) },
  plain("best", "best", 80), plain("combined", "combined", 104),
  { id: "started", title: "started", width: 160, value: (run) => run.started, show: (cell, run) => setText(cell, moment(run.started)) },
  { id: "state", title: "state", width: 196, text: true, value: (run) => run.state.word, show: (cell, run) => fill(cell, h("span", { class: `pill ${run.state.tone}` }, run.state.word)) },
  plain("declared", "declared as", 140, true, (run) => run.params.declared === run.params.name), plain("members", "members", 92), plain("failed", "failed", 74), plain("objective", "objective", 106, true),
  plain("cpu_s", "CPU time", 104), plain("energy_j", "energy", 166),
  plain("took_s", "took", 116),
];

export const runsView = { id: "runs", title: "Runs", tab: false, ofRuns: true, mount: (root, page) => new RunsView(root, page) };

class RunsView {
  constructor(root, page) {
    Object.assign(this, { page, chosen: [] }); // of the picked runs those that are there, in the order in which they were picked
    const pick = (keys, verb) => [keys.forEach((key) => picked[verb](key)), this.update()];
    this.table = createTable({
      label: "Runs", sort: (page.runSort ??= { column: "started", up: false }), onSort: (sort) => (page.runSort = { ...sort }),
      isSelected: (key) => picked.has(key), onOpen: (run) => page.go("overview", { run }),
      onToggle: (key) => pick([key], picked.has(key) ? "delete" : "add"), onRange: (keys) => pick(keys, "add"),
    });
    const button = (text, onclick, kind) => h("button", { type: "button", class: kind, onclick }, text);
    this.count = h("p", { class: "soft", role: "status" });
    this.problem = h("p", { class: "problem bad", role: "status" });
    this.compare = button("", () => page.go("compare", { set: new Map([["runs", this.chosen.join()]]) }), "primary");
    this.others = h("div", { class: "buttons" }, button("Pick none", () => [picked.clear(), this.update()]));
    this.filter = h("input", { type: "search", class: "filter", placeholder: "Filter runs: digits state:failed days<7", "aria-label": "Filter runs", value: page.runFilter, oninput: () => this.update() });
    fill(root, h("div", { class: "toolbar" }, this.count, this.compare, this.others, h("span", { class: "grow" }), this.filter), this.problem, this.table.root);
  }

  update() {
    const { runs } = this.page;
    const filter = (this.page.runFilter = this.filter.value);
    const [rows, passes] = [runs.map(({ key, params, started }) => ({ key, params: { ...params, days: (Date.now() / 1000 - started) / 86400 } })), matcher(filter)]; // as a filter has members
    const shown = rows.filter(passes).map(({ key }) => key);
    this.runs = new Map(runs.map((run) => [run.key, run]));
    const columns = COLUMNS.filter(({ isEmpty }) => !isEmpty || runs.some((run) => !isEmpty(run)));
    if (columns.length !== this.table.columns.length) this.table.setColumns(columns);
    this.table.setRows(shown, (key) => this.runs.get(key), columns);
    setText(this.problem, runs.length ? filterProblem(filter, rows) : "");
    const some = shown.length === runs.length ? count(runs.length, "run") : `${count(shown.length, "run")} of ${runs.length}`;
    setText(this.count, runs.length ? some : "No run is here yet. One that begins in this folder appears by itself.");
    this.chosen = [...picked].filter((key) => this.runs.has(key));
    setText(this.compare, `Compare ${this.chosen.length}`);
    this.compare.disabled = this.others.hidden = this.chosen.length === 0;
  }

  close() {
    this.table.close();
  }
}
