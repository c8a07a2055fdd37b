/** Learning curves as series of points: positions, smoothing, quartiles, and what no pixel can show left out. No DOM. */

/** What the x axis can be: name of the choice, label of the axis, its unit. */
export const AXES = {
  epoch: ["epochs", "epoch", "epochs"],
  run: ["time of the run", "since the run's start", "seconds"],
  own: ["time of the member", "since the member's first start", "seconds"],
  samples: ["samples", "samples seen", "samples"],
};

/**
 * Exponential smoothing: each value is the mean of those before it, of which one that lies `halflife` back on the x axis weighs half as much (0: as they
 * are). Absent values stay absent.
 */
export function smooth(values, xs, halflife) {
  if (!(halflife > 0)) return values;
  let [sum, mass, last] = [0, 0, null];
  return values.map((value, i) => {
    if (value === null || value === undefined) return null;
    const left = last === null ? 0 : 0.5 ** ((xs[i] - last) / halflife);
    [sum, mass, last] = [sum * left + value, mass * left + 1, xs[i]];
    return sum / mass;
  });
}

/**
 * The positions of a curve's points on the x axis.
 * `origins`: `run` and `own`, Unix seconds of the run's and the member's start; `samples` of one epoch.
 */
export function positions(curve, axis, origins) {
  if (axis === "run") return curve.t.map((t) => t - origins.run);
  if (axis === "own") return curve.t.map((t) => t - origins.own);
  if (axis === "samples") return curve.epoch.map((epoch) => (epoch + 1) * origins.samples);
  return curve.epoch.map((epoch) => epoch + 1);
}

/** The extent of the points of all series within `[from, to]`: `{ x: [lo, hi], y: [lo, hi] }`, null where there is none. */
export function extent(series, log, from = -Infinity, to = Infinity) {
  let [left, right, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
  for (const { xs, ys } of series) {
    for (let i = 0; i < xs.length; i += 1) {
      const value = ys[i];
      if (value === null || value === undefined || (log && value <= 0)) continue;
      if (xs[i] < left) left = xs[i];
      if (xs[i] > right) right = xs[i];
      if (xs[i] < from || xs[i] > to) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return left > right ? null : { x: [left, right], y: low > high ? null : [low, high] };
}

/** The value below which a share of sorted numbers lies, interpolated. */
export function quantile(sorted, share) {
  const at = (sorted.length - 1) * share;
  const below = Math.floor(at);
  return sorted[below] + (at - below) * ((sorted[below + 1] ?? sorted[below]) - sorted[below]);
}

/** Up to `most` positions at which quartiles are taken: all that occur, or evenly spaced ones where they are more. */
export function bandPositions(series, most = 120) {
  const all = new Set();
  for (const { xs } of series) for (const x of xs) if (all.size <= most) all.add(x);
  if (all.size <= most) return [...all].sort((a, b) => a - b);
  const { x } = extent(series.map(({ xs }) => ({ xs, ys: xs })), false);
  return Array.from({ length: most }, (_, i) => x[0] + ((x[1] - x[0]) * i) / (most - 1));
}

/** Median and quartiles over all series at each position, of those that reach it: `[x, lower, median, upper]`, ... */
export function band(series, at, least = 4) {
  const columns = at.map(() => []);
  for (const { xs, ys } of series) {
    let i = 0;
    for (let k = 0; k < at.length && i < xs.length; k += 1) {
      while (i < xs.length && xs[i] < at[k]) i += 1;
      if (i === xs.length) break;
      const value = xs[i] === at[k] ? ys[i] : i === 0 ? null : between(xs, ys, i, at[k]);
      if (value !== null && value !== undefined) columns[k].push(value);
    }
  }
  const found = [];
  columns.forEach((values, k) => {
    if (values.length < least) return;
    const sorted = Float64Array.from(values).sort();
    found.push([at[k], quantile(sorted, 0.25), quantile(sorted, 0.5), quantile(sorted, 0.75)]);
  });
  return found;
}

function between(xs, ys, i, x) {
  const [a, b] = [ys[i - 1], ys[i]];
  if (a === null || a === undefined || b === null || b === undefined) return null;
  return a + ((b - a) * (x - xs[i - 1])) / (xs[i] - xs[i - 1] || 1);
}

/**
 * Calls `move(x, y)` and `line(x, y)` with the pixels of a series: absent values break the line, and a point that lies
 * within a pixel of the one before is left away.
 */
export function trace(series, xScale, yScale, move, line) {
  const { xs, ys } = series;
  let [started, lastX, lastY] = [false, 0, 0];
  for (let i = 0; i < xs.length; i += 1) {
    const value = ys[i];
    if (value === null || value === undefined || (yScale.log && value <= 0)) {
      started = false;
      continue;
    }
    const [x, y] = [xScale.at(xs[i]), yScale.at(value)];
    if (!started) move(x, y);
    else if (Math.abs(x - lastX) < 1 && Math.abs(y - lastY) < 1 && i < xs.length - 1) continue;
    else line(x, y);
    [started, lastX, lastY] = [true, x, y];
  }
}

/** The point of all series that is nearest to a pixel: `{ series, index, distance }`, null where none is within `most` pixels. */
export function nearest(series, xScale, yScale, px, py, most = 40) {
  let found = null;
  let best = most * most;
  for (const each of series) {
    const { xs, ys } = each;
    for (let i = 0; i < xs.length; i += 1) {
      const value = ys[i];
      if (value === null || value === undefined || (yScale.log && value <= 0)) continue;
      const dx = xScale.at(xs[i]) - px;
      if (dx * dx > best) continue;
      const dy = yScale.at(value) - py;
      const far = dx * dx + dy * dy;
      if (far < best) [best, found] = [far, { series: each, index: i, distance: Math.sqrt(far) }];
    }
  }
  return found;
}
