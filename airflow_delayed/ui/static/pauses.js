// Pauses: destinations and connections for which no dispatcher takes messages. What waits, and what nobody can stop, is counted and asked first.

import { post } from "./api.js";
import { h, open, show } from "./dom.js";
import { absolute, inZone } from "./time.js";

const NAMES = { destination: "destination", deliver_conn_id: "connection" };
const MOST_COUNTED = 1_000_000; // counts end there

/** What is paused, in words. */
export const inWords = (selection) => Object.entries(selection).map(([name, value]) => `${NAMES[name]} ${value}`).join(", ");

/** What can be paused of a message, or of a destination. */
export function selectionsOf({ destination, deliver_conn_id }) {
  return [destination && { destination }, deliver_conn_id && { deliver_conn_id }].filter(Boolean);
}

const count = (number) => `${number >= MOST_COUNTED ? "at least " : ""}${number.toLocaleString()} ${number === 1 ? "message" : "messages"}`;
const failed = (fault) => h("p", { class: "notice error", role: "alert" }, fault.message);
/** All that shows pauses asks again. */
const changed = () => window.dispatchEvent(new Event("paused"));
const because = () => h("label", {}, "Reason, for the audit", h("input", { name: "because", maxlength: 1000, autocomplete: "off", "data-key": "because" }));
const reason = (form) => { const given = new FormData(form).get("because"); return given ? { because: given } : {}; };

/** Ask which of these to pause, pause it, and show what waits. */
export function pause(path, selections) {
  return open("Pause", async (content, close) => {
    const first = h("form", { onsubmit: (event) => {
      event.preventDefault();
      ask({ selection: selections[new FormData(first).get("what") ?? 0], ...reason(first) });
    } },
    selections.length === 1 ? h("p", {}, "No dispatcher takes messages of ", h("strong", {}, inWords(selections[0])), " until somebody ends the pause.")
      : h("fieldset", {}, h("legend", {}, "Until somebody ends the pause, no dispatcher takes messages of"), selections.map((one, at) => h("label", { class: "choice" }, h("input", { type: "radio", name: "what", value: at, checked: at === 0, "data-key": `what ${at}` }), ` ${inWords(one)}`))),
    because(),
    h("footer", {}, h("button", { type: "button", onclick: close }, "Leave them"), h("button", { class: "primary" }, "Go on")));

    const ask = async (body) => {
      show(content, h("p", { role: "status" }, "Counting …"));
      try {
        const would = await post(`${path}/pause`, { ...body, dry_run: true });
        show(content, h("p", { class: "mono" }, inWords(body.selection)), h("p", {}, `${count(would.waiting)} of the store would wait, until somebody ends the pause; what is stored meanwhile, too.`), beyond(would),
          h("footer", {}, h("button", { type: "button", onclick: () => show(content, first) }, "Back"), h("button", { type: "button", class: "primary", onclick: () => go(body) }, "Pause")));
        content.querySelector("footer button").focus();
      } catch (fault) {
        show(content, failed(fault), h("footer", {}, h("button", { type: "button", onclick: () => show(content, first) }, "Back")));
      }
    };
    const go = async (body) => {
      try {
        const done = await post(`${path}/pause`, { ...body, dry_run: false });
        show(content, h("p", { class: "notice good", role: "status" }, `Paused: ${count(done.waiting)} of the store wait, until somebody ends the pause. Each dispatcher obeys within 2 s.`), beyond(done),
          h("footer", {}, h("button", { type: "button", class: "primary", onclick: close }, "Done")));
        content.querySelector("footer button").focus();
        changed();
      } catch (fault) {
        show(content, failed(fault));
      }
    };
    show(content, first);
    first.querySelector("input").focus();
  });
}

/** What nobody can stop. */
function beyond({ with_broker: many, arrive_until: last }) {
  const [are, arrive, them] = many === 1 ? ["is", "arrives", "it"] : ["are", "arrive", "them"];
  return many > 0 && h("p", { class: "notice warn" }, `${count(many)} ${are} already with the broker and ${arrive} until ${absolute(last)}; nobody can stop ${them}.`);
}

/** Say what fell due, and end a pause. */
export function unpause(path, selection) {
  return open("Unpause", async (content, close) => {
    const outcome = h("p", { role: "status" });
    const form = h("form", { onsubmit: async (event) => {
      event.preventDefault();
      try {
        const done = await post(`${path}/unpause`, { selection, ...reason(form), dry_run: false });
        show(content, h("p", { class: `notice ${done.ended ? "good" : "warn"}`, role: "status" }, sentence(done)), h("footer", {}, h("button", { type: "button", class: "primary", onclick: close }, "Done")));
        content.querySelector("footer button").focus();
        changed();
      } catch (fault) {
        show(content, failed(fault));
      }
    } }, h("p", { class: "mono" }, inWords(selection)), because(), outcome,
    h("footer", {}, h("button", { type: "button", onclick: close }, "Leave it paused"), h("button", { class: "primary" }, "Unpause")));
    show(content, form);
    form.querySelector("footer button").focus();
    const would = await post(`${path}/unpause`, { selection, dry_run: true }).catch((fault) => fault);
    show(outcome, would instanceof Error ? would.message : sentence(would));
  });
}

const sentence = ({ text }) => `${inZone(text[0].toUpperCase() + text.slice(1))}.`;
