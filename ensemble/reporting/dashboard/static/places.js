/** Who is where at a moment: members on the cores and GPUs of each node, by share. No DOM. */

/** Attempts that hold a place at a moment (Unix seconds): `[{ id, node, devices, started }]`. */
export function holders(store, ids, at) {
  const found = [];
  for (const id of ids) {
    for (const [, node, devices, , placed, started, ended] of store.spans.get(id) ?? []) {
      if (placed > at || (ended !== null && ended <= at)) continue;
      found.push({ id, node, devices: devices.filter((each) => each !== null), starting: started === null || started > at });
    }
  }
  return found;
}

/** The moment at which most attempts were under way: of the latest such, shortly after it began. */
export function busiest(store, ids) {
  const steps = [];
  for (const id of ids) {
    for (const [, , , , placed, , ended] of store.spans.get(id) ?? []) {
      steps.push([placed, 1]);
      if (ended !== null) steps.push([ended, -1]);
    }
  }
  steps.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  let [many, most, from, to] = [0, 0, null, null];
  steps.forEach(([t, by], i) => {
    many += by;
    if (many >= most && by > 0) [most, from, to] = [many, t, steps[i + 1]?.[0] ?? t];
  });
  return from === null ? null : (from + to) / 2;
}

/**
 * Nodes with their devices and who holds them: `[{ node, cores: device, gpus: [device] }]`; a device is
 * `{ capacity, held, pieces: [{ id, share, starting }] }`. Nodes that only attempts name are `gone`.
 */
export function layOut(store, found) {
  const nodes = new Map(store.nodes.map((node) => [node.name, makeNode(node)]));
  const owners = new Map();
  for (const each of nodes.values()) for (const gpu of each.gpus) owners.set(gpu.gpu.id, [each, gpu]);
  for (const { id, node, devices, starting } of found) {
    if (!nodes.has(node)) nodes.set(node, makeNode({ name: node, cpus: null, memory_gb: null, gpus: [], gone: true }));
    const member = store.members.get(id);
    const { cpus, gpus } = member?.shares ?? {};
    const ranks = member?.workers ?? 1;
    const homes = devices.map((device) => owners.get(device)).filter(Boolean);
    for (const [, gpu] of homes) hold(gpu, id, gpus ?? 1, starting);
    const hosts = homes.length ? homes.map(([host]) => host) : placesOf(member, node).map((name) => nodes.get(name)).filter(Boolean);
    for (const host of hosts) hold(host.cores, id, ((cpus ?? 1) * ranks) / hosts.length, starting);
  }
  return [...nodes.values()];
}

function makeNode(node) {
  const device = (capacity) => ({ capacity, held: 0, pieces: [] });
  return { node, cores: device(node.cpus ?? 0), gpus: node.gpus.map((gpu) => ({ ...device(1), gpu })) };
}

/** The nodes of a member's ranks: those that its place names, if this one is among them. */
function placesOf(member, node) {
  const names = (member?.place ?? "").split(" + ");
  return names.includes(node) ? names : [node];
}

function hold(device, id, share, starting) {
  const known = device.pieces.find((piece) => piece.id === id);
  if (known) known.share += share;
  else device.pieces.push({ id, share, starting });
  device.held += share;
}

/** Breaks a device into rows of so many units: `[{ units, pieces: [{ id, share, starting }], free }]`. */
export function rowsOf(device, perRow) {
  const capacity = Math.max(device.capacity, device.held, 1e-9);
  const rows = [];
  for (let from = 0; from < capacity - 1e-9; from += perRow) rows.push({ units: Math.min(perRow, capacity - from), pieces: [], free: 0 });
  let [at, room] = [0, rows[0].units];
  for (const piece of device.pieces) {
    let left = piece.share;
    while (left > 1e-9 && at < rows.length) {
      const part = Math.min(left, room);
      if (part > 1e-9) rows[at].pieces.push({ ...piece, share: part });
      [left, room] = [left - part, room - part];
      if (room <= 1e-9) [at, room] = [at + 1, rows[at + 1]?.units ?? 0];
    }
  }
  for (const row of rows) row.free = Math.max(0, row.units - row.pieces.reduce((sum, piece) => sum + piece.share, 0));
  return rows;
}
