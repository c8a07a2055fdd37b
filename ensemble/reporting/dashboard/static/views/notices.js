/** What the run has noticed: warnings, failures, what it did about them. */

import { fill, h } from "../dom.js";
import { clock, count, visible } from "../format.js";
import { longText } from "../long_text.js";

const TONES = { error: "bad", failure: "bad", bad: "bad", warning: "warn", warn: "warn", good: "good" };
const MOST = 500;

/** Why members failed: each cause once, with those that have it and what the log of one of them says. */
export function failureList(page) {
  const { failures } = page.store.run;
  const names = ({ members, more }) => [members.map((id) => [h("a", { href: page.link("member", { member: id }) }, visible(id)), " "]), more > 0 && `and ${more} more`];
  return failures.map((each) => h("section", { class: "card failure", "data-mark": "failure" },
    h("h3", { class: "bad" }, `Failed${each.reason ? ` (${visible(each.reason)})` : ""}`), longText(each.text, "reason"),
    h("p", {}, names(each)), each.advice && h("p", { class: "soft" }, visible(each.advice)),
    each.log && h("details", {}, h("summary", {}, `Log of ${visible(each.members[0])}, attempt ${each.attempt}`), h("pre", { class: "log" }, each.log))));
}

/** A list of notices, the newest first. */
export function noticeList(notices) {
  const items = notices.map((notice) =>
    h("li", { "data-mark": "notice" },
      h("span", { class: "at" }, clock(notice.at_s)),
      h("span", {}, longText(notice.text, TONES[notice.level] ?? null), notice.who && h("div", { class: "soft small" }, visible(notice.who)))));
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
        if (!["notices", "view", "reset"].some((name) => changed.has(name))) return; // a failure is a notice, too
        const { notices } = page.store;
        if (notices.length === 0) {
          fill(root, h("p", { class: "absent" }, "Nothing to report."));
          return;
        }
        const shown = notices.slice(-MOST).reverse();
        const all = count(notices.reduce((sum, each) => sum + each.count, 0), "notice");
        const more = notices.length > MOST ? `${all}, of which the last ${MOST} are shown` : all;
        fill(root, failureList(page), h("p", { class: "reading before" }, `${more}, the newest first; times since the run's start.`), h("div", { class: "card" }, noticeList(shown)));
      },
      close() {},
    };
  },
};
