/** How the run stands, what it has used, what limits it. */

import { runButtons } from "../actions.js";
import { fill, h, setText } from "../dom.js";
import { count, duration, share, visible } from "../format.js";
import { longText } from "../long_text.js";
import { failureList, noticeList } from "./notices.js";
import { stateBar, stateLegend } from "./state_bar.js";
import { Tiles } from "../tiles.js";
import { plotChart } from "./plots.js";

const LAST_NOTICES = 6;

export const overviewView = {
  id: "overview",
  title: "Overview",
  needs: [],
  shown: () => true,
  mount: (root, page) => new Overview(root, page),
};

class Overview {
  constructor(root, page) {
    this.page = page;
    this.percent = h("span", { class: "figure" });
    this.left = h("span", { class: "soft" });
    this.buttons = h("div", { class: "buttons" });
    this.bar = h("div", {});
    this.legend = h("div", {});
    const progress = h("section", { class: "card progress", "aria-label": "Progress" },
      h("div", { class: "progress-head" }, this.percent, this.left, this.buttons), this.bar, this.legend);
    this.benefit = h("p", { class: "benefit", hidden: true });
    this.tiles = new Tiles(page);
    this.facts = h("dl", { class: "facts" });
    this.limits = h("section", { class: "card", "aria-label": "What limits the run" }, h("h3", {}, "What limits the run"), this.facts);
    this.notices = h("section", { class: "card", "aria-label": "Last notices" });
    this.made = h("dl", { class: "made two" });
    this.failures = h("div", {});
    this.curves = plotChart(page.store.run.curves, page.store, { height: 190 });
    const made = h("section", { class: "card", "aria-label": "Configuration" }, h("h3", {}, "Configuration"), this.made);
    fill(root, this.benefit, h("div", { class: "grid" }, h("div", {}, progress), h("div", {}, this.tiles.root), this.curves.root, this.failures, this.limits, this.notices, made));
  }

  update(changed) {
    const { store } = this.page;
    const any = (...names) => names.some((name) => changed.has(name)) || changed.has("view") || changed.has("reset");
    if (any("run", "clock", "members")) this.drawProgress(store);
    if (any("run")) this.tiles.draw(store.run.tiles);
    if (any("run")) this.drawFacts(store);
    if (any("run")) this.drawBenefit(store.run.benefit);
    if (any("run")) this.drawOrigin(store.run);
    if (any("run", "selection")) this.curves.draw(store.run.curves);
    if (any("notices")) this.drawNotices(store);
  }

  /** Whether combining the members has helped, in a sentence. */
  drawBenefit({ text, tone }) {
    setText(this.benefit, visible(text));
    this.benefit.className = `benefit ${tone}`;
    this.benefit.hidden = text === "";
  }

  close() {
    this.curves.close();
  }

  /** What the run is and was made with, and why members failed. */
  drawOrigin(run) {
    const key = JSON.stringify([run.configuration, run.failures]);
    if (key === this.originKey) return;
    this.originKey = key;
    fill(this.made, run.configuration.map(([label, text]) => [h("dt", {}, visible(label)), h("dd", {}, visible(text))]));
    fill(this.failures, failureList(this.page));
    this.failures.hidden = run.failures.length === 0;
  }

  drawProgress({ run }) {
    const done = run.done ?? 0; // rounded down: not 100 % before its end
    setText(this.percent, `${done < 0.01 ? share(done) : `${Math.floor(100 * done)} %`} done`);
    const left = run.ended !== null ? `in ${duration(run.wall_s)}` : run.driver ? "" : run.left ?? "";
    setText(this.left, left);
    const counts = JSON.stringify(run.counts);
    if (counts !== this.counts) {
      this.counts = counts;
      fill(this.bar, stateBar(run.counts));
      fill(this.legend, stateLegend(run.counts, (state) => this.page.go("members", { filter: `state:${state}` })));
    }
    const actions = run.actions.join(" ");
    if (actions === this.actions) return;
    this.actions = actions;
    fill(this.buttons, runButtons(this.page));
  }

  drawFacts({ run }) {
    const facts = JSON.stringify(run.facts);
    if (facts === this.known) return;
    this.known = facts;
    const items = run.facts.map((fact) => h("div", { "data-mark": "fact" }, h("dt", {}, visible(fact.label)), h("dd", { class: fact.tone || null }, longText(fact.text))));
    fill(this.facts, items.length ? items : h("p", { class: "absent" }, "Nothing that limits it is known."));
  }

  drawNotices({ notices }) {
    this.notices.hidden = notices.length === 0;
    if (notices.length === 0) return;
    const all = notices.reduce((sum, each) => sum + each.count, 0);
    const more = notices.length > LAST_NOTICES ? h("p", { class: "after" }, h("a", { href: this.page.link("notices") }, `All ${count(all, "notice")}`)) : null;
    fill(this.notices, h("h3", {}, "Notices"), noticeList(notices.slice(-LAST_NOTICES).reverse()), more);
  }
}
