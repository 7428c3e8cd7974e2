// Moving back what could not be delivered: counted and asked first.

import { post } from "./api.js";
import { open } from "./dialog.js";
import { h, show } from "./dom.js";
import { pathOf } from "./overview.js";

export function redrive({ connection, reload }, label) {
  const path = `${pathOf(connection)}/redrive`;
  return h("p", {}, h("button", { type: "button", "data-key": `redrive ${path}`, onclick: () => open(label.replace("…", ""), async (content, close) => {
    show(content, h("p", { role: "status" }, "Counting …"));
    try {
      const { waiting } = await post(path, { dry_run: true });
      const go = async () => {
        show(content, h("p", { role: "status" }, "Moving …"));
        try {
          show(content, told(await post(path, { dry_run: false })));
        } catch (fault) {
          show(content, h("p", { class: "notice error", role: "alert" }, fault.message));
        }
        reload();
      };
      show(content,
        h("p", {}, waiting === null ? "Move the messages back to where they were to go?" : `Move ${waiting.toLocaleString()} messages back to where they were to go? They are delivered at once.`),
        h("footer", {}, h("button", { type: "button", onclick: close }, "Leave them"),
          h("button", { type: "button", class: "primary", onclick: go }, "Move them")));
      content.querySelector("button.primary").focus();
    } catch (fault) {
      show(content, h("p", { class: "notice error", role: "alert" }, fault.message));
    }
  }) }, label));
}

function told({ moved, left, task }) {
  return [
    task ? h("p", { class: "notice good", role: "status" }, "SQS is moving them by itself; the figures follow within minutes.")
      : h("p", { class: "notice good", role: "status" }, `${moved.toLocaleString()} messages were moved.`),
    Object.entries(left).map(([why, count]) => h("p", { class: "notice warn" }, `${count.toLocaleString()} stayed: ${why}`)),
  ];
}
