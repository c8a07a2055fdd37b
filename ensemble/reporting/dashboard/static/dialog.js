/** Dialogs: modal, closed by Esc, the focus comes back to where it was. */

import { h } from "./dom.js";

/**
 * Opens a dialog. `title`; `body`: nodes; `confirm`: the text of the button that does it, absent for a dialog that only tells;
 * `danger`: that button warns; `onConfirm()` may return false, or a promise of it, to keep the dialog open.
 */
export function openDialog({ title, body, confirm, danger, onConfirm }) {
  const close = () => dialog.close();
  const back = h("button", { type: "button", onclick: close }, confirm === undefined ? "Close" : "Back");
  const go = confirm === undefined ? null : h("button", { type: "submit", class: danger ? "danger" : "primary" }, confirm);
  const submit = async (event) => {
    event.preventDefault();
    if (go === null) return close();
    if (go.getAttribute("aria-disabled") === "true") return undefined;
    go.setAttribute("aria-disabled", "true");
    const keep = (await onConfirm()) === false;
    go.removeAttribute("aria-disabled");
    return keep || close();
  };
  const form = h("form", { onsubmit: submit, novalidate: true }, h("h2", { id: "dialog-title" }, title), body, h("div", { class: "buttons" }, back, go));
  const before = document.activeElement;
  const dialog = h("dialog", { class: "dialog", "aria-labelledby": "dialog-title" }, form);
  dialog.addEventListener("close", () => {
    dialog.remove();
    before?.focus?.({ preventScroll: true });
  });
  document.body.appendChild(dialog);
  dialog.showModal();
  (danger ? back : (form.querySelector("input, select") ?? go ?? back)).focus({ preventScroll: true });
  return dialog;
}
