// Elements from data. Text is always put in as text, never as HTML: what a message says cannot become a part of the page.

/** Characters that turn the text behind them, which would then read as another one. */
const TURNING = /[\u202a-\u202e\u2066-\u2069]/g;

/** Text as it reads: what would turn it is shown by its number. */
export const plain = (text) => String(text).replace(TURNING, (one) => `\\u${one.charCodeAt(0).toString(16)}`);

/** Make an element: properties that begin with "on" are listeners, null and false ones are left out, but false is a value of ARIA. */
export function h(tag, properties, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** Make an element of a drawing. */
export function svg(tag, properties, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    const aria = name.startsWith("aria-");
    if (value === null || value === undefined || (value === false && !aria)) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true && !aria ? "" : name === "title" ? plain(value) : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false).map((child) => (child instanceof Node ? child : plain(child))));
  return element;
}

/** Put these in place of what an element holds: what has a data-key keeps the focus, and stays opened or closed; tables stay scrolled. */
export function show(element, ...children) {
  const had = element.contains(document.activeElement) && document.activeElement !== element;
  const key = had ? document.activeElement.dataset.key : undefined;
  const parts = () => [...element.querySelectorAll("details[data-key]")];
  const open = new Map(parts().map((one) => [one.dataset.key, one.open]));
  const scrolled = () => [...element.querySelectorAll(".scroll")];
  const places = scrolled().map(({ scrollLeft: left, scrollTop: top }) => ({ left, top }));
  element.replaceChildren(...children.flat(Infinity).filter(Boolean));
  scrolled().forEach((one, at) => places[at] && one.scrollTo(places[at]));
  for (const one of parts()) if (open.has(one.dataset.key)) one.open = open.get(one.dataset.key);
  if (!had) return;
  const back = key && element.querySelector(`[data-key="${CSS.escape(key)}"]:not(:disabled)`);
  if (!back) element.tabIndex = -1;
  (back || element).focus({ preventScroll: true });
}

const words = new Map([...document.querySelectorAll("#words dt")].map((word) => [word.textContent, word.nextElementSibling.textContent]));

/** What a word means, as the list of words at the end of the page has it; null if it is not there. */
export const meaning = (word) => words.get(word) ?? null;

/** Open a dialog in front of the page; draw(content, close) fills it. Escape and Close end it, and the focus goes back. Resolves when it is closed. */
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
      // what opened it, or what stands there in its place
      const back = before?.isConnected && before !== document.body ? before : key && document.querySelector(`[data-key="${CSS.escape(key)}"]:not(:disabled)`);
      (back || document.querySelector("input[type=search]") || document.getElementById("refresh")).focus();
      resolve();
    });
  });
  dialog.addEventListener("click", (event) => event.target === dialog && close());
  dialog.showModal();
  draw(content, close);
  return closed;
}

const REST = 700; // ms without a move
const AT_MOST = 15_000; // ms that news wait for the pointer
let moved = -REST;
let pressed = false;
for (const type of ["pointermove", "pointerdown", "pointerup", "pointercancel", "wheel"]) {
  window.addEventListener(type, ({ buttons }) => {
    moved = performance.now();
    pressed = buttons !== 0;
  }, { capture: true, passive: true });
}

/** Resolves when the pointer rests: while somebody aims, presses or copies a text, nothing may move away below the pointer. */
export async function rest() {
  const until = performance.now() + AT_MOST;
  const busy = () => pressed || performance.now() - moved < REST || !getSelection().isCollapsed;
  while (busy() && performance.now() < until) await new Promise((resolve) => { setTimeout(resolve, 50); });
}
