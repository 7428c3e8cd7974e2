// Making what messages need: delay queues, and destinations that are not there; the plan is shown and asked first.

import { pathOf, post } from "./api.js";
import { h, open, show } from "./dom.js";

/** Ask, make, and show what was made; resolves to whether it was. */
export async function install(connection, destinations) {
  const path = `${pathOf(connection)}/install`;
  const named = connection.kind === "rabbitmq" ? { destinations } : {};
  let made = false;
  await open(`Create in ${connection.connection_id}`, async (content, close) => {
    const ask = async (asked) => {
      show(content, h("p", { role: "status" }, asked.dry_run ? "Looking …" : "At work …"));
      try {
        return await post(path, { ...named, ...asked });
      } catch (fault) {
        return show(content, h("p", { class: "notice error", role: "alert" }, fault.message));
      }
    };
    const planned = await ask({ dry_run: true });
    if (!planned) return;
    const { parts: plan, problems } = planned;
    const may = plan.length > 0 && !problems.length;
    const end = (label) => h("button", { type: "button", "data-key": "install end", onclick: close }, label);
    const go = async () => {
      const done = await ask({ dry_run: false });
      made = Boolean(done);
      const parts = done?.parts;
      if (parts) show(content, h("p", { class: "notice good", role: "status" }, `${parts.length.toLocaleString()} made.`), list(parts), h("footer", {}, end("Done")));
      content.querySelector("footer button")?.focus();
    };
    show(content, problems.length > 0 && [h("p", { class: "notice error" }, "Nothing can be made before this is repaired:"), list(problems)],
      may ? [h("p", {}, "This would be made:"), list(plan)] : !problems.length && h("p", {}, "All is there; nothing would be made."),
      h("footer", {}, end(may ? "Leave it" : "Close"), may && h("button", { type: "button", class: "primary", onclick: go }, "Create")));
    // not Create: who holds a key down has not read the plan
    content.querySelector("footer button").focus();
  });
  return made;
}

const list = (parts) => h("ul", { class: "plan" }, parts.map((part) => h("li", {}, part)));
