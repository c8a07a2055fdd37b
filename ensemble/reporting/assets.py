"""The report's style sheet and its script."""

STYLE = """
:root { color-scheme: light dark; --bg: #f6f7f8; --card: #ffffff; --ink: #1b2027; --soft: #5b6572; --line: #e2e6ea;
  --accent: #2f73b3; --mark: #b85f14; --good: #237a5b; --warn: #946c10; --bad: #b23b3b; }
@media (prefers-color-scheme: dark) { :root { --bg: #101317; --card: #181c22; --ink: #e7eaee; --soft: #9aa4b1;
  --line: #2a3038; --accent: #6aa9de; --mark: #e79a55; --good: #55bd96; --warn: #d3ab4c; --bad: #e58080; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", "Liberation Sans", sans-serif; -webkit-font-smoothing: antialiased; }
main { max-width: 1320px; margin: 0 auto; padding: 36px 28px 56px; }
h1 { font-size: 28px; font-weight: 650; letter-spacing: -0.015em; margin: 0; }
h2 { font-size: 18px; font-weight: 620; letter-spacing: -0.01em; margin: 40px 0 12px; }
h3 { font-size: 14.5px; font-weight: 620; margin: 0; }
p, dl { margin: 0; }
.title { display: flex; flex-wrap: wrap; align-items: center; gap: 12px; }
.pill { font-size: 12.5px; font-weight: 600; padding: 2px 11px; border-radius: 99px;
  border: 1px solid currentColor; }
.lead { color: var(--soft); margin: 4px 0 24px; }
.good { color: var(--good); } .warn { color: var(--warn); } .bad { color: var(--bad); }
.soft { color: var(--soft); } .before { margin: 0 0 12px; max-width: 110ch; font-size: 14px; }
.card + .before { margin-top: 18px; }
.tiles { display: flex; flex-wrap: wrap; gap: 1px; background: var(--line); border: 1px solid var(--line);
  border-radius: 10px; overflow: hidden; }
.tile { flex: 1 1 max(150px, 100% / var(--tiles) - 2px); background: var(--card); padding: 14px 18px 13px; }
.tile dt { font-size: 12.5px; color: var(--soft); }
.tile dd { margin: 0; }
.tile .figure { font-size: 25px; font-weight: 620; letter-spacing: -0.02em; line-height: 1.3;
  font-variant-numeric: tabular-nums; }
.tile .note { font-size: 12.5px; line-height: 1.4; }
.tile .note:not(.good, .bad) { color: var(--soft); }
.grid { display: grid; grid-template-columns: repeat(12, minmax(0, 1fr)); gap: 16px; }
.card { grid-column: span 12; margin: 0; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; padding: 16px 18px 12px; min-width: 0; }
@media (min-width: 1020px) { .half { grid-column: span 6; } .most { grid-column: span 7; }
  .rest { grid-column: span 5; } }
figcaption p { color: var(--soft); font-size: 13px; line-height: 1.45; max-width: 110ch; margin-top: 2px; }
.plot { width: 100%; margin-top: 10px; }
.none { align-self: start; }
.absent { color: var(--soft); font-size: 13.5px; padding: 8px 0 6px; }
.card .absent::before { content: "Not drawn. "; font-weight: 600; }
.js-plotly-plot .plotly .cartesianlayer text:not(.bartext-inside), .js-plotly-plot .plotly .infolayer text {
  fill: var(--soft) !important; }
.scroll { overflow-x: auto; margin: 0 -18px; padding: 0 18px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 6px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-size: 12.5px; font-weight: 600; color: var(--soft); cursor: pointer; user-select: none; }
th.text, td.text { text-align: left; }
th:first-child, td:first-child { padding-left: 0; } th:last-child, td:last-child { padding-right: 0; }
tbody tr:last-child td { border-bottom: 0; }
th[aria-sort]::after { content: " ↓"; } th[aria-sort="ascending"]::after { content: " ↑"; }
tr.top td { font-weight: 620; }
.dot { display: inline-block; width: 8px; height: 8px; border-radius: 50%; margin-right: 7px; }
ul.notices { list-style: none; margin: 0; padding: 0; font-size: 14px; }
ul.notices li { display: grid; grid-template-columns: 76px 1fr; gap: 8px; padding: 6px 0;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
ul.notices li:last-child { border-bottom: 0; }
ul.notices .at { color: var(--soft); font-variant-numeric: tabular-nums; }
footer { margin-top: 36px; color: var(--soft); font-size: 12.5px; overflow-wrap: anywhere; }
@media (max-width: 640px) { main { padding: 22px 14px; } .card { padding: 14px; }
  .scroll { margin: 0; padding: 0; } }
@media print {
  :root { --bg: #ffffff; --card: #ffffff; --ink: #000000; --soft: #444444; --line: #cccccc; --accent: #1f5c94;
    --mark: #a3500c; --good: #1c6b4f; --warn: #7a5a10; --bad: #9c2b2b; }
  @page { margin: 12mm; }
  body { font-size: 12px; } main { max-width: none; padding: 0; } h2 { margin: 18px 0 8px; break-after: avoid; }
  .grid { display: block; } .card { break-inside: avoid; margin-bottom: 10px; padding: 8px 10px; }
  .tiles { break-inside: avoid; } .tile { flex-basis: 120px; padding: 8px 10px; }
  .tile .figure { font-size: 18px; }
  .scroll { overflow: visible; }
  table { font-size: 9.5px; } th, td { padding: 3px 5px; white-space: normal; }
}
"""

SCRIPT = """
const figures = JSON.parse(document.getElementById('figures').textContent);
const plots = Object.keys(figures).map(id => document.getElementById(id));
const config = {displayModeBar: false, responsive: true, doubleClick: 'reset'};
Promise.all(plots.map(plot => Plotly.newPlot(plot, figures[plot.id].data, figures[plot.id].layout, config)))
  .then(() => document.body.setAttribute('data-drawn', plots.length));
addEventListener('beforeprint', () => plots.forEach(plot => Plotly.relayout(plot, {width: 680, autosize: false})));
addEventListener('afterprint', () => plots.forEach(plot => Plotly.relayout(plot, {width: null, autosize: true})));
document.querySelectorAll('th').forEach(head => head.addEventListener('click', () => {
  const table = head.closest('table'), body = table.tBodies[0], column = head.cellIndex;
  const up = head.getAttribute('aria-sort') === 'descending';
  table.querySelectorAll('th').forEach(other => other.removeAttribute('aria-sort'));
  head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
  const key = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
  const compare = (a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === '' || y === '') return x === y ? 0 : (x === '' ? 1 : -1);
    const order = isNaN(x) || isNaN(y) ? String(x).localeCompare(y, undefined, {numeric: true}) : x - y;
    return up ? order : -order;
  };
  [...body.rows].sort(compare).forEach(row => body.append(row));
}));
"""
