// Questions and answers in front of the page. Escape and "Close" end them; the focus goes back to where it was.

import { h } from "./dom.js";

/** Open a dialog; content is drawn by draw(close). Resolves when it is closed. */
export function open(title, draw, { wide = false } = {}) {
  const before = document.activeElement;
  const key = before?.dataset?.key;
  const id = `title-${Math.random().toString(36).slice(2)}`;
  const dialog = h("dialog", { class: wide ? "wide" : null, "aria-labelledby": id });
  const close = () => dialog.close();
  const content = h("div", { class: "content" });
  dialog.append(h("div", {}, h("header", {}, h("h2", { id }, title),
    h("button", { type: "button", onclick: close, "aria-label": "Close" }, "Close")), content));
  document.getElementById("dialogs").append(dialog);
  const closed = new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      const back = before?.isConnected ? before : key && document.querySelector(`[data-key="${CSS.escape(key)}"]`);
      (back || document.getElementById("refresh")).focus();
      resolve();
    });
  });
  dialog.addEventListener("click", (event) => event.target === dialog && close());
  dialog.showModal();
  draw(content, close);
  return closed;
}
