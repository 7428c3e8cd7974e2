// Moving back what could not be delivered: counted and asked first.

import { pathOf, post } from "./api.js";
import { h, open, show } from "./dom.js";

export function redrive({ connection, reload }, label) {
  const path = `${pathOf(connection)}/redrive`;
  return h("p", {}, h("button", { type: "button", "data-key": `redrive ${path}`, onclick: () => open(label.replace("…", ""), async (content, close) => {
    show(content, h("p", { role: "status" }, "Counting …"));
    try {
      ask(content, close, path, connection.kind, reload, await post(path, { dry_run: true }));
    } catch (fault) {
      show(content, h("p", { class: "notice error", role: "alert" }, fault.message));
    }
  }) }, label));
}

function ask(content, close, path, kind, reload, found) {
  const choices = found.destinations.map(choice);
  const go = async () => {
    const destinations = choices.filter(({ box }) => box.checked).map(({ name }) => name);
    show(content, h("p", { role: "status" }, "Moving …"));
    try {
      show(content, outcome(await post(path, kind === "rabbitmq" ? { dry_run: false, destinations } : { dry_run: false })));
    } catch (fault) {
      show(content, h("p", { class: "notice error", role: "alert" }, fault.message));
    }
    reload();
  };
  const button = h("button", { type: "button", class: "primary", onclick: go }, "Move them");
  const enable = () => { button.disabled = kind === "rabbitmq" && !choices.some(({ box }) => box.checked); };
  choices.forEach(({ box }) => box.addEventListener("change", enable));
  enable();
  show(content,
    h("p", {}, question(found)),
    choices.length > 0 && h("fieldset", {}, h("legend", {}, "Send to"), choices.map(({ line }) => line)),
    stayed(found.remaining),
    h("footer", {}, h("button", { type: "button", onclick: close }, "Leave them"), button));
  // not the button that moves them: Enter alone moves nothing
  content.querySelector("footer button").focus();
}

function question({ waiting, destinations }) {
  if (destinations.length) return `${waiting.toLocaleString()} messages were unroutable. They name these destinations; whoever may write to the delivery exchange can name any. Tick those to send to: they are delivered at once.`;
  if (waiting === null) return "Move the messages back to where they were to go?";
  return `Move ${waiting.toLocaleString()} messages back to where they were to go? They are delivered at once.`;
}

/** A checkbox for a destination; a destination that is bound already begins ticked. */
function choice({ name, messages, problem }) {
  const box = h("input", { type: "checkbox", name: "destination", value: name });
  box.checked = problem === null;
  const line = h("p", {}, h("label", {}, box, ` ${name}: ${messages.toLocaleString()}`), problem && h("small", {}, ` ${problem}`));
  return { name, box, line };
}

function outcome({ moved, remaining, task }) {
  return [
    task ? h("p", { class: "notice good", role: "status" }, "SQS is moving them by itself; the figures follow within minutes.")
      : h("p", { class: "notice good", role: "status" }, `${moved.toLocaleString()} messages were moved.`),
    stayed(remaining),
  ];
}

function stayed(remaining) {
  return Object.entries(remaining).map(([why, count]) => h("p", { class: "notice warn" }, `${count.toLocaleString()} stay in the queue: ${why}`));
}
