// Pauses: messages that no dispatcher takes for a time. What a pause holds, and what nobody can stop, is counted and asked first.

import { post } from "./api.js";
import { h, open, show } from "./dom.js";
import { absolute, inZone, utc } from "./time.js";

const NAMES = { destination: "destination", deliver_conn_id: "connection", tag: "tag", dag_id: "DAG", run_id: "run" };
const UNITS = { minutes: 60, hours: 3600, days: 86_400 };
/** What becomes of messages that fell due meanwhile. */
const THEN = { spread: "are sent evenly within some minutes", at_once: "are sent at once", drop: "are cancelled" };
const MOST_COUNTED = 1_000_000; // counts end there

/** A selection in words. */
export const inWords = (selection) => Object.entries(selection).map(([name, value]) => `${NAMES[name]} ${value}`).join(", ");

/** What can be paused of a message, or of a destination: the selections that it belongs to, the smallest first. */
export function selectionsOf({ run_id, dag_id, tag, destination, deliver_conn_id }) {
  return [run_id && { dag_id, run_id }, dag_id && { dag_id }, tag && { tag }, destination && { destination }, deliver_conn_id && { deliver_conn_id }].filter(Boolean);
}

/** A filter of messages as a selection; null: a pause cannot be about it. */
export function selectionOf(filter) {
  const used = Object.entries(filter).filter(([, value]) => value.length);
  return used.length && used.every(([name]) => name in NAMES) ? Object.fromEntries(used) : null;
}

const count = (number) => `${number >= MOST_COUNTED ? "at least " : ""}${number.toLocaleString()} ${number === 1 ? "message" : "messages"}`;
const failed = (fault) => h("p", { class: "notice error", role: "alert" }, fault.message);
/** All that shows pauses asks again. */
const changed = () => window.dispatchEvent(new Event("paused"));

function then(value, minutes) {
  const choice = h("select", { name: "on_unpause", "data-key": "on_unpause" }, Object.entries(THEN).map(([name, text]) => h("option", { value: name, selected: name === value }, text)));
  const within = h("label", {}, "Minutes", h("input", { name: "spread", type: "number", min: 0, max: 527_040, step: "any", required: true, value: minutes, "data-key": "spread" }));
  const draw = () => {
    within.hidden = choice.value !== "spread";
    within.querySelector("input").disabled = within.hidden;
  };
  choice.addEventListener("change", draw);
  draw();
  return [h("label", {}, "What fell due meanwhile: the messages", choice), within];
}

const options = (given) => ({ on_unpause: given.on_unpause, ...(given.on_unpause === "spread" ? { spread_seconds: given.spread * 60 } : {}), ...(given.because ? { because: given.because } : {}) });
const because = () => h("label", {}, "Reason, for the audit", h("input", { name: "because", maxlength: 1000, autocomplete: "off", "data-key": "because" }));

/** Ask what to pause of these selections, for how long, and what then; pause it, and show what it holds. */
export function pause(path, selections) {
  return open("Pause", async (content, close) => {
    const first = h("form", { onsubmit: (event) => {
      event.preventDefault();
      const given = Object.fromEntries(new FormData(first));
      const duration = given.duration ? { duration_seconds: given.duration * UNITS[given.unit] } : {};
      ask({ selection: selections[given.what ?? 0], ...duration, ...options(given) });
    } },
    selections.length === 1 ? h("p", {}, "No dispatcher takes messages of ", h("strong", {}, inWords(selections[0])), " until the pause ends.")
      : h("fieldset", {}, h("legend", {}, "No dispatcher takes messages of"), selections.map((one, at) => h("label", { class: "choice" }, h("input", { type: "radio", name: "what", value: at, checked: at === 0, "data-key": `what ${at}` }), ` ${inWords(one)}`))),
    h("div", { class: "pair" }, h("label", {}, "For; empty: until somebody ends it", h("input", { name: "duration", type: "number", min: 0, step: "any", max: 527_040, value: 1, "data-key": "duration" })),
      h("label", {}, "Unit", h("select", { name: "unit", "data-key": "unit" }, Object.keys(UNITS).map((unit) => h("option", { selected: unit === "hours" }, unit))))),
    h("div", { class: "pair" }, then("spread", 10)), because(),
    h("footer", {}, h("button", { type: "button", onclick: close }, "Leave them"), h("button", { class: "primary" }, "Go on")));

    const ask = async (body) => {
      show(content, h("p", { role: "status" }, "Counting …"));
      try {
        const would = await post(`${path}/pause`, { ...body, dry_run: true });
        show(content, h("p", { class: "mono" }, inWords(body.selection)), h("p", {}, `${count(would.waiting)} of the store would wait, `, until(would), "; what is stored meanwhile, too."), beyond(would),
          h("footer", {}, h("button", { type: "button", onclick: () => show(content, first) }, "Back"), h("button", { type: "button", class: "primary", onclick: () => go(body) }, "Pause")));
        content.querySelector("footer button").focus();
      } catch (fault) {
        show(content, failed(fault), h("footer", {}, h("button", { type: "button", onclick: () => show(content, first) }, "Back")));
      }
    };
    const go = async (body) => {
      try {
        const done = await post(`${path}/pause`, { ...body, dry_run: false });
        show(content, h("p", { class: "notice good", role: "status" }, `Paused: ${count(done.waiting)} of the store wait, `, until(done), ". Each dispatcher obeys within 2 s."), beyond(done),
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

const until = ({ ends_at: end }) => (end ? ["until ", h("time", { datetime: end, title: utc(end) }, absolute(end))] : "until somebody ends the pause");

/** What nobody can stop. */
function beyond({ with_broker: many, arrive_until: last }) {
  const [are, arrive, them] = many === 1 ? ["is", "arrives", "it"] : ["are", "arrive", "them"];
  return many > 0 && h("p", { class: "notice warn" }, `${count(many)} ${are} already with the broker and ${arrive} until ${absolute(last)}; nobody can stop ${them}.`);
}

/** Ask what becomes of what fell due, and end a pause. */
export function unpause(path, { selection, on_unpause: usual = "spread", spread = 600 }) {
  return open("Unpause", async (content, close) => {
    let turn = 0;
    const outcome = h("p", { role: "status" });
    const form = h("form", { onsubmit: async (event) => {
      event.preventDefault();
      turn += 1;
      try {
        const done = await post(`${path}/unpause`, { ...body(), dry_run: false });
        show(content, h("p", { class: `notice ${done.ended ? "good" : "warn"}`, role: "status" }, sentence(done)), h("footer", {}, h("button", { type: "button", class: "primary", onclick: close }, "Done")));
        content.querySelector("footer button").focus();
        changed();
      } catch (fault) {
        show(content, failed(fault));
      }
    }, onchange: () => look() }, h("p", { class: "mono" }, inWords(selection)), h("div", { class: "pair" }, then(usual, spread / 60)), because(), outcome,
    h("footer", {}, h("button", { type: "button", onclick: close }, "Leave it paused"), h("button", { class: "primary" }, "Unpause")));
    const body = () => ({ selection, ...options(Object.fromEntries(new FormData(form))) });
    const look = async () => {
      const mine = ++turn;
      const would = await post(`${path}/unpause`, { ...body(), dry_run: true }).catch((fault) => fault);
      if (mine === turn) show(outcome, would instanceof Error ? would.message : sentence(would));
    };
    show(content, form);
    form.querySelector("footer button").focus();
    await look();
  });
}

const sentence = ({ text }) => `${inZone(text[0].toUpperCase() + text.slice(1))}.`;
