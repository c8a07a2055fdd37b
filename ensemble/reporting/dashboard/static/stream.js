/** Streams of server-sent events. A hidden tab has none: all tabs of a browser share six connections to a server. */

const RETRY_MS = [500, 1000, 2000, 5000, 10000];

/**
 * Follows the stream at `url()` while the tab is shown; opens it again, with growing pauses, when it is lost, from what `url()` then says.
 * Handlers: `onData(data)`, `onState("live" | "lost")`, the second optional.
 */
export class Stream {
  constructor(url, handlers) {
    Object.assign(this, { url, handlers, failures: 0, events: null });
    this.show = () => (document.hidden ? this.pause() : this.open());
    document.addEventListener("visibilitychange", this.show);
    this.open();
  }

  open() {
    if (this.events !== null) return;
    this.events = new EventSource(this.url());
    this.events.onopen = () => {
      this.failures = 0;
      this.handlers.onState?.("live");
    };
    this.events.onmessage = (message) => this.handlers.onData(JSON.parse(message.data));
    this.events.onerror = () => {
      this.handlers.onState?.("lost");
      if (this.events.readyState !== EventSource.CLOSED) return; // it comes back by itself
      this.pause();
      this.timer = setTimeout(() => this.open(), RETRY_MS[Math.min(this.failures, RETRY_MS.length - 1)]);
      this.failures += 1;
    };
  }

  pause() {
    clearTimeout(this.timer);
    this.events?.close();
    this.events = null;
  }

  close() {
    document.removeEventListener("visibilitychange", this.show);
    this.pause();
  }
}
