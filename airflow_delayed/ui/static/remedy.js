// What to do about a cause: its text, with each command on a line of its own that can be copied.

import { h } from "./dom.js";

const VALUE = `(?:'[^']*'(?:"'"'[^']*')*|[^\\s;'"]*[^\\s;.,'"])`; // as Python's shlex.quote writes it
const COMMAND = new RegExp(`(airflow delayed [a-z-]+(?: (?:--(?:dry-run|yes|end|overdue-ok)\\b|--[a-z-]+ ${VALUE}|${VALUE}=\\.\\.\\.))*)`);
const SHOWN = 2_000; // ms
/** What does the same as a command in Airflow's UI. */
const IN_AIRFLOW = {
  install: "In Airflow: trigger the DAG that has the TopologyInstallOperator for it.",
  retry: "On this page: press Failed above the list, choose what was given up, and press Retry….",
  restore: "On this page: press Cancelled above the list, choose messages, and press Take back….",
  redrive: "On this page: press Send unroutable messages again… in the card of that connection.",
  pause: "On this page: press Unpause….",
};

/** A text as the beginning of a sentence. */
const begin = (text) => text[0].toUpperCase() + text.slice(1);

/** Return the lines of a remedy, and what Airflow's UI has for its commands; the first begins with a title. */
export function lines(remedy, title) {
  const parts = remedy.split(COMMAND).map((text, at) => ({ text: at % 2 ? text : text.replace(/^[\s;,.]+|[\s;,]+$/g, ""), isCommand: at % 2 === 1 })).filter(({ text }) => text);
  const last = parts.at(-1);
  if (!last.isCommand && !/[.:]$/.test(last.text)) last.text += ".";
  if (title && parts[0].isCommand) parts.unshift({ text: "", isCommand: false });
  const here = new Set(parts.filter(({ isCommand }) => isCommand).map(({ text }) => IN_AIRFLOW[text.split(" ")[2]]).filter(Boolean));
  return [...parts.map(({ text, isCommand }, at) => (isCommand ? command(text)
    : h("p", {}, at === 0 && title && h("strong", {}, `${title} `), at === 0 && !title && text ? begin(text) : text))), ...[...here].map((text) => h("p", { class: "muted" }, text))];
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
