/** The page's address: `#curves?run=KEY&member=ID&select=a,b&filter=lr%3C0.1`, and `#compare?runs=KEY,KEY`. */

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // somebody wrote a lone %
  }
}

/** Reads a hash as `{ view, run, runs, member, select, filter }`. */
export function parseRoute(hash) {
  const [view, query = ""] = hash.replace(/^#/, "").split(/\?(.*)/s);
  const found = new Map(query.split("&").filter(Boolean).map((pair) => pair.split(/=(.*)/s)));
  const one = (name) => (found.has(name) ? decoded(found.get(name) ?? "") : null);
  const list = (name) => (found.get(name) ?? "").split(",").filter(Boolean).map(decoded);
  return { view: decoded(view), run: one("run"), runs: list("runs"), member: one("member"), select: list("select"), filter: one("filter") ?? "" };
}

/** Writes a hash; the reverse of `parseRoute`. */
export function formatRoute({ view, run, runs, member, select, filter }) {
  const parts = [];
  if (runs?.length) parts.push(`runs=${runs.map(encodeURIComponent).join(",")}`);
  if (run) parts.push(`run=${encodeURIComponent(run)}`);
  if (member) parts.push(`member=${encodeURIComponent(member)}`);
  if (select?.length) parts.push(`select=${select.map(encodeURIComponent).join(",")}`);
  if (filter) parts.push(`filter=${encodeURIComponent(filter)}`);
  return `#${encodeURIComponent(view)}${parts.length ? `?${parts.join("&")}` : ""}`;
}
