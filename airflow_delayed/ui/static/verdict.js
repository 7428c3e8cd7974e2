// The verdict on top of the page: whether messages are delivered; if not, why, and what to do.

import { Fault, get, part } from "./api.js";
import { h, show } from "./dom.js";
import { pauser } from "./overview.js";
import { leave, surrounding } from "./airflow.js";
import { absolute, clock, relative } from "./time.js";

const HEADS = { ok: "Delivering", degraded: "Needs a look", failing: "Not delivering" };
/** Causes that are seen at once; the others are one press away, so that the list of messages comes soon. */
const FIRST = 3;
const ON_A_PHONE = 1;
const phone = window.matchMedia("(max-width: 600px)");
const TONES = { error: "error", warning: "warn", unknown: "warn" };

/** Draw the verdict into an element; find(connection_id, states) shows messages, or without states the connection. take(answer) takes the answer of the server, or a Fault. */
export function verdict(element, find) {
  let last = null;
  let fault = null;

  function draw() {
    if (fault) return show(element, trouble(fault), last && h("div", { class: "stale" }, causes(last)));
    return last && show(element, last.status === "ok" ? well(last) : causes(last));
  }

  function causes({ status, causes: list, hidden }) {
    if (status === "ok") return [];
    const first = phone.matches ? ON_A_PHONE : FIRST;
    const others = list.slice(first);
    return [h("h2", { class: `verdict ${status}` }, HEADS[status]), list.slice(0, first).map(cause),
      others.length > 0 && h("details", { class: "others", "data-key": "other causes" },
        h("summary", { "data-key": "other causes summary" }, `${others.length} more: ${others.map(({ where }) => where).join(", ")}`), others.map((one) => cause(one))),
      hidden && unseen()];
  }

  function cause({ code, severity, connection_id: name, kind, where, what, remedy, since, states, paused_dag: dag }, index) {
    return h("div", { class: `notice ${TONES[severity] ?? ""}`, "data-code": code },
      // an error of a connection begins with its name
      h("p", {}, h("strong", {}, begin(where)), !where.includes(name) && ` of connection '${name}'`, what.startsWith(where) ? what.slice(where.length) : `: ${what}`, since && ` (since ${clock(since)})`, "."),
      // the first cause comes before all others: what to do about it is seen at once
      remedy && h("details", { open: index === 0, "data-key": `remedy ${name} ${code}` }, h("summary", { "data-key": `remedy summary ${name} ${code}` }, "What to do"), h("p", {}, `${begin(remedy)}.`)),
      h("p", { class: "buttons" },
        states.length > 0 && h("button", { type: "button", "data-key": `show ${name} ${code}`, onclick: () => find(name, states) }, "Show the messages"),
        // its figures, and what can be moved back
        kind !== "store" && !since && h("button", { type: "button", "data-key": `show ${name} ${code}`, onclick: () => find(name, []) }, "Show the connection"),
        dag && [pauser(dag, { is_paused: true }, load), h("a", { class: "button", href: address(`dags/${part(dag)}`), onclick: leave }, `Open the DAG ${dag}`)]));
  }

  phone.addEventListener("change", draw);

  const load = () => get("health").then(take, take);

  /** Take the verdict, or what kept it from being asked. */
  function take(answer) {
    fault = answer instanceof Error ? answer : null;
    last = fault ? last : answer;
    draw();
    element.setAttribute("aria-busy", "false");
  }
  return { take, redraw: draw, at: () => last?.at };
}

function well({ next_due: next, at, hidden }) {
  const due = next ? `The next message is due ${relative(next, at)}, at ${absolute(next)}.` : "No message waits in a store.";
  return [h("p", { class: "notice good", "data-code": "ok" }, h("strong", {}, "All is well. "), due), hidden && unseen()];
}

const unseen = () => h("p", { class: "muted" }, "Connections that you may not read are not looked at.");

/** A text as the beginning of a sentence; a command stays as it is typed. */
const begin = (text) => (text.startsWith("airflow ") ? text : text[0].toUpperCase() + text.slice(1));

/** One message for all of the page, with the way to log in when the login has ended. */
function trouble(fault) {
  const login = fault instanceof Fault && fault.code === "login";
  return h("p", { class: "notice error", role: "alert" }, fault.message,
    login && [" ", h("a", { href: `${address("api/v2/auth/login")}?${new URLSearchParams({ next: (surrounding() ? window.parent : window).location.href })}`, onclick: leave }, "Log in")]);
}

/** An address of Airflow; the page is mounted one level below it. */
function address(path) {
  return new URL(`../${path}`, surrounding() ? document.baseURI : location.href).pathname;
}
