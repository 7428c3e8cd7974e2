// The verdict on top of the page: whether messages are delivered; if not, why, and what to do.

import { Fault, airflow, get, part, pathOf } from "./api.js";
import { destinations } from "./destinations.js";
import { h, show } from "./dom.js";
import { pauser } from "./overview.js";
import { unpause } from "./pauses.js";
import { lines } from "./remedy.js";
import { FIELDS } from "./search.js";
import { leave, surrounding } from "./airflow.js";
import { clock, inZone, relative, time } from "./time.js";

const HEADS = { ok: "Delivering", degraded: "Needs a look", failing: "Not delivering" };
const PARTLY = "Partly delivering";
/** Causes that are seen at once; the others are one press away, so that the list of messages comes soon. */
const FIRST = 3;
const ON_A_PHONE = 1;
const phone = window.matchMedia("(max-width: 600px)");
/** Words of the remedy of a cause that a connection's settings in Airflow may have. */
const OF_SETTINGS = "under Admin, Connections";
const STARTED = 60_000; // ms for which a run that was started is named
const TONES = { error: "error", warning: "warn", unknown: "warn" };

/** Draw the verdict into an element. find(connection_id, filter) shows messages, or without a filter the connection; retry(store, filter) retries failed ones;
 * failed(store) is their number; connections() are those of the page. take(answer) takes the answer of the server, or a Fault. */
export function verdict(element, { find, retry, failed, connections }) {
  let last = null;
  let fault = null;

  function draw() {
    if (fault) return show(element, trouble(fault), last && h("div", { class: "stale" }, causes(last)));
    return last && show(element, last.status === "ok" ? well(last, connections()) : causes(last));
  }

  function causes({ status, partly, lateness, causes: list, hidden }) {
    if (status === "ok") return [];
    const first = phone.matches ? ON_A_PHONE : FIRST;
    const others = list.slice(first);
    const head = partly ? PARTLY : HEADS[status];
    return [h("div", { class: "headline" }, h("h2", { class: `verdict ${status}` }, head), destinations(lateness, { phone: phone.matches, connections: connections() })), list.slice(0, first).map(cause),
      others.length > 0 && h("details", { class: "others", "data-key": "other causes" },
        h("summary", { "data-key": "other causes summary" }, `${others.length} more: ${others.map(({ where }) => where).join(", ")}`), others.map((one) => cause(one))),
      hidden && unseen()];
  }

  function cause(one, index) {
    const { code, severity, connection_id: name, deliver_conn_id: deliver, where, what, remedy, since } = one;
    return h("div", { class: `notice ${TONES[severity] ?? ""}`, "data-code": code },
      // an error of a connection begins with its name
      h("p", {}, h("strong", {}, begin(where)), ![name, deliver].some((known) => known && where.includes(known)) && ` of connection '${name}'`, inZone(what.startsWith(where) ? what.slice(where.length) : `: ${what}`), since && !what.includes("since ") && [" (since ", time(since, clock), ")"], "."),
      // the first cause comes before all others: what to do about it is seen at once, but for commands on a phone
      remedy && (index === 0 && !(phone.matches && remedy.includes("airflow delayed")) ? h("div", { class: "remedy" }, lines(remedy, "What to do:"))
        : h("details", { "data-key": `remedy ${name} ${code} ${where}` }, h("summary", { "data-key": `remedy summary ${name} ${code} ${where}` }, "What to do"), lines(remedy))),
      h("p", { class: "buttons" }, buttons(one)));
  }

  function buttons({ code, connection_id: name, kind, where, since, states, remedy, paused_dag: paused, run_dag: dag, deliver_conn_id: deliver, pause }) {
    const button = (label, onclick) => h("button", { type: "button", "data-key": `${label} ${name} ${code} ${where}`, onclick }, label);
    const connection = connections().find((one) => one.connection_id === name && one.kind === kind);
    // of the connection that delivers: what is not on the page, Airflow decides on
    const settings = remedy?.includes(OF_SETTINGS) && ((kind === "store" && deliver) || name);
    const mayEdit = connections().find((one) => one.connection_id === settings)?.may.edit ?? true;
    // rows that cannot be read would fail again: then it names no retry
    const many = code === "failed" && remedy?.includes("airflow delayed retry") && connection?.may.edit && failed(name);
    return [
      states.length > 0 && button("Show the messages", () => find(name, { state: states })),
      // the search knows no connection
      pause && Object.keys(pause).every((one) => FIELDS.includes(one)) && button("Show the messages", () => find(name, pause)),
      pause && connection?.may.edit && button("Unpause…", () => unpause(pathOf(connection), pause)),
      // its figures, and what can be moved back
      kind !== "store" && !since && button("Show the connection", () => find(name, null)),
      settings && mayEdit && h("a", { class: "button", href: address(`connections?name_pattern=${part(settings)}`), onclick: leave }, "Edit the connection"),
      many > 0 && button(`Retry ${many.toLocaleString()}…`, () => retry(name, { state: ["failed"] })),
      paused && [pauser(paused, { is_paused: true }, load), open(paused)],
      dag && [runner(dag, load), open(dag)],
    ];
  }

  const open = (dag) => h("a", { class: "button", href: address(`dags/${part(dag)}`), onclick: leave }, `Open the DAG ${dag}`);

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

function well({ lateness, next_due: next, at, hidden }, connections) {
  const due = next ? [`The next message is due ${relative(next, at)}, at `, time(next), "."] : "No message waits in a store.";
  const late = lateness.filter(({ status }) => status === "late");
  const which = late.some(({ overdue }) => overdue) ? "What is overdue goes out with the next run of its dispatcher. " : late.length > 0 && "Nothing is overdue any more; some went out late in the last 2 min. ";
  return [h("p", { class: "notice good", "data-code": "ok" }, h("strong", {}, "All is well. "), which, due), destinations(lateness, { phone: phone.matches, connections }), hidden && unseen()];
}

const unseen = () => h("p", { class: "muted" }, "Connections that you may not read are not looked at.");

const begin = (text) => text[0].toUpperCase() + text.slice(1);

/** What became of the runs that were started here, by DAG. */
const started = new Map();

/** The button that starts a run of a DAG; Airflow decides whether the user may. */
function runner(dag, again) {
  const known = started.get(dag);
  return [h("button", { type: "button", "data-key": `run ${dag}`, onclick: async () => {
    const answer = await airflow("POST", `dags/${part(dag)}/dagRuns`, { logical_date: null }).catch((fault) => fault);
    started.set(dag, { at: Date.now(), text: answer instanceof Error ? answer.message : `Started ${answer.dag_run_id}.` });
    again();
  } }, "Run now"), known && Date.now() - known.at < STARTED && h("span", { role: "status" }, known.text)];
}

/** One message for all of the page, with the way to log in when the login has ended. */
function trouble(fault) {
  const login = fault instanceof Fault && fault.code === "login";
  return h("p", { class: "notice error", role: "alert" }, fault.message,
    login && [" ", h("a", { href: `${address("api/v2/auth/login")}?${new URLSearchParams({ next: (surrounding() ? window.parent : window).location.href })}`, onclick: leave }, "Log in")]);
}

/** An address of Airflow; the page is mounted one level below it. */
function address(path) {
  const { pathname, search } = new URL(`../${path}`, surrounding() ? document.baseURI : location.href);
  return pathname + search;
}
