/**
 * The filter language of the page. Terms stand apart by blanks and must all hold:
 *
 *     cnn              the text stands in the member's name, state, place or hyperparameters
 *     state:failed     the value of `state` contains the text; `state:failed,paused` is either
 *     lr<0.1           a number is compared: < <= > >= = !=
 *     -wide            the term after the minus must not hold
 *     "two words"      quotes keep blanks
 *
 * The name on the left is a column, a hyperparameter or a metric.
 */

const TERM = /-?(?:"[^"]*"|[^\s"])+/g;
const PARTS = /^([^<>=!:"]+)(<=|>=|!=|<|>|=|:)(.*)$/;
const COLUMNS = new Set([
  "id", "number", "state", "epoch", "epochs", "step", "done", "metric", "workers", "node", "place", "cohort", "attempts",
  "failures", "samples_per_s", "left_s", "waited", "synced", "memory_gb", "error", "reason", "first_epoch", "options",
]);

function unquoted(text) {
  return text.replaceAll('"', "");
}

/** Splits a filter into terms `{ not, name, operator, wanted }`; `name` is null for plain text. */
export function parseFilter(text) {
  return (String(text).match(TERM) ?? []).map((term) => {
    const not = term.length > 1 && term.startsWith("-");
    const body = not ? term.slice(1) : term;
    const parts = body.match(PARTS);
    if (parts === null) return { not, name: null, operator: null, wanted: unquoted(body).toLowerCase() };
    return { not, name: unquoted(parts[1]), operator: parts[2], wanted: unquoted(parts[3]).toLowerCase() };
  });
}

/** The value that a name has in a member's row; undefined where nothing is called so. */
export function valueOf(member, name) {
  if (Object.hasOwn(member.params ?? {}, name)) return member.params[name];
  if (COLUMNS.has(name)) return member[name] ?? null;
  if (Object.hasOwn(member.metrics ?? {}, name)) return member.metrics[name];
  return undefined;
}

function haystack(member) {
  const params = Object.entries(member.params ?? {}).map(([name, value]) => `${name}=${value}`);
  return [member.id, member.state, member.place, member.options, ...params].join(" ").toLowerCase();
}

const COMPARE = {
  "<": (a, b) => a < b,
  "<=": (a, b) => a <= b,
  ">": (a, b) => a > b,
  ">=": (a, b) => a >= b,
};

function holds(term, member) {
  if (term.name === null) return haystack(member).includes(term.wanted);
  const value = valueOf(member, term.name);
  if (value === undefined || value === null) return term.operator === "!=" && value === null;
  const text = String(value).toLowerCase();
  if (term.operator === ":") return term.wanted.split(",").some((each) => text.includes(each));
  const wanted = Number(term.wanted);
  const isNumeric = typeof value === "number" && term.wanted !== "" && Number.isFinite(wanted);
  if (term.operator === "=") return isNumeric ? value === wanted : text === term.wanted;
  if (term.operator === "!=") return isNumeric ? value !== wanted : text !== term.wanted;
  return isNumeric && COMPARE[term.operator](value, wanted);
}

/** A test of one member's row for a filter. */
export function matcher(text) {
  const terms = parseFilter(text);
  return (member) => terms.every((term) => holds(term, member) !== term.not);
}

/** Why a filter cannot hold, in one line; null where all its names are known. */
export function filterProblem(text, members) {
  for (const term of parseFilter(text)) {
    if (term.name === null || COLUMNS.has(term.name)) continue;
    let known = false;
    for (const member of members) {
      if (valueOf(member, term.name) !== undefined) {
        known = true;
        break;
      }
    }
    if (!known) return `No column, hyperparameter or metric is called ${term.name}.`;
  }
  return null;
}
