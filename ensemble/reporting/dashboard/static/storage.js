/** What the reader has chosen, kept in the browser; a page without storage, such as a report in a sandbox, forgets it. */

/** What was kept by a name; null where nothing was. */
export function read(name) {
  try {
    return JSON.parse(localStorage.getItem(`ensemble-${name}`));
  } catch {
    return null;
  }
}

/** Keeps what JSON can hold. */
export function write(name, value) {
  try {
    localStorage.setItem(`ensemble-${name}`, JSON.stringify(value));
  } catch {
    // it holds for this page alone
  }
}
