/** Where the page's data comes from: a server that follows the run, or documents frozen inside the page. */

import { Stream } from "./stream.js";

/** An answer of the server that is not the thing asked for; `status` is its HTTP status. */
export class SourceError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function fetched(path, options) {
  const response = await fetch(path, { credentials: "same-origin", ...options });
  if (response.ok) return response.json();
  let said = null;
  try {
    said = (await response.json()).error;
  } catch {
    said = null; // not JSON: the status has to do
  }
  throw new SourceError(response.status, said ?? `the server answered ${response.status}`);
}

/** A server that follows runs. `base` is the address of its folder, with the slash. */
export class LiveSource {
  constructor(base = "") {
    this.base = base;
    this.live = true;
    this.key = null;
  }

  /** Chooses the run that the other calls are about. */
  open(key) {
    this.key = key;
  }

  at(path) {
    return `${this.base}api/runs/${encodeURIComponent(this.key)}/${path}`;
  }

  /** The runs that are served. */
  runs() {
    return fetched(`${this.base}api/runs`);
  }

  /** Follows the list of runs: handlers `onData(runs)`, `onState("live" | "lost")`. Returns what ends that. */
  followRuns(handlers) {
    const stream = new Stream(() => `${this.base}api/runs/events`, handlers);
    return () => stream.close();
  }

  /** One of the documents `state`, `curves`, `quality`, `importances`, `tables`. */
  document(name) {
    return fetched(this.at(name));
  }

  /** Follows the run: handlers `onData(state)`, each time that it has changed, and `onState("live" | "lost")`. Returns what ends that. */
  follow(handlers) {
    const url = this.at("events");
    const stream = new Stream(() => url, handlers);
    return () => stream.close();
  }

  /** Follows a member's log; handlers as of `follow`, data `{ text, from, to }`. Returns what ends that. */
  followLog(member, handlers) {
    let to = null;
    const path = this.at(`members/${encodeURIComponent(member)}/log`);
    const url = () => (to === null ? path : `${path}?from=${to}`);
    const onData = (piece) => {
      to = piece.to;
      handlers.onData(piece);
    };
    const stream = new Stream(url, { ...handlers, onData });
    return () => stream.close();
  }

  /** Sends a request to the run; returns `{ request }`. */
  act(body) {
    return this.ask(`runs/${encodeURIComponent(this.key)}/actions`, body);
  }

  /** What the server answers at a path of its interface, to `body` where one is sent. */
  ask(path, body) {
    const sent = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
    return fetched(`${this.base}api/${path}`, body === undefined ? {} : sent);
  }
}

/** Documents that lie in the page: `{ state, curves, quality, importances, logs: { ID: text } }`, each but `state` optional. */
export class FrozenSource {
  constructor(documents) {
    this.documents = documents;
    this.live = false;
    this.key = null;
  }

  open() {}

  async runs() {
    return [];
  }

  async document(name) {
    return this.documents[name] ?? null;
  }

  /** The end of a member's log as it was, or null. */
  log(member) {
    return this.documents.logs?.[member] ?? null;
  }
}

/** The source of this page: frozen where it holds an element `documents`, else live. */
export function openSource(base = "") {
  const element = document.getElementById("documents");
  return element === null ? new LiveSource(base) : new FrozenSource(JSON.parse(element.textContent));
}
