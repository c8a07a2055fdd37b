/** The view "Samples": what the ensemble gets wrong, is unsure of or disagrees on most, with the records themselves. */

import { choice } from "../card.js";
import { fill, h, setText, svg } from "../dom.js";
import { count, visible } from "../format.js";

const TONES = { true: "good", false: "bad" };

export const samplesView = {
  id: "samples",
  title: "Samples",
  needs: [],
  print: false, // its records are read from the data, not from the run
  shown: (store) => store.run !== null && (store.isLive || store.samples !== null),
  mount: (root, page) => new SamplesView(root, page),
};

class SamplesView {
  constructor(root, page) {
    this.page = page;
    this.asked = null;
    this.controls = h("div", { class: "toolbar first-head" });
    this.reading = h("p", { class: "reading", role: "status" });
    this.note = h("p", { class: "soft", role: "status" });
    this.list = h("ol", { class: "samples", "aria-label": "Samples" });
    fill(root, this.controls, this.reading, this.note, this.list);
  }

  close() {
    this.asked = null; // what comes now is for nobody
  }

  update(changed) {
    const query = new URLSearchParams([...this.page.route.set]).toString();
    if (query !== this.asked || changed.has("reset")) this.load(query);
  }

  async load(query) {
    this.asked = query;
    const { key } = this.page.source; // the source goes on to another run before this view is closed
    const isStale = () => query !== this.asked || key !== this.page.source.key;
    setText(this.reading, "The samples are being ordered.");
    setText(this.note, "");
    try {
      const chosen = new URLSearchParams(query).get("order") ?? "wrong";
      const found = this.page.store.samples?.[chosen] ?? (await this.page.source.document(`samples?${query}`));
      if (isStale()) return;
      this.draw(query, found);
      if (found.rows.length === 0) return;
      const indices = found.rows.map(({ index }) => index).join(",");
      const { records, note, missing } = found.records ?? (await this.page.source.document(`records?id=${encodeURIComponent(found.id)}&index=${indices}`));
      if (isStale()) return;
      setText(this.note, visible(missing ?? note));
      for (const { index } of found.rows) fill(this.shown.get(index), missing === null ? drawRecord(records[index]) : null);
    } catch (error) {
      if (!isStale()) setText(this.list.children.length ? this.note : this.reading, visible(error.message));
    }
  }

  draw(query, found) {
    const go = (change) => this.page.go("samples", { set: new Map([...new URLSearchParams(query), ["page", "0"], ...Object.entries(change)]) });
    const pick = (label, choices, name) => (choices.length > 1 ? choice(label, choices.map(([value, title]) => [String(value), visible(title)]), String(found[name] ?? ""), (value) => go({ [name]: value })) : null);
    const classes = found.classes.length ? [["", "any"], ...found.classes] : [];
    const turn = (step, words) => h("button", { type: "button", class: "minor", disabled: found.pages <= found.page + step || found.page + step < 0, onclick: () => go({ page: String(found.page + step) }) }, words);
    fill(this.controls, pick("Order", found.orders, "order"), pick("Model", found.models, "of"), pick("True class", classes, "true"), pick("Predicted class", classes, "predicted"),
      found.pages > 1 ? [turn(-1, "Previous"), h("span", {}, `${found.page + 1} of ${found.pages}`), turn(1, "Next")] : null);
    setText(this.reading, visible([found.reading, found.missing, found.more].filter(Boolean).join(" ")));
    this.shown = new Map(found.rows.map(({ index }) => [index, h("div", { class: "record" }, "The record is being read.")]));
    if (found.rows.length) setText(this.note, "The records are being read.");
    fill(this.list, found.rows.map((row) => this.drawSample(row)));
  }

  drawSample({ index, score, target, prediction, right, members }) {
    const line = (name, said, tone) => [h("dt", {}, name), h("dd", { class: TONES[tone] ?? null }, visible(said))];
    const named = (id) => h("a", { href: this.page.link("member", { member: id }) }, visible(id));
    return h("li", { class: "card", "data-mark": "sample", "data-index": index }, this.shown.get(index),
      h("dl", {}, line("target", target), line("predicted", prediction, right)),
      h("details", {}, h("summary", {}, membersSaid(members)), h("dl", {}, members.map(([id, said, isRight]) => line(named(id), said, isRight)))),
      h("p", { class: "soft" }, `Sample ${index}, ${score}`));
  }
}

/** How many members there are, and how many of them are right, where a prediction can be. */
function membersSaid(members) {
  const judged = members.filter(([, , isRight]) => isRight !== null);
  return `${count(members.length, "member")}${judged.length ? `, ${judged.filter(([, , isRight]) => isRight).length} right` : ""}`;
}

function drawRecord({ fields, error }) {
  if (fields === undefined) return h("p", { class: "bad" }, `Not shown: ${visible(error)}.`);
  return fields.map(({ name, text, picture, lines }) =>
    h("div", { "data-field": name },
      picture ? h("img", { src: picture, alt: visible(name) }) : null,
      lines ? svg("svg", { viewBox: "0 0 240 64", role: "img", "aria-label": visible(name) }, lines.map((points) => svg("polyline", { points }))) : null,
      h("p", { class: picture || lines ? "soft" : null }, h("strong", {}, visible(name)), " ", visible(text))));
}
