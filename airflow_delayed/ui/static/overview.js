// One card for each connection: its figures, its charts, and its problems.

import { airflow, get, part, pathOf } from "./api.js";
import { redrive } from "./redrive.js";
import { h, meaning, show } from "./dom.js";
import { leave } from "./airflow.js";
import { inWords, pause, selectionsOf, unpause } from "./pauses.js";
import { overdue } from "./search.js";
import { absolute, relative, span, time } from "./time.js";

const KINDS = { store: "SQL store", rabbitmq: "RabbitMQ", sqs: "Amazon SQS" };

/** Make a connection's card; find(filter) shows messages of a store, and loaded(summary) gets each answer. */
export function card(connection, { find, loaded }) {
  const body = h("div", {}, h("div", { class: "waiting-line" }));
  const age = h("span", { class: "muted" });
  const { connection_id: name, queue, kind } = connection;
  const title = queue ? `${name}: ${queue}` : name;
  const element = h("article", { class: "card", "aria-label": `${KINDS[kind]} ${title}`, "aria-busy": true, "data-connection": title },
    h("header", {}, h("h2", {}, title), h("span", { class: "badge" }, KINDS[kind]), age), body);
  const draw = { store, rabbitmq, sqs }[kind];
  let last = null;
  let shown = "";

  const load = () => get(`${pathOf(connection)}/summary`).then(take, take);

  /** Take the figures, or a Fault with the last figures that the server knows. */
  function take(found, known = null) {
    if (found instanceof Error) {
      last ??= known;
      // the last figures stay, greyed and with their age; the same alert is not repeated
      const alert = !found.whole && h("p", { class: "notice error", role: "alert" }, found.message);
      if (shown !== found.message) show(body, alert, last && h("div", { class: "stale" }, draw(last, { connection, find, reload: load })));
      shown = found.message;
      age.textContent = last ? `last seen ${absolute(last.at)}` : "";
    } else {
      last = found;
      shown = "";
      loaded(last);
      show(body, draw(last, { connection, find, reload: load }));
      age.textContent = last.age_seconds >= 1 ? `${span(last.age_seconds)} old` : "";
    }
    element.setAttribute("aria-busy", "false");
  }
  return { element, connection, take, redraw: () => last && show(body, draw(last, { connection, find, reload: load })) };
}

function figure(name, value, { tone = null, note = null, go = null } = {}) {
  const said = typeof value === "number" ? value.toLocaleString() : value ?? "unknown";
  return h("div", { class: tone }, h("dt", { title: meaning(name) }, name), h("dd", {},
    go ? h("button", { type: "button", class: "plain", onclick: go, "data-key": name, "aria-label": `${name}: ${said}; show them` }, said) : said,
    note && h("small", {}, note)));
}

/** Parts of cards by key: a card that is drawn again keeps what is open, and reads it again. */
const parts = new Map();

/** A part of a card that is read when it is opened, and then with the figures; draw(found, again) returns its content. */
function later(name, key, read, draw) {
  const id = `${key} ${name}`;
  if (!parts.has(id)) parts.set(id, opening(name, id));
  const part = parts.get(id);
  Object.assign(part, { read, draw });
  if (part.element.open) part.load();
  return part.element;
}

function opening(name, id) {
  const place = h("div", { class: "later" });
  const part = { turn: 0 };
  part.load = async () => {
    const mine = ++part.turn;
    if (!place.children.length) show(place, h("p", { class: "muted", role: "status" }, "Looking …"));
    let content;
    try {
      content = part.draw(await part.read(), part.load);
    } catch (fault) {
      if (fault.whole && part.shown) return;
      content = h("p", { class: "notice error", role: "alert" }, fault.message);
    }
    part.shown = true;
    // what was asked before a change of the user must not hide it
    if (mine === part.turn) show(place, content);
  };
  part.element = h("details", { "data-key": id, ontoggle: (event) => event.target.open && part.load() }, h("summary", { "data-key": `${id} summary` }, name), place);
  return part;
}

const table = (heads, rows) => h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table" }, h("table", {},
  h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))), h("tbody", {}, rows)));

function dispatchers(summary, key) {
  const state = ({ ended_at: ended, seen_at: seen, at_work: works, problem }) => {
    if (ended) return [`ended ${relative(ended, summary.at)}`, problem && h("small", {}, problem)];
    return problem ?? (works ? "at work" : `silent since ${absolute(seen)}`);
  };
  return later("Dispatchers", key, async () => Object.fromEntries(await Promise.all(
    [...new Set(summary.dispatchers.map(({ dag_id: dag }) => dag).filter(Boolean))].map(async (dag) => [dag, await airflow("GET", `dags/${part(dag)}`).catch(() => null)]))),
  (dags, again) => (summary.dispatchers.length ? table(["Runs in", "State", "Last worked", "Delivers through"], summary.dispatchers.map((one) => h("tr", {},
    h("td", {}, dags[one.dag_id] ? [h("a", { href: new URL(`../dags/${part(one.dag_id)}`, document.baseURI).pathname, onclick: leave }, one.dag_id), pauser(one.dag_id, dags[one.dag_id], again)] : one.dag_id ?? "a service or a command",
      one.host && h("small", {}, one.host)),
    h("td", {}, state(one)), h("td", { class: "time" }, time(one.worked_at)),
    h("td", {}, one.conn_ids.map((name) => name ?? "queue tables").join(", "))))) : h("p", {}, "None was at work within a day.")));
}

/** The button that pauses or unpauses a DAG; nothing if the user may not see the DAG. */
export function pauser(dag, found, again) {
  if (!found) return null;
  const paused = found.is_paused;
  return [paused && h("small", {}, "paused"), " ", h("button", { type: "button", "data-key": `pause ${dag}`, onclick: async (event) => {
    try {
      await airflow("PATCH", `dags/${part(dag)}`, { is_paused: !paused });
      again();
    } catch (fault) {
      event.target.after(h("p", { class: "notice error", role: "alert" }, fault.message));
    }
  } }, paused ? "Unpause" : "Pause")];
}

function audit(connection) {
  return later("Audit", pathOf(connection), () => get(`${pathOf(connection)}/audit`), ({ entries }) => (entries.length
    ? table(["When", "Who", "Change", "Of", "Outcomes"], entries.map(({ at, who, action, selection, counts }) => h("tr", {},
      h("td", { class: "time" }, time(at)), h("td", {}, who), h("td", {}, action),
      h("td", {}, Object.entries(selection).map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ")),
      h("td", {}, Object.entries(counts).map(([outcome, number]) => `${number.toLocaleString()} ${outcome}`).join(", ") || "none"))))
    : h("p", {}, "Nobody has changed a message.")));
}

/** The pauses of a store, and the way to pause what its dispatchers deliver through a connection. */
function pauses(connection, { dispatchers: seen }) {
  const path = pathOf(connection);
  const names = [...new Set(seen.flatMap(({ conn_ids: ids }) => ids.map((name) => name ?? connection.connection_id)))];
  return later("Pauses", path, () => get(`${path}/pauses`), ({ pauses: found }) => [
    found.length ? table(["Of", "Since", "Who", "Reason", ""], found.map((one) => h("tr", {},
      h("td", {}, inWords(one.selection)), h("td", { class: "time" }, time(one.at)), h("td", {}, one.who), h("td", {}, one.because),
      h("td", {}, connection.may.edit && h("button", { type: "button", "data-key": `unpause ${inWords(one.selection)}`, onclick: () => unpause(path, one.selection) }, "Unpause…"))))) : h("p", {}, "Nothing is paused."),
    connection.may.edit && names.length > 0 && h("p", {}, h("button", { type: "button", "data-key": "pause connection", onclick: () => pause(path, names.flatMap((name) => selectionsOf({ deliver_conn_id: name }))) }, "Pause a connection…"))]);
}

function store(summary, { connection, find }) {
  const { at, last_dispatched: gone, next_due: next } = summary;
  const hour = new Date(Date.parse(at) + 3_600_000).toISOString();
  return [
    h("dl", { class: "figures" },
      figure("Waiting", summary.waiting, { go: () => find({ state: "waiting" }) }),
      figure("Due within the hour", summary.due_within_hour, { go: () => find({ state: "waiting", due_until: hour }) }),
      figure("Overdue", summary.overdue, {
        tone: summary.overdue ? "bad" : null, go: () => find(overdue(at)),
        note: summary.overdue && summary.oldest_due ? `oldest ${relative(summary.oldest_due, at)}` : null }),
      figure("Retrying", summary.retrying, { tone: summary.retrying ? "warn" : null, go: () => find({ state: "retrying" }) }),
      figure("Failed", summary.failed, { tone: summary.failed ? "bad" : null, go: () => find({ state: "failed" }) }),
      figure("Expired", summary.expired, { tone: summary.expired ? "warn" : null, go: () => find({ state: "expired" }) }),
      figure("Next due", next ? relative(next, at) : "nothing", { note: time(next) }),
      figure("Last dispatched", gone ? relative(gone.at, at) : "none yet", {
        note: gone && time(gone.at), go: gone && (() => find({ id: gone.message_id })) })),
    dispatchers(summary, pathOf(connection)), pauses(connection, summary), audit(connection),
  ];
}

function rabbitmq(summary, context) {
  const { at, levels, unavailable } = summary;
  const earliest = levels.map((level) => level.earliest).sort()[0];
  return [
    h("dl", { class: "figures" },
      figure("Waiting", summary.messages, {
        tone: unavailable.length ? "bad" : null, note: unavailable.length ? `${unavailable.length} queues cannot be counted` : `topology ${summary.topology}` }),
      figure("Next leaves its delay queue", levels.length ? relative(earliest, at) : "nothing waits"),
      figure("Past their time, not moved on", summary.stuck, { tone: summary.stuck ? "bad" : null, note: summary.why_unknown }),
      figure("Unroutable", summary.unroutable ?? (unavailable.includes(summary.unroutable_queue) ? "unknown" : "no queue"), { tone: summary.unroutable ? "bad" : null, note: summary.unroutable_queue })),
    summary.unroutable > 0 && context.connection.may.edit && redrive(context, "Send unroutable messages again…"),
    levels.length > 0 && h("details", { open: levels.length <= 8, "data-key": "levels" }, h("summary", { "data-key": "levels-summary" }, "What waits, and when it leaves"),
      h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table" }, h("table", {},
        h("thead", {}, h("tr", {}, ["Queue", "Messages", "Not moved on", "From", "Until"].map((name, i) =>
          h("th", { scope: "col", class: i === 1 || i === 2 ? "number" : null }, name)))),
        h("tbody", {}, levels.map((level) => h("tr", {},
          h("td", { class: "mono" }, level.queue),
          h("td", { class: "number" }, level.messages?.toLocaleString() ?? "unknown"),
          h("td", { class: "number" }, level.stuck?.toLocaleString() ?? "unknown"),
          h("td", { class: "time" }, time(level.earliest)), h("td", { class: "time" }, time(level.latest)))))))),
  ];
}

function sqs(summary, context) {
  const dead = summary.dead_letter_queue;
  const row = (role, queue) => h("tr", {}, h("td", { title: meaning(role) }, role), queue
    ? [h("td", { class: "mono" }, queue.queue), ...[queue.waiting, queue.delayed, queue.in_flight].map((count) =>
      h("td", { class: "number" }, count.toLocaleString()))]
    : h("td", { colspan: 4, class: "muted" }, "there is none"));
  return [
    h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table" }, h("table", {},
      h("thead", {}, h("tr", {}, ["Role", "Queue", "Waiting", "Delayed", "In flight"].map((name, i) => h("th", { scope: "col", class: i > 1 ? "number" : null }, name)))),
      h("tbody", {}, row("Destination", summary.destination), row("Delay FIFO", summary.delay_queue), row("Dead letters", dead)))),
    h("p", { class: "muted" }, "Counts are SQS's own, which are approximate."),
    dead && dead.waiting > 0 && context.connection.may.edit && redrive(context, "Move dead letters back…"),
  ];
}
