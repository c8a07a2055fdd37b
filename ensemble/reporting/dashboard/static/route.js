/** The page's address: `#curves?run=KEY&member=ID&select=a,b&filter=lr%3C0.1&samples=order%3Dwrong`. */

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // somebody wrote a lone %
  }
}

/** Reads a hash as `{ view, run, member, select, filter, samples }`. */
export function parseRoute(hash) {
  const [view, query = ""] = hash.replace(/^#/, "").split(/\?(.*)/s);
  const found = new Map(query.split("&").filter(Boolean).map((pair) => pair.split(/=(.*)/s)));
  const one = (name) => (found.has(name) ? decoded(found.get(name) ?? "") : null);
  const select = (found.get("select") ?? "").split(",").filter(Boolean).map(decoded);
  return { view: decoded(view), run: one("run"), member: one("member"), select, filter: one("filter") ?? "", samples: one("samples") };
}

/** Writes a hash; the reverse of `parseRoute`. */
export function formatRoute({ view, run, member, select, filter, samples }) {
  const parts = [];
  if (run) parts.push(`run=${encodeURIComponent(run)}`);
  if (member) parts.push(`member=${encodeURIComponent(member)}`);
  if (select?.length) parts.push(`select=${select.map(encodeURIComponent).join(",")}`);
  if (filter) parts.push(`filter=${encodeURIComponent(filter)}`);
  if (samples) parts.push(`samples=${encodeURIComponent(samples)}`);
  return `#${encodeURIComponent(view)}${parts.length ? `?${parts.join("&")}` : ""}`;
}
