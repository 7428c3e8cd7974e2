// What to do about a cause: its text, with each command on a line of its own that can be copied.

import { h } from "./dom.js";

const VALUE = `(?:'[^']*'(?:"'"'[^']*')*|[^\\s;'"]*[^\\s;.,'"])`; // as Python's shlex.quote writes it
const COMMAND = new RegExp(`(airflow delayed [a-z-]+(?: (?:--(?:dry-run|yes|install|overdue-ok)\\b|--[a-z-]+ ${VALUE}|${VALUE}=\\.\\.\\.))*)`);
const SHOWN = 2_000; // ms

/** A text as the beginning of a sentence. */
const begin = (text) => text[0].toUpperCase() + text.slice(1);

/** Return the lines of a remedy; the first begins with a title. */
export function lines(remedy, title) {
  const parts = remedy.split(COMMAND).map((text, at) => ({ text: at % 2 ? text : text.replace(/^[\s;,.]+|[\s;,]+$/g, ""), isCommand: at % 2 === 1 })).filter(({ text }) => text);
  const last = parts.at(-1);
  if (!last.isCommand && !/[.:]$/.test(last.text)) last.text += ".";
  if (title && parts[0].isCommand) parts.unshift({ text: "", isCommand: false });
  return parts.map(({ text, isCommand }, at) => (isCommand ? command(text)
    : h("p", {}, at === 0 && title && h("strong", {}, `${title} `), at === 0 && !title && text ? begin(text) : text)));
}

function command(text) {
  const code = h("code", {}, text);
  const button = h("button", { type: "button", "data-key": `copy ${text}`, "aria-label": `Copy ${text}`, onclick: async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // without TLS a browser has no clipboard for scripts: what is selected can be copied nevertheless
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
      getSelection().removeAllRanges();
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, SHOWN);
  } }, "Copy");
  return h("p", { class: "command" }, code, button);
}
