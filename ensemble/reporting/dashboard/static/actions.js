/** Sends requests to the run, asks before those that cannot be taken back, and says what became of them. */

import { openDialog } from "./dialog.js";
import { h, setText } from "./dom.js";
import { count, visible } from "./format.js";

const QUESTIONS = {
  pause: "Each writes a checkpoint and frees its place. The run goes on; a paused member goes on when you resume it.",
  resume: "Each continues from its checkpoint as soon as a place is free.",
  cancel: "Each ends for good and is left out of the combined model. To continue it later, pause it instead.",
};
const ACTIVE = new Set(["waiting", "measuring", "placed", "running", "moved"]);

/**
 * Sends `{ verb, ...body }`; says what was sent, and later what the run answers. Returns the request's id, or null.
 * `onAnswer(done, said)` is told the answer, or why there is none.
 */
export async function send(page, verb, body, onAnswer) {
  const what = `${verb}${body.member ? ` ${body.member}` : body.members ? ` ${count(body.members.length, "member")}` : body.from ? ` a clone of ${body.from}` : ""}`;
  try {
    const { request } = await page.source.act({ verb, ...body });
    page.sent.set(request, { what: visible(what), toast: page.shell.say(`Sent: ${visible(what)}.`), onAnswer });
    if (verb === "stop") page.setStopping(true);
    tellAnswers(page);
    return request;
  } catch (error) {
    sayRefusal(page, `${visible(what)}: not done, ${error.message}`);
    onAnswer?.(false, error.message);
    return null;
  }
}

/** Says the run's answers to requests of this page that have not been told yet. */
export function tellAnswers(page) {
  for (const answer of page.store.answers) {
    const sent = page.sent.get(answer.request);
    if (sent === undefined) continue;
    page.sent.delete(answer.request);
    sent.toast.remove();
    const said = visible(answer.message ?? "");
    if (answer.done) page.shell.say(`${sent.what}: ${said}`, "good");
    else sayRefusal(page, `${sent.what}: refused, ${said}`);
    if (answer.verb === "stop" && !answer.done) page.setStopping(false);
    sent.onAnswer?.(answer.done, said);
  }
}

/** Says a refusal, and keeps it among the notices of this page. */
function sayRefusal(page, text) {
  page.shell.say(text, "bad");
  page.store.addNotice("warning", text);
}

/** The line that says how a run that stands still goes on; null where nothing is to be said. */
function resumeHint(page) {
  const { state, dir } = page.store.run;
  if (!["stopped", "interrupted"].includes(state.word)) return null;
  return h("p", { class: "soft small", "data-mark": "resume" }, "To go on: ", h("kbd", {}, `ensemble resume ${visible(dir)}`));
}

/** The verbs that make sense for a member now: of pause, resume, cancel, add. */
export function verbsFor(page, member) {
  if (!page.source.live) return [];
  const verbs = new Set(page.store.run?.actions ?? []);
  const isPaused = member.state === "paused";
  const isActive = ACTIVE.has(member.state);
  const fits = { pause: isActive, resume: isPaused, cancel: isActive || isPaused, add: true };
  return Object.keys(fits).filter((verb) => fits[verb] && verbs.has(verb));
}

/** The buttons for one member, or for several: each with the number of those that it is for. */
export function memberButtons(page, ids) {
  const members = ids.map((id) => page.store.members.get(id)).filter(Boolean);
  const buttons = Object.keys(QUESTIONS).map((verb) => {
    const able = members.filter((each) => verbsFor(page, each).includes(verb)).map(({ id }) => id);
    const asks = ids.length > 1 || verb === "cancel";
    const onclick = () => (asks ? ask(page, verb, able) : page.act(verb, { member: able[0] }));
    const words = [capital(verb), ids.length > 1 && able.length, asks && "…"].filter(Boolean).join(" ");
    return able.length > 0 && h("button", { type: "button", class: verb === "cancel" && "danger", onclick }, words);
  });
  const canClone = members.length === 1 && verbsFor(page, members[0]).includes("add");
  if (canClone) buttons.push(h("button", { type: "button", onclick: () => askClone(page, ids[0]) }, "Clone with changes …"));
  const shown = buttons.filter(Boolean);
  return shown.length > 0 || ids.length !== 1 || !page.source.live ? shown : [resumeHint(page)];
}

/** The buttons for the whole run. */
export function runButtons(page) {
  if (!page.source.live) return [];
  const verbs = new Set(page.store.run?.actions ?? []);
  const buttons = [];
  if (verbs.has("pause")) buttons.push(h("button", { type: "button", onclick: () => ask(page, "pause", null) }, "Pause all …"));
  if (verbs.has("resume")) buttons.push(h("button", { type: "button", onclick: () => page.act("resume") }, "Resume all"));
  if (verbs.has("stop")) buttons.push(h("button", { type: "button", class: "danger", onclick: () => askStop(page) }, "Stop the run …"));
  return buttons.length > 0 ? buttons : [resumeHint(page)];
}

/** Asks once for all of these members; null: all of the run. */
function ask(page, verb, ids) {
  const which = ids === null ? "all" : ids.length === 1 ? visible(ids[0]) : count(ids.length, "member");
  openDialog({
    title: `${capital(verb)} ${ids === null ? "all members" : which}?`, confirm: `${capital(verb)} ${which}`, danger: verb === "cancel",
    body: h("p", {}, QUESTIONS[verb]),
    onConfirm: () => void page.act(verb, ids === null ? {} : ids.length === 1 ? { member: ids[0] } : { members: ids }),
  });
}

function capital(word) {
  return word[0].toUpperCase() + word.slice(1);
}

/** Asks whether to stop the run, and how. */
function askStop(page) {
  const atOnce = h("input", { type: "checkbox" });
  openDialog({
    title: "Stop the run?", confirm: "Stop the run", danger: true,
    body: [
      h("p", {}, "Members write a checkpoint and end. ", h("kbd", {}, "ensemble resume"), " goes on from there."),
      h("label", { class: "check" }, atOnce, "At once: without a checkpoint; work since the last checkpoint is lost"),
    ],
    onConfirm: () => void page.act("stop", atOnce.checked ? { at_once: true } : {}),
  });
}

/** Asks for the changes of a clone of a member. */
function askClone(page, id) {
  const member = page.store.members.get(id);
  const fields = Object.entries(member.params ?? {}).map(([name, given]) => {
    const before = typeof given === "string" ? given : JSON.stringify(given);
    const input = h("input", { type: "text", name, value: before, autocomplete: "off", spellcheck: "false", "data-before": before });
    input.addEventListener("input", () => input.classList.toggle("changed", input.value !== before));
    return { name, given, before, input };
  });
  const warm = h("input", { type: "radio", name: "start", value: "warm", disabled: member.checkpoint === null });
  const scratch = h("input", { type: "radio", name: "start", value: "scratch", checked: true });
  const problem = h("p", { class: "bad", role: "alert" });
  const progress = h("p", { class: "soft", role: "status" });
  openDialog({
    title: `Clone ${visible(id)}`, confirm: "Add the clone",
    body: [
      h("p", { class: "soft" }, "The new member has this one's declaration with what you change here. A value is JSON or text."),
      h("div", { class: "fields" }, fields.map((field) => h("label", {}, h("span", {}, visible(field.name)), field.input))),
      h("fieldset", { class: "plain" }, h("legend", {}, "Starts"),
        h("label", { class: "check" }, scratch, "from scratch"),
        h("label", { class: "check" }, warm, member.checkpoint === null ? "warm: it has no checkpoint yet" : `warm: starts with its weights after ${count(member.checkpoint, "epoch")}, a new optimizer and epoch 1`)),
      problem, progress,
    ],
    onConfirm: async () => {
      const empty = fields.find((field) => field.input.value.trim() === "" && field.before !== "");
      if (empty !== undefined) {
        setText(problem, `${visible(empty.name)} needs a value.`);
        empty.input.focus();
        return false;
      }
      setText(problem, "");
      setText(progress, "Sent; the run has not answered yet.");
      const asked = { from: id, warm: warm.checked, params: changes(fields) };
      const [done, said] = await new Promise((resolve) => page.act("add", asked, (...answer) => resolve(answer)));
      setText(progress, "");
      setText(problem, done ? "" : `Not added: ${said}`);
      return done;
    },
  });
}

function changes(fields) {
  const changed = fields.filter((field) => field.input.value !== field.before);
  return Object.fromEntries(changed.map((field) => [field.name, parseValue(field.input.value, field.given)]));
}

/** What a field says: JSON where it is JSON, else text; a hyperparameter that is text stays text. */
export function parseValue(text, before) {
  if (typeof before === "string") return text;
  try {
    return JSON.parse(text);
  } catch {
    return text.trim();
  }
}
