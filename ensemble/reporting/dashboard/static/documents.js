/** The documents of a run beside its state: fetched when a view needs them, and again when they are stale. No DOM. */

const RETRY_MS = 5000;
const RENEW_MS = 2000;
const DOCUMENTS = ["curves", "quality", "importances", "tables"];

/** Loads documents of `source` into `store`. `needs()` names those that are needed now; `onAnswer(error)` hears how each attempt ended, null where well. */
export class Documents {
  constructor(source, store, needs, onAnswer) {
    Object.assign(this, { source, store, needs, onAnswer });
    this.clear();
  }

  /** Forgets what was asked for: another run is opened. */
  clear() {
    this.wanted = new Set();
    this.renewing = new Set();
  }

  /** Fetches what is needed and absent or stale. None waits for another: some take the server minutes. */
  fetchNeeds() {
    for (const name of this.needs()) if (DOCUMENTS.includes(name) && !this.wanted.has(name)) this.fetch(name);
  }

  async fetch(name) {
    const { wanted } = this; // another set, once another run is opened
    wanted.add(name);
    try {
      const document = await this.source.document(name);
      if (wanted !== this.wanted || document === null) return;
      this.store.loadDocument(name, document);
      this.onAnswer(null);
    } catch (error) {
      if (wanted !== this.wanted) return;
      this.onAnswer(error);
      setTimeout(() => wanted.delete(name) && wanted === this.wanted && this.fetchNeeds(), RETRY_MS);
    }
  }

  /** Fetches a stale document again after a while, once for all changes until then: making one takes the server long. */
  renew(name) {
    const { renewing, wanted } = this;
    if (renewing.has(name)) return;
    renewing.add(name);
    setTimeout(() => {
      renewing.delete(name);
      wanted.delete(name);
      if (wanted === this.wanted) this.fetchNeeds();
    }, RENEW_MS);
  }

  /** Has a document be fetched again when a view that needs it is opened. */
  forget(name) {
    if (this.source.live) this.wanted.delete(name);
  }
}
