/** The best value of the objective over the run's time, as a small step line. */

import { h, setText, svg } from "../dom.js";
import { duration, score, visible } from "../format.js";

const USUAL_WIDTH = 720;
const HEIGHT = 168;
const INSET = { left: 4, right: 64, top: 14, bottom: 20 };

/** The improvements of the objective: `[[t, value, member], ...]` by time; null while the curves are not here. */
export function bestSoFar(store) {
  if (store.curves === null) return null;
  const { objective, direction } = store.run;
  const isBetter = direction === "min" ? (a, b) => a < b : (a, b) => a > b;
  const points = [];
  for (const [id, curve] of Object.entries(store.curves.members)) {
    const values = curve.values[objective] ?? [];
    let own = null; // only what improves on the member's own best can improve on all
    for (let i = 0; i < values.length; i += 1) {
      if (values[i] === null || (own !== null && !isBetter(values[i], own))) continue;
      own = values[i];
      points.push([curve.t[i], own, id]);
    }
  }
  points.sort((a, b) => a[0] - b[0]);
  const steps = [];
  for (const point of points) if (steps.length === 0 || isBetter(point[1], steps.at(-1)[1])) steps.push(point);
  return steps;
}

/** The chart: `{ root, draw(steps, run) }`. */
export function stepChart() {
  const title = h("h3", {});
  const reading = h("p", { class: "reading" });
  const area = svg("path", { class: "step-area" });
  const line = svg("path", { class: "step-line", "data-mark": "best" });
  const base = svg("line", { class: "step-base", x1: INSET.left, y1: HEIGHT - INSET.bottom, y2: HEIGHT - INSET.bottom });
  const dot = svg("circle", { class: "step-dot", r: 4 });
  const last = svg("text", { class: "step-value", "dominant-baseline": "middle" });
  const first = svg("text", { class: "step-label", x: INSET.left, y: HEIGHT - 5 });
  const end = svg("text", { class: "step-label", y: HEIGHT - 5, "text-anchor": "end" });
  const lowest = svg("text", { class: "step-label", x: INSET.left });
  const chart = svg("svg", { class: "step-chart", role: "img" }, base, area, line, dot, last, first, end, lowest);
  const absent = h("p", { class: "absent" });
  return {
    root: [title, reading, chart, absent],
    draw(steps, run) {
      setText(title, `Best ${visible(run.objective ?? "metric")} of any epoch${run.ended === null ? " so far" : ""}`);
      const isEmpty = steps === null || steps.length === 0;
      absent.hidden = !isEmpty;
      chart.style.display = isEmpty ? "none" : "";
      setText(absent, steps === null ? "Reading the curves …" : "No epoch has ended yet.");
      if (isEmpty) {
        setText(reading, "");
        return;
      }
      const until = run.ended ?? run.updated ?? steps.at(-1)[0];
      const start = run.started ?? steps[0][0];
      setText(reading, `${steps.length === 1 ? "Set once" : `Bettered ${steps.length - 1} times`}; last by ${visible(steps.at(-1)[2])} after ${duration(steps.at(-1)[0] - start)}.`);
      const width = chart.parentNode?.clientWidth - 36 || USUAL_WIDTH;
      const right = width - INSET.right;
      chart.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
      base.setAttribute("x2", right);
      end.setAttribute("x", right);
      last.setAttribute("x", right + 10);
      const shape = place(steps, start, until, run.direction, right);
      line.setAttribute("d", shape.line);
      area.setAttribute("d", shape.area);
      dot.setAttribute("cx", shape.x);
      dot.setAttribute("cy", shape.y);
      last.setAttribute("y", shape.y);
      lowest.setAttribute("y", shape.firstY + 14 > HEIGHT - INSET.bottom ? shape.firstY - 8 : shape.firstY + 14);
      lowest.setAttribute("x", shape.firstX + 6);
      setText(last, score(steps.at(-1)[1]));
      setText(lowest, steps.length > 1 ? score(steps[0][1]) : "");
      setText(first, "start");
      setText(end, run.ended === null && !run.driver ? "now" : duration(until - start));
      chart.setAttribute("aria-label", `${title.textContent}: ${score(steps.at(-1)[1])}. ${reading.textContent}`);
    },
  };
}

function place(steps, start, until, direction, end) {
  const values = steps.map((step) => step[1]);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const [top, bottom] = [INSET.top, HEIGHT - INSET.bottom - (high > low ? 22 : 60)];
  const x = (t) => INSET.left + ((end - INSET.left) * (t - start)) / (until - start || 1);
  const up = (value) => (high > low ? (value - low) / (high - low) : 1);
  const y = (value) => (direction === "min" ? top + (bottom - top) * (1 - up(value)) : bottom - (bottom - top) * up(value));
  const round = (value) => value.toFixed(1);
  let path = `M${round(x(steps[0][0]))} ${round(y(values[0]))}`;
  for (const step of steps.slice(1)) path += `H${round(x(step[0]))}V${round(y(step[1]))}`;
  const right = round(Math.max(x(until), x(steps.at(-1)[0])));
  path += `H${right}`;
  const floor = HEIGHT - INSET.bottom;
  return { line: path, area: `${path}V${floor}H${round(x(steps[0][0]))}Z`, x: right, y: round(y(values.at(-1))), firstX: x(steps[0][0]), firstY: y(values[0]) };
}
