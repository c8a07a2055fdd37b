/** What surrounds the views: the run's name and state, tabs, filter, selection, theme, help, the connection. */

import { fill, h, isTyping, setAttribute, setText } from "./dom.js";
import { openHelp } from "./help.js";
import { count, duration, moment } from "./format.js";
import { driverBanner } from "./lost_driver.js";
import { read, write } from "./storage.js";

const THEMES = ["auto", "light", "dark"];
const CONNECTIONS = {
  opening: ["", "connecting"], live: ["good", "live"], lost: ["bad", "connection lost, trying again"], frozen: ["", "as of the report"],
};

/** Builds the frame of the page. Returns `{ update(changed), freshRoot(view), press(event) }`. */
export function buildShell(root, page) {
  const parts = frame(page);
  fill(root, parts.header, parts.bar, parts.trouble, parts.driver.root, parts.main, parts.live);
  applyTheme(read("theme") ?? "auto", parts.theme);
  return {
    update: (changed) => update(parts, page, changed),
    freshRoot: (view) => freshRoot(parts, page, view),
    press: (event) => press(parts, page, event),
    /** Says something to people who hear the page, and shows it for a while. Returns its element. */
    say: (text, tone) => say(parts, text, tone),
  };
}

function frame(page) {
  const name = h("h1", {});
  const state = h("span", { class: "pill", hidden: true });
  const stopping = h("span", { class: "soft", role: "status" });
  const connection = h("span", { class: "connection", role: "status" });
  const theme = h("button", { class: "quiet", type: "button", onclick: () => nextTheme(theme) });
  const help = h("button", { class: "quiet", type: "button", "aria-label": "Help and keys", onclick: () => openHelp(shownTabs(page)) }, "?");
  const share = h("button", { class: "quiet", type: "button", "aria-label": "Copy the address of this view", title: "Copy the address of this view", onclick: () => copyAddress(page) }, "link");
  const back = h("a", { class: "back", href: "#runs", hidden: true }, "All runs");
  const lead = h("p", { class: "lead" });
  const tools = h("div", { class: "tools" }, connection, share, theme, help);
  const header = h("header", { class: "top" }, h("div", { class: "title" }, back, name, state, stopping, tools), lead);

  const filter = h("input", {
    type: "search", class: "filter", placeholder: "Filter members", "aria-label": "Filter members", autocomplete: "off",
    spellcheck: "false", oninput: () => page.store.setFilter(filter.value),
  });
  const problem = h("p", { class: "problem bad", role: "status", hidden: true });
  const chosen = h("button", { class: "chip", type: "button", hidden: true, onclick: () => page.store.select([]) });
  const tabs = h("nav", { class: "tabs", "aria-label": "Views" });
  const bar = h("div", { class: "tab-bar" }, tabs, h("div", { class: "narrow", role: "search", "aria-label": "Members" }, chosen, filter), problem);

  const trouble = h("p", { class: "trouble bad", role: "alert", hidden: true });
  const driver = driverBanner();
  const main = h("main", { id: "view", tabindex: "-1" });
  const live = h("div", { class: "toasts", role: "status", "aria-live": "polite" });
  return { header, name, state, stopping, connection, theme, back, lead, bar, tabs, filter, problem, chosen, trouble, driver, main, live };
}

function update(parts, page, changed) {
  const { store } = page;
  const isLost = page.connection === "live" && Boolean(store.run?.driver);
  const [tone, word] = isLost ? ["bad", "standing still"] : CONNECTIONS[page.connection];
  parts.driver.update(store.run);
  const ended = store.run?.ended != null && page.source.live;
  setText(parts.connection, !ended ? word : page.connection === "lost" ? "run ended, its page is no longer served" : "run ended");
  setAttribute(parts.connection, "class", `connection ${ended ? "" : tone}`);
  parts.trouble.hidden = page.trouble === null;
  setText(parts.trouble, page.trouble ?? "");
  const hasRun = store.run !== null;
  parts.bar.hidden = !hasRun;
  setText(parts.stopping, page.isStopping() ? "stopping …" : "");
  parts.back.hidden = page.view?.view.id === "runs" || page.runs.length < 2;
  if (!hasRun) {
    setText(parts.name, page.view?.view.title ?? "Runs");
    setText(parts.lead, "");
    parts.state.hidden = true;
    document.title = "Runs";
    return;
  }
  updateRun(parts, store);
  if (changed.has("view") || changed.has("run") || changed.has("curves") || changed.has("selection") || changed.has("filter") || changed.has("settings")) updateTabs(parts, page, changed.has("view"));
  if (parts.filter !== document.activeElement || changed.has("view")) parts.filter.value = store.filter;
  const problem = store.filter === "" ? null : store.problem();
  parts.problem.hidden = problem === null;
  setText(parts.problem, problem ?? "");
  parts.chosen.hidden = store.selection.size === 0;
  setText(parts.chosen, `${store.selection.size} selected ×`);
  setAttribute(parts.chosen, "aria-label", `${count(store.selection.size, "member")} selected; select none`);
}

function updateRun(parts, store) {
  const { run } = store;
  setText(parts.name, run.name ?? "run");
  setText(parts.state, run.state.word);
  setAttribute(parts.state, "class", `pill ${run.state.tone}`);
  parts.state.hidden = false;
  document.title = `${run.name ?? "run"} · ${run.state.word}`;
  const members = Math.max(store.members.size, run.declared ?? 0);
  const lead = [
    count(members, "member"), run.epochs ? `up to ${count(run.epochs, "epoch")}` : null, `${run.executor} executor`,
    count(store.nodes.length, "node"), run.started ? `started ${moment(run.started)}` : null,
    run.ended === null && run.started ? `for ${duration(store.now() - run.started)}` : null,
  ];
  setText(parts.lead, lead.filter(Boolean).join(" · "));
}

function shownTabs(page) {
  if (page.store.run === null) return [];
  return page.views.filter((view) => view.tab !== false && view.shown(page.store));
}

function updateTabs(parts, page, isOpened) {
  const current = page.view?.view.id;
  const tabs = shownTabs(page);
  const links = tabs.map((view, i) =>
    h("a", {
      href: page.link(view.id), class: "tab", "aria-current": view.id === current ? "page" : null,
      title: i < 10 ? `Key ${(i + 1) % 10}` : null,
    }, view.title),
  );
  const focused = [...parts.tabs.children].indexOf(document.activeElement);
  const left = parts.tabs.scrollLeft;
  fill(parts.tabs, links);
  parts.tabs.scrollLeft = left;
  if (isOpened) uncover(parts.tabs, links[tabs.findIndex((view) => view.id === current)]);
  if (focused >= 0) links[focused]?.focus();
}

/** Scrolls the row of tabs, and nothing else, so that one of them is seen. */
function uncover(row, link) {
  if (link === undefined) return;
  const [around, inside] = [row.getBoundingClientRect(), link.getBoundingClientRect()];
  row.scrollLeft += Math.min(0, inside.left - around.left) + Math.max(0, inside.right - around.right);
}

function freshRoot(parts, page, view) {
  const root = h("section", { "data-view": view.id, "data-drawn": "0", "aria-label": view.title });
  fill(parts.main, view.tab === false ? null : h("h2", { class: "unseen" }, view.title), root); // headings leave no level out
  if (parts.started) parts.main.focus({ preventScroll: true });
  parts.started = true;
  return root;
}

function press(parts, page, event) {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
  if (document.querySelector("dialog[open]") !== null) return;
  if (event.key === "Escape") {
    if (event.target === parts.filter && parts.filter.value !== "") page.store.setFilter((parts.filter.value = ""));
    else if (event.target === parts.filter) parts.main.focus();
    else page.store.select([]);
    return;
  }
  if (isTyping(event.target)) return;
  if (event.key === "/") {
    event.preventDefault();
    parts.filter.focus();
    parts.filter.select();
  } else if (event.key === "?") {
    openHelp(shownTabs(page));
  } else if (/^[0-9]$/.test(event.key) && page.store.run !== null) {
    const view = shownTabs(page)[(Number(event.key) + 9) % 10];
    if (view !== undefined) page.go(view.id);
  }
}

function say(parts, text, tone = "") {
  const toast = h("p", { class: `toast ${tone}` }, text);
  parts.live.appendChild(toast);
  while (parts.live.children.length > 4) parts.live.firstChild.remove();
  setTimeout(() => toast.remove(), tone === "bad" ? 20000 : 8000);
  return toast;
}

/** The address holds what is shown: view, settings, selection, filter. */
async function copyAddress(page) {
  try {
    await navigator.clipboard.writeText(location.href);
    page.shell.say("The address of this view is copied.");
  } catch {
    page.shell.say("It could not be copied; it is the address in the browser's bar.", "bad");
  }
}

function nextTheme(button) {
  const order = matchMedia("(prefers-color-scheme: dark)").matches ? THEMES : ["auto", "dark", "light"]; // the first click is seen
  const next = order[(order.indexOf(button.dataset.theme) + 1) % order.length];
  write("theme", next);
  applyTheme(next, button);
}

function applyTheme(theme, button) {
  if (theme === "auto") document.documentElement.removeAttribute("data-theme");
  else document.documentElement.setAttribute("data-theme", theme);
  button.dataset.theme = THEMES.includes(theme) ? theme : "auto";
  setText(button, { auto: "◐", light: "☀", dark: "☾" }[button.dataset.theme]);
  setAttribute(button, "aria-label", `Colours: ${button.dataset.theme}`);
  setAttribute(button, "title", `Colours: ${button.dataset.theme}`);
}
