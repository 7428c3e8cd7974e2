// One message: its state, its task, and everything that is known of it.

import { get, part } from "./api.js";
import { h, meaning, open, show } from "./dom.js";
import { leave } from "./airflow.js";
import { pause, selectionsOf } from "./pauses.js";
import { absolute, relative, span, time } from "./time.js";

const TONES = { due: "info", "in flight": "info", retrying: "warn", failed: "bad", expired: "warn" };

/** A state as a coloured word. */
export const badge = (state) => h("span", { class: `badge ${TONES[state] ?? ""}`, title: meaning(state[0].toUpperCase() + state.slice(1)) }, state);

/** Where Airflow shows the task that sent a message; the page is mounted one level below Airflow itself. */
export function taskAddress({ dag_id, run_id, task_id, map_index, iteration }) {
  // Airflow's address of one iteration of a task loop holds a region that a message does not know
  const mapped = map_index >= 0 ? `/mapped/${map_index}` : "";
  const task = iteration === null && task_id ? `/tasks/${part(task_id)}${mapped}` : "";
  return new URL(`../dags/${part(dag_id)}/runs/${part(run_id)}${task}`, document.baseURI).pathname;
}

/** Show one message in a dialog; change(action) asks about a change of it, and resolves when that is answered. */
export function detail(path, id, may, change) {
  return open("Message", async (content) => {
    const load = async () => {
      try {
        const found = await get(`${path}/message`, { id });
        show(content, facts(id, found), changes(path, found, may, async (name) => {
          await change(name);
          if (content.isConnected) await load();
        }), history(found), headers(found), found.body_bytes !== null && body(path, id, found, may));
      } catch (fault) {
        show(content, h("p", { class: "notice error", role: "alert" }, fault.message));
      }
    };
    show(content, h("p", { role: "status" }, "Looking …"));
    await load();
  }, { wide: true });
}

/** The buttons for what can be done with a message as it stands. */
function changes(path, { message, remembered, at }, { edit }, change) {
  if (!(message ?? remembered)?.may_change) return null;
  const until = remembered?.restorable_until;
  const can = message ? [message.state === "failed" ? ["retry", "Retry…"] : ["reschedule", "Reschedule…"], ["cancel", "Cancel…"], ["pause", "Pause…"], ["erase", "Erase…"]]
    : until && Date.parse(until) > Date.parse(at) ? [["restore", "Take the cancel back…"], ["erase", "Erase…"]] : [];
  return can.length > 0 && h("div", { class: "buttons" }, can.filter(([name]) => edit || !["erase", "pause"].includes(name)).map(([name, label]) => h("button", { type: "button", "data-key": `message ${name}`,
    class: name === "erase" ? "danger" : null, onclick: () => (name === "pause" ? pause(path, selectionsOf(message)) : change(name)) }, label)),
  until && h("span", { class: "muted" }, `The cancel can be taken back until ${absolute(until)}.`));
}

function facts(id, { message, remembered, at }) {
  const pairs = [["Id", h("span", { class: "mono" }, id)]];
  const add = (name, value) => value !== null && value !== undefined && value !== "" && pairs.push([name, value]);
  if (message) {
    add("State", badge(message.state));
    add("Due", [time(message.due_at), `, ${relative(message.due_at, at)}`]);
    add("Can be cancelled", message.cancellable_until && `until ${absolute(message.cancellable_until)} at least`);
    add("Destination", message.destination);
    add("Delivered by", message.deliver_conn_id ?? "a queue table in the same database");
    add("Tag", message.tag);
    add("Not dispatched after", time(message.expires_at));
    add("Failed tries", message.retry_count || null);
    add("Next try", message.next_try && [time(message.next_try), `, ${relative(message.next_try, at)}`]);
    add("Last error", message.last_error);
    const from = message.origin;
    add("Sent by", from && h("a", { href: taskAddress(from), onclick: leave },
      `${from.dag_id}, run ${from.run_id}${from.task_id && `, task ${from.task_id}`}${from.map_index >= 0 ? ` [${from.map_index}]` : ""}${from.iteration === null ? "" : `, iteration ${from.iteration}`}`));
  } else if (remembered) {
    add("State", badge(remembered.state));
    add("When", time(remembered.at));
    add("Tag", remembered.tag);
    add("Due", time(remembered.due_at));
    add("How late", remembered.late_seconds === null ? null : remembered.late_seconds > 0 ? span(remembered.late_seconds) : "not late");
    add("Destination", remembered.destination);
  }
  return [
    !message && !remembered && h("p", { class: "notice" }, "This store does not know the id: it was never stored here, or it is remembered no longer."),
    h("dl", { class: "facts" }, pairs.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
  ];
}

function history({ history: lines }) {
  return lines.length > 0 && [h("h3", {}, "History"), h("ol", { class: "history" }, lines.map((line) => h("li", {},
    time(line.at), h("strong", {}, line.what), line.who && ` by ${line.who}`,
    line.detail && h("small", { class: "muted" }, ` ${line.detail}`))))];
}

function headers({ headers: given, message }) {
  if (!given) return message && [h("h3", {}, "Headers"), h("p", { class: "notice" },
    "They cannot be read: they are no JSON object of text, or have over a million bytes.")];
  const { names, values, cut } = given;
  return [h("h3", {}, `Headers (${names.length})`),
    names.length > 0 && !values && h("p", { class: "muted" }, "Their values are shown to those who may read the connection."),
    names.length > 0 && h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table" }, h("table", {}, h("tbody", {}, names.map((name) => h("tr", {},
      h("th", { scope: "row", class: "mono" }, name),
      values && h("td", { class: "mono" }, values[name], cut.includes(name) && h("small", {}, "cut; it is longer"))))))),
  ];
}

/** A JSON text with a line for each value; any other text, and a JSON text that would read differently afterwards, as it is. */
function indented(text) {
  try {
    const pretty = JSON.stringify(JSON.parse(text), null, 2);
    return pretty.replace(/\s/g, "") === text.replace(/\s/g, "") ? pretty : text;
  } catch {
    return text;
  }
}

function body(path, id, { body_bytes: size }, may) {
  const place = h("div", {});
  const size_text = size === null ? "" : ` (${size.toLocaleString()} bytes)`;
  const load = async () => {
    try {
      const found = await get(`${path}/body`, { id });
      show(place, h("pre", { tabindex: 0, "aria-label": "Body" }, found.form === "text" ? indented(found.content) : found.content),
        h("p", { class: "muted" }, found.form === "hex" ? "In hexadecimal, for it is no text." : "",
          found.shown_bytes < found.bytes ? ` The first ${found.shown_bytes.toLocaleString()} of ${found.bytes.toLocaleString()} bytes.` : ""));
    } catch (fault) {
      show(place, h("p", { class: "notice error", role: "alert" }, fault.message));
    }
  };
  show(place, may.read ? h("button", { type: "button", onclick: load }, "Show the body")
    : h("p", { class: "muted" }, "It is shown to those who may read the connection."));
  return [h("h3", {}, `Body${size_text}`), place];
}
