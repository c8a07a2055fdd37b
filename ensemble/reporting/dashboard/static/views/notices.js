/** What the run has noticed: warnings, failures, what it did about them. */

import { fill, h } from "../dom.js";
import { clock, count } from "../format.js";
import { longText } from "../long_text.js";

const TONES = { error: "bad", failure: "bad", bad: "bad", warning: "warn", warn: "warn", good: "good" };
const MOST = 500;

/** A list of notices, the newest first. */
export function noticeList(notices) {
  const items = notices.map((notice) =>
    h("li", { "data-mark": "notice" },
      h("span", { class: "at" }, clock(notice.at_s)),
      longText(notice.text, TONES[notice.level] ?? null)));
  return h("ul", { class: "notices" }, items);
}

export const noticesView = {
  id: "notices",
  title: "Notices",
  needs: [],
  shown: () => true,
  mount(root, page) {
    return {
      update(changed) {
        if (!["notices", "view", "reset"].some((name) => changed.has(name))) return;
        const { notices } = page.store;
        if (notices.length === 0) {
          fill(root, h("p", { class: "absent" }, "Nothing to report."));
          return;
        }
        const shown = notices.slice(-MOST).reverse();
        const more = notices.length > MOST ? `The last ${MOST} of ${count(notices.length, "notice")}` : count(notices.length, "notice");
        fill(root, h("p", { class: "reading before" }, `${more}, the newest first; times since the run's start.`), h("div", { class: "card" }, noticeList(shown)));
      },
      close() {},
    };
  },
};
