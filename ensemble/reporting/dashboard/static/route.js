/** The page's address: `#curves?run=KEY&member=ID&axis=run&select=a,b&filter=lr%3C0.1`, `#compare?runs=KEY,KEY`; what it knows no other name for is a setting of the view. */

const OWN = ["run", "member", "select", "filter"];

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // somebody wrote a lone %
  }
}

/** Reads a hash as `{ view, run, member, select, filter, set }`; `set`: the texts of settings by name. */
export function parseRoute(hash) {
  const [view, query = ""] = hash.replace(/^#/, "").split(/\?(.*)/s);
  const found = new Map(query.split("&").filter(Boolean).map((pair) => pair.split(/=(.*)/s)));
  const one = (name) => (found.has(name) ? decoded(found.get(name) ?? "") : null);
  const select = (found.get("select") ?? "").split(",").filter(Boolean).map(decoded);
  const set = new Map([...found].filter(([name]) => !OWN.includes(name)).map(([name, text]) => [decoded(name), decoded(text ?? "")]));
  return { view: decoded(view), run: one("run"), member: one("member"), select, filter: one("filter") ?? "", set };
}

/** Writes a hash; the reverse of `parseRoute`. */
export function formatRoute({ view, run, member, select, filter, set }) {
  const parts = [];
  if (run) parts.push(`run=${encodeURIComponent(run)}`);
  if (member) parts.push(`member=${encodeURIComponent(member)}`);
  for (const [name, text] of set ?? []) parts.push(`${encodeURIComponent(name)}=${encodeURIComponent(text).replaceAll("%2C", ",")}`);
  if (select?.length) parts.push(`select=${select.map(encodeURIComponent).join(",")}`);
  if (filter) parts.push(`filter=${encodeURIComponent(filter)}`);
  return `#${encodeURIComponent(view)}${parts.length ? `?${parts.join("&")}` : ""}`;
}

/**
 * A view's settings: as an address has them where they are there and fit, else as in `defaults`. `fits`: by name, whether a value can be one; without it
 * one of the default's type can.
 */
export function readSettings(set, defaults, fits = {}) {
  const read = (name, fallback) => {
    const given = parsed(set.get(name));
    return set.has(name) && (Object.hasOwn(fits, name) ? fits[name](given) : typeof given === typeof fallback) ? given : fallback;
  };
  return Object.fromEntries(Object.entries(defaults).map(([name, fallback]) => [name, read(name, fallback)]));
}

/** The settings of an address with others: `changes` by name, null: as at first. */
export function changeSettings(set, changes) {
  const changed = new Map(set);
  for (const [name, value] of Object.entries(changes)) {
    changed.delete(name);
    if (value !== null) changed.set(name, typeof value === "string" && parsed(value) === value ? value : JSON.stringify(value));
  }
  return changed;
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}
