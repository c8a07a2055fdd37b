/** Attempts of members as rows of a timeline, by node and cohort or device. No DOM. */

import { STATES } from "./store.js";

/**
 * All attempts of these members: `{ key, id, number, attempt, node, devices, cohort, placed, started, ended, outcome,
 * again, moved }`. `ended` is null while one runs; `again`: it follows a failed or interrupted one; `moved`: it goes on
 * elsewhere. One that a restart of the run closed ended with its last epoch.
 */
export function listAttempts(store, ids) {
  const found = [];
  for (const id of ids) {
    const spans = store.spans.get(id) ?? [];
    const number = store.members.get(id)?.number ?? 0;
    spans.forEach(([attempt, node, devices, cohort, placed, started, ended, outcome], i) => {
      const before = spans[i - 1];
      const known = { key: `${i} ${id}`, id, number, attempt, node, devices: devices.filter((each) => each !== null), cohort, placed, started, ended };
      const again = before !== undefined && before[7] !== "moved" && before[0] !== attempt;
      if (outcome === "waiting") Object.assign(known, { outcome: "interrupted", ended: lastEpochEnd(store, id, placed, ended) ?? started ?? placed });
      else known.outcome = outcome === "running" || Object.hasOwn(STATES, outcome) ? outcome : "interrupted";
      found.push({ ...known, again, moved: outcome === "moved" });
    });
  }
  return found;
}

function lastEpochEnd(store, id, from, to) {
  return epochEnds(store, id).findLast((t) => t >= from && t <= (to ?? Infinity));
}

/** When the epochs of a member ended, Unix seconds; none while the curves are not loaded. */
export function epochEnds(store, id) {
  const all = store.curves?.members;
  return all && Object.hasOwn(all, id) ? all[id].t : [];
}

/** What a place is called: `GPU 1`, `GPU 0 + 1`, else `stream group 0` or `alone`. */
export function nameDevices(devices, nodes) {
  const names = devices.map((id) => {
    for (const node of nodes) {
      const at = node.gpus.findIndex((gpu) => gpu.id === id);
      if (at >= 0) return String(at);
    }
    return String(id);
  });
  return names.length ? `GPU ${names.join(" + ")}` : "";
}

/** `stream group 0`, or `alone` for a member that prepares its own samples. */
export function nameCohort(cohort) {
  return cohort === null || cohort === undefined ? "alone" : `stream group ${cohort}`;
}

/**
 * Groups of rows: `[{ node, label, rows: [{ key, member, attempts }] }]`, by node, then by `by`: "cohort" or "device".
 * Packed, a row holds attempts of any member that do not overlap; else those of one member.
 */
export function arrange(attempts, by, packed, nodes) {
  const groups = new Map();
  for (const each of attempts) {
    const place = (by === "device" && nameDevices(each.devices, nodes)) || nameCohort(each.cohort);
    const name = JSON.stringify([each.node, place]);
    if (!groups.has(name)) groups.set(name, { key: name, node: each.node, label: place, first: each.cohort ?? Infinity, attempts: [] });
    groups.get(name).attempts.push(each);
  }
  const order = new Intl.Collator("en", { numeric: true });
  const sorted = [...groups.values()].sort((a, b) =>
    order.compare(a.node, b.node) || (by === "device" ? order.compare(a.label, b.label) : a.first - b.first));
  for (const group of sorted) {
    group.attempts.sort((a, b) => a.placed - b.placed || a.number - b.number);
    group.rows = packed ? pack(group) : byMember(group);
  }
  return sorted;
}

function byMember(group) {
  const rows = new Map();
  for (const each of group.attempts) {
    if (!rows.has(each.id)) rows.set(each.id, { key: `${group.key} ${each.id}`, member: each.id, attempts: [] });
    rows.get(each.id).attempts.push(each);
  }
  return [...rows.values()];
}

/** Puts each attempt into the first row that is free by then. */
function pack(group) {
  const rows = [];
  for (const each of group.attempts) {
    let row = rows.find((known) => known.free <= each.placed);
    if (row === undefined) rows.push((row = { key: `${group.key} ${rows.length}`, member: null, attempts: [], free: 0 }));
    row.attempts.push(each);
    row.free = each.ended ?? Infinity;
  }
  return rows;
}
