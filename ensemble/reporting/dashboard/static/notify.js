/** The run's alerts as notifications of the browser, where the reader asks for them. */

import { setAttribute } from "./dom.js";
import { visible } from "./format.js";
import { read, write } from "./storage.js";

function isOn() {
  return globalThis.Notification?.permission === "granted" && read("notify") === true;
}

/** Makes of a button the switch for them. The browser is asked for its permission when it is pressed, not before. */
export function makeSwitch(button, page) {
  button.hidden = !page.source.live || globalThis.Notification === undefined;
  if (!button.hidden) setAttribute(button, "aria-pressed", String(isOn()));
  button.addEventListener("click", async () => {
    const wanted = !isOn();
    if (wanted && (await Notification.requestPermission()) !== "granted") {
      page.shell.say("The browser does not let this page notify you: see its settings of this site.", "bad");
      return;
    }
    write("notify", wanted);
    setAttribute(button, "aria-pressed", String(wanted));
  });
}

const shown = new Set(); // a page that comes back is told those of the last minutes again

/** Shows new alerts; several pages of a run show each of them once. */
export function showAlerts(store) {
  for (const { cause, text, t } of store.alerts.splice(0)) {
    const tag = `${store.log} ${cause}`;
    if (!isOn() || shown.has(`${tag} ${t}`)) continue;
    shown.add(`${tag} ${t}`);
    new Notification(visible(store.run.name ?? "run"), { body: visible(text), tag });
  }
}
