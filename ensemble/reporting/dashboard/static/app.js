/** Starts the page: opens a run, follows it, shows a view, and paces the drawing. */

import { send, tellAnswers } from "./actions.js";
import { Documents } from "./documents.js";
import { changeSettings, formatRoute, parseRoute, readSettings } from "./route.js";
import { buildShell } from "./shell.js";
import { openSource } from "./source.js";
import { Store } from "./store.js";
import { VIEWS } from "./views/index.js";

const INTERVAL_MS = 200; // at most 5 drawings a second
const REST = 3; // times the last drawing's duration pass before the next
const TICK_MS = 1000;
const DIAGNOSE_MS = 2000;
const LIST_MS = 30000;

const findView = (id) => VIEWS.find((view) => view.id === id);

/** The whole page. Views get it as `page`: `{ store, source, route, runs, views, go, act, settings, set }`. */
class App {
  constructor(root) {
    this.store = new Store();
    this.source = openSource();
    this.store.isLive = this.source.live;
    this.route = parseRoute(location.hash);
    this.kept = new Map(); // settings of views that were seen
    this.runs = [];
    this.views = VIEWS;
    this.connection = this.source.live ? "opening" : "frozen";
    this.trouble = null;
    this.changed = new Set();
    this.pending = false;
    this.drawnAt = -INTERVAL_MS;
    this.tookMs = 0;
    this.view = null;
    this.opened = undefined; // no run and no list yet
    this.following = false;
    this.documents = new Documents(this.source, this.store, () => (this.store.run === null ? [] : (this.view?.view.needs ?? [])), (error) => (error === null ? (this.trouble = null) : this.fail(error)));
    this.sent = new Map(); // requests of this page that the run has not answered yet
    this.stopping = null; // the state in which the run was asked to stop, until it has another one
    this.shell = buildShell(root, this);
    this.store.subscribe((changed) => this.note(changed));
    addEventListener("hashchange", () => this.follow());
    addEventListener("keydown", (event) => this.shell.press(event));
    document.addEventListener("visibilitychange", () => this.schedule());
    setInterval(() => this.tick(), TICK_MS);
    setInterval(() => this.renewRuns(), LIST_MS);
  }

  async start() {
    try {
      this.runs = await this.source.runs();
    } catch (error) {
      this.fail(error);
    }
    await this.follow();
  }

  /** The key of the run that the address means; null where the list of runs is to be shown. */
  key() {
    if (!this.source.live) return "frozen";
    if (this.route.run !== null) return this.route.run;
    return this.runs.length === 1 && !findView(this.route.view)?.ofRuns ? this.runs[0].key : null;
  }

  /** Does what the address says: opens its run, selects, filters, shows its view. */
  async follow() {
    const route = parseRoute(location.hash);
    this.route = route;
    this.kept.set(route.view, route.set);
    const key = this.key();
    this.following = true; // the address is the source now: it is not written
    if (key !== this.opened) await this.open(key);
    this.store.setFilter(route.filter);
    this.store.select(route.select);
    this.following = false;
    this.show();
  }

  async open(key) {
    this.close?.();
    this.close = null;
    this.opened = key;
    this.stopping = null;
    this.store.clear();
    this.documents.clear();
    if (key === null) {
      this.close = this.source.followRuns({ onData: (runs) => this.noteRuns(runs), onState: (state) => this.setConnection(state) });
      return;
    }
    this.source.open(key);
    try {
      const state = await this.source.document("state");
      if (key !== this.opened) return; // another run was opened meanwhile
      this.store.load(state);
      this.trouble = null;
    } catch (error) {
      this.fail(error);
      return;
    }
    if (!this.source.live) return;
    this.close = this.source.follow({ onData: (state) => this.take(state), onState: (state) => this.setConnection(state) });
  }

  /** Takes the state as it is now; documents that have become others meanwhile are fetched again. */
  take(state) {
    for (const name of this.store.load(state)) this.documents.renew(name);
  }

  fail(error) {
    if (error.status === 401 || error.status === 403) this.trouble = "This page's key is not valid any more. Open the address that `ensemble dashboard` printed last.";
    else if (error.status === undefined) this.trouble = "The server does not answer. If it has ended, start `ensemble dashboard` again and open the address that it prints.";
    else this.trouble = `The run cannot be read: ${error.message}.`;
    this.note(new Set(["trouble"]));
  }

  setConnection(state) {
    if (state === this.connection) return;
    this.connection = state;
    if (state === "live") this.trouble = null;
    else this.diagnose();
    this.note(new Set(["connection"]));
  }

  /** Says why the stream is lost, until it is there again: a stream itself is told no more than that it is. */
  async diagnose() {
    while (this.connection === "lost") {
      try {
        await this.source.runs();
      } catch (error) {
        if (this.connection === "lost") this.fail(error);
      }
      await new Promise((resolve) => setTimeout(resolve, DIAGNOSE_MS));
    }
  }

  /** Beside a run, which has a stream of its own, the list is asked for now and then. */
  async renewRuns() {
    if (!this.source.live || !this.opened || document.hidden || this.connection !== "live") return;
    try {
      this.noteRuns(await this.source.runs());
    } catch {
      // the stream says when the server is lost
    }
  }

  noteRuns(runs) {
    this.runs = runs;
    this.note(new Set(["runs"]));
    if (this.opened === null && this.key() !== null) this.follow();
  }

  note(changed) {
    for (const name of changed) this.changed.add(name);
    if (changed.has("selection") || changed.has("filter")) this.writeRoute();
    if (changed.has("answers")) tellAnswers(this);
    this.schedule();
  }

  tick() {
    if (this.store.run === null || this.store.run.ended !== null || this.connection !== "live") return;
    this.note(new Set(["clock"]));
  }

  /** Puts selection and filter into the address without a step in the history. */
  writeRoute() {
    if (this.store.run === null || this.following) return;
    const route = { ...this.route, select: [...this.store.selection], filter: this.store.filter };
    const hash = formatRoute(route);
    if (hash === location.hash) return;
    this.route = route;
    history.replaceState(null, "", hash);
  }

  /** Opens a view; `options`: `member`, `run`, `select`, `filter`. Selection, filter and the view's settings stay unless given. */
  go(view, options = {}) {
    location.hash = this.link(view, options);
  }

  /** The address of a view, as of `go`. */
  link(view, options = {}) {
    const route = { view, run: this.route.run, member: null, select: [...this.store.selection], filter: this.store.filter, set: this.kept.get(view) };
    return formatRoute({ ...route, ...options });
  }

  /** The settings of the view that is shown, as of `readSettings`: a view reads them when it is mounted, anew where the address has others. */
  settings(defaults, fits) {
    return readSettings(this.route.set, defaults, fits);
  }

  /** Puts settings of the view that is shown into the address, without a step in the history; null: as at first. */
  set(changes) {
    this.route = { ...this.route, set: changeSettings(this.route.set, changes) };
    this.kept.set(this.route.view, this.route.set);
    this.view.key = this.viewKey(this.view.view);
    this.writeRoute();
    this.note(new Set(["settings"]));
  }

  viewKey({ id }) {
    return JSON.stringify([this.opened, id, id === "member" ? this.route.member : "", [...this.route.set]]);
  }

  /** Sends a request to the run and shows the answer; `body` as of the server's `actions`. */
  act(verb, body = {}, onAnswer = undefined) {
    return send(this, verb, body, onAnswer);
  }

  setStopping(isStopping) {
    this.stopping = isStopping ? this.store.run.state.word : null;
    this.note(new Set(["run"]));
  }

  /** Whether the run was asked to stop from this page and has not yet. */
  isStopping() {
    if (this.stopping !== this.store.run?.state.word || this.store.run.ended !== null) this.stopping = null;
    return this.stopping !== null;
  }

  show() {
    const named = findView(this.route.view);
    const next = this.opened === null && !named?.ofRuns ? findView("runs") : (named ?? VIEWS[0]);
    const key = this.viewKey(next);
    if (this.view?.key !== key) {
      this.view?.mounted.close?.();
      const root = this.shell.freshRoot(next);
      next.renews?.forEach((name) => this.documents.forget(name)); // of a run in progress it is another one each time
      this.view = { key, view: next, root, drawn: 0, mounted: next.mount(root, this) };
    }
    this.route = { ...this.route, view: next.id };
    this.documents.fetchNeeds();
    this.note(new Set(["view"]));
  }

  schedule() {
    if (this.pending || this.changed.size === 0 || document.hidden) return;
    this.pending = true;
    const since = performance.now() - this.drawnAt;
    const rest = Math.max(INTERVAL_MS, REST * this.tookMs) - since;
    const frame = () => requestAnimationFrame(() => this.draw());
    if (rest > 0) setTimeout(frame, rest);
    else frame();
  }

  draw() {
    this.pending = false;
    if (document.hidden || this.view === null) return;
    const begun = performance.now();
    const changed = this.changed;
    this.changed = new Set();
    this.shell.update(changed);
    if (this.store.run !== null || this.view.view.ofRuns) {
      this.view.mounted.update(changed);
      this.view.drawn += 1;
      this.view.root.setAttribute("data-drawn", this.view.drawn);
    }
    document.body.setAttribute("data-offset", this.store.offset ?? "");
    this.drawnAt = performance.now();
    this.tookMs = this.drawnAt - begun;
    this.schedule();
  }
}

new App(document.getElementById("app")).start();
