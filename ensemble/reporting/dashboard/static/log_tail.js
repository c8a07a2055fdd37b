/** The end of a member's log, as it grows: follows it, and keeps a bounded number of lines. */

import { h, setText } from "./dom.js";
import { count } from "./format.js";

const MOST_LINES = 4000;
const MOST_STANDING = 40_000; // lines that are kept where they are while the reader does not follow
const MOST_WAITING = 2 ** 20; // characters that are kept while it is hidden
const DRAW_MS = 200;

/** Shows a member's log in `root`, as the server has cleaned it; a frozen source shows the end that it holds. */
export class LogTail {
  constructor(page, member) {
    this.waiting = "";
    this.node = document.createTextNode("");
    this.lines = 0;
    this.cut = false; // whether older lines are not shown
    this.begun = false;
    this.timer = null;
    this.text = h("pre", { class: "log", tabindex: "0", role: "log", "aria-live": "off", "aria-label": `Log of ${member}` }, this.node);
    this.about = h("span", { class: "soft small" });
    this.follow = h("input", { type: "checkbox", checked: true, onchange: () => this.scroll() });
    this.text.addEventListener("wheel", () => this.notice(), { passive: true });
    this.text.addEventListener("keydown", () => this.notice());
    const tools = page.source.live ? h("label", { class: "check" }, this.follow, "Follow") : null;
    this.root = h("section", { class: "card", "aria-label": "Log" },
      h("div", { class: "card-head" }, h("h3", {}, "Log"), this.about, h("span", { class: "grow" }), tools), this.text);
    this.visibility = () => this.plan();
    document.addEventListener("visibilitychange", this.visibility);
    this.begin(page, member);
  }

  begin(page, member) {
    if (!page.source.live) {
      const frozen = page.source.log(member);
      if (frozen === null) setText(this.about, "not in this report; it is in the run directory");
      this.text.hidden = frozen === null;
      this.receive(frozen ?? "");
      return;
    }
    this.end = page.source.followLog(member, {
      onData: (piece) => {
        if (!this.begun) this.cut = piece.from > 0;
        this.begun = true;
        this.receive(piece.text);
      },
      onState: (state) => {
        this.state = state;
        this.tell();
      },
    });
  }

  receive(text) {
    this.waiting = (this.waiting + text).slice(-MOST_WAITING);
    this.plan();
  }

  plan() {
    if (this.timer !== null || document.hidden || this.waiting === "") return;
    this.timer = setTimeout(() => this.draw(), this.lines === 0 ? 0 : DRAW_MS);
  }

  draw() {
    this.timer = null;
    if (document.hidden || this.waiting === "") return;
    this.node.appendData(this.waiting);
    this.lines += this.waiting.split("\n").length - 1;
    this.waiting = "";
    let begin = 0; // of the lines that are kept
    for (; this.lines > (this.follow.checked ? MOST_LINES : MOST_STANDING); this.lines -= 1) begin = this.node.data.indexOf("\n", begin) + 1;
    this.node.deleteData(0, begin);
    this.cut ||= begin > 0;
    this.scroll();
    this.tell();
  }

  tell() {
    const parts = [this.lines ? `${this.cut ? "the last " : ""}${count(this.lines, "line")}` : "nothing yet"];
    if (this.state === "lost") parts.push("connection lost, trying again");
    setText(this.about, parts.join(", "));
  }

  /** Scrolling up ends following; scrolling to the end begins it again. */
  notice() {
    requestAnimationFrame(() => {
      const { scrollTop, clientHeight, scrollHeight } = this.text;
      this.follow.checked = scrollTop + clientHeight >= scrollHeight - 24;
    });
  }

  scroll() {
    if (this.follow.checked) this.text.scrollTop = this.text.scrollHeight;
  }

  close() {
    clearTimeout(this.timer);
    document.removeEventListener("visibilitychange", this.visibility);
    this.end?.();
  }
}
