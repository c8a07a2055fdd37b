/** Streams of server-sent events. All tabs of a browser share few connections to a server, so streams take turns when there are many. */

const RETRY_MS = [500, 1000, 2000, 5000, 10000];
const SLOTS = 4; // HTTP/1.1 has six connections to a host for all tabs together; two stay free for documents and requests
const TURN_MS = 1000;
const MOST_TURNS = 5; // a stream that has not been opened by then lets others try

/** Takes one of the browser's slots for a stream, waiting for its turn. Returns `{ isWanted(), release() }`; rejects once `signal` is aborted. */
async function takeSlot(signal) {
  const { locks } = navigator; // absent on plain HTTP from another machine: there a hidden tab gives way
  if (locks === undefined) return { isWanted: async () => document.hidden, release: () => {} };
  const { held, pending } = await locks.query();
  const loads = Array(SLOTS).fill(0);
  for (const { name } of [...held, ...pending]) loads[Number(name.slice("ensemble-stream-".length))] += 1;
  const name = `ensemble-stream-${loads.indexOf(Math.min(...loads))}`;
  const isWanted = async () => (await locks.query()).pending.some((each) => each.name === name);
  return new Promise((resolve, reject) => {
    const hold = () => new Promise((release) => resolve({ isWanted, release }));
    locks.request(name, { signal }, hold).catch(reject);
  });
}

/**
 * Follows the stream at `url()`; opens it again, with growing pauses, when it is lost. Gives way to streams of other tabs that wait,
 * and goes on, from what `url()` then says, at its next turn; a hidden tab does so once it is shown.
 * Handlers: `onData(data)`, `onReset()`, `onState("live" | "lost")`, all but the first optional.
 */
export class Stream {
  constructor(url, handlers) {
    this.url = url;
    this.handlers = handlers;
    this.failures = 0;
    this.queue = null;
    this.slot = null;
    this.events = null;
    this.show = () => !document.hidden && this.take();
    document.addEventListener("visibilitychange", this.show);
    this.take();
  }

  async take() {
    if (this.queue !== null) return; // it waits for a slot, or has one
    const queue = new AbortController();
    this.queue = queue;
    let slot;
    try {
      slot = await takeSlot(queue.signal);
    } catch (error) {
      if (queue.signal.aborted) return;
      throw error;
    }
    if (queue.signal.aborted) {
      slot.release();
      return;
    }
    this.slot = slot;
    this.turns = 0;
    this.sharing = setInterval(() => this.share(), TURN_MS);
    this.open();
  }

  open() {
    this.events = new EventSource(this.url());
    this.events.onopen = () => {
      this.failures = 0;
      this.handlers.onState?.("live");
    };
    this.events.onmessage = (message) => this.handlers.onData(JSON.parse(message.data));
    this.events.addEventListener("reset", () => this.handlers.onReset?.());
    this.events.onerror = () => {
      this.handlers.onState?.("lost");
      if (this.events.readyState !== EventSource.CLOSED) return; // it comes back by itself
      this.timer = setTimeout(() => this.open(), RETRY_MS[Math.min(this.failures, RETRY_MS.length - 1)]);
      this.failures += 1;
    };
  }

  async share() {
    const { slot } = this;
    this.turns += 1;
    if (this.events.readyState !== EventSource.OPEN && this.turns < MOST_TURNS) return;
    if (!(await slot.isWanted()) || this.slot !== slot) return;
    this.give();
    this.show();
  }

  give() {
    clearTimeout(this.timer);
    clearInterval(this.sharing);
    this.events?.close();
    this.slot?.release();
    this.slot = null;
    this.queue = null;
  }

  close() {
    document.removeEventListener("visibilitychange", this.show);
    this.queue?.abort();
    this.give();
  }
}
