// One card for each connection: its figures, what falls due, and what is wrong.

import { get, part } from "./api.js";
import { chart } from "./chart.js";
import { redrive } from "./redrive.js";
import { h, show } from "./dom.js";
import { absolute, relative, span } from "./time.js";

const KINDS = { store: "SQL store", rabbitmq: "RabbitMQ", sqs: "Amazon SQS" };
const UNSEEN = 3600; // seconds after which nobody seems to dispatch any more

export const pathOf = ({ kind, connection_id, queue }) => ({
  store: `stores/${part(connection_id)}`,
  rabbitmq: `rabbitmq/${part(connection_id)}`,
  sqs: `sqs/${part(connection_id)}/${part(queue ?? "")}`,
})[kind];

/** Make a connection's card; find(filter) shows messages of a store. */
export function card(connection, find) {
  const body = h("div", {}, h("div", { class: "waiting-line" }));
  const age = h("span", { class: "muted" });
  const { connection_id: name, queue, kind } = connection;
  const title = queue ? `${name}: ${queue}` : name;
  const element = h("article", { class: "card", "aria-label": `${KINDS[kind]} ${title}`, "aria-busy": true, "data-connection": title },
    h("header", {}, h("h2", {}, title), h("span", { class: "badge" }, KINDS[kind]), age), body);
  const draw = { store, rabbitmq, sqs }[kind];
  let last = null;
  let turn = 0;
  let told = "";

  async function load() {
    const mine = ++turn;
    try {
      const found = await get(`${pathOf(connection)}/summary`);
      if (mine !== turn) return; // a later question has been asked meanwhile
      last = found;
      told = "";
      show(body, draw(last, { connection, find, reload: load }));
      age.textContent = last.age_seconds >= 1 ? `${span(last.age_seconds)} old` : "";
    } catch (fault) {
      if (mine !== turn) return;
      // old figures would pass for the present; what was said is not said again
      if (told !== fault.message) show(body, h("p", { class: "notice error", role: "alert" }, fault.message));
      told = fault.message;
      age.textContent = last ? `last seen ${absolute(last.at)}` : "";
    }
    element.setAttribute("aria-busy", "false");
  }
  return { element, load, redraw: () => last && show(body, draw(last, { connection, find, reload: load })) };
}

function figure(name, value, { tone = null, note = null, go = null } = {}) {
  const said = typeof value === "number" ? value.toLocaleString() : value ?? "unknown";
  return h("div", { class: tone }, h("dt", {}, name), h("dd", {},
    go ? h("button", { type: "button", class: "plain", onclick: go, "data-key": name, "aria-label": `${name}: ${said}; show them` }, said) : said,
    note && h("small", {}, note)));
}

function store(summary, { find }) {
  const { at, last_dispatched: gone, next_due: next, dispatchers } = summary;
  const hour = new Date(Date.parse(at) + 3_600_000).toISOString();
  const seen = dispatchers[0]?.seen_at;
  const unseen = !seen || Date.parse(at) - Date.parse(seen) > UNSEEN * 1000;
  const anything = summary.waiting + summary.due + summary.retrying > 0;
  return [
    h("dl", { class: "figures" },
      figure("Waiting", summary.waiting, { go: () => find({ state: "waiting" }) }),
      figure("Due within the hour", summary.due_within_hour, { go: () => find({ state: "waiting", due_until: hour }) }),
      figure("Overdue", summary.overdue, {
        tone: summary.overdue ? "bad" : null, go: () => find({ state: "due", due_until: new Date(Date.parse(at) - 60_000).toISOString() }),
        note: summary.overdue && summary.oldest_due ? `oldest ${relative(summary.oldest_due, at)}` : null }),
      figure("Being retried", summary.retrying, { tone: summary.retrying ? "warn" : null, go: () => find({ state: "retrying" }) }),
      figure("Failed", summary.failed, { tone: summary.failed ? "bad" : null, go: () => find({ state: "failed" }) }),
      figure("Expired", summary.expired, { tone: summary.expired ? "warn" : null, go: () => find({ state: "expired" }) }),
      figure("Next due", next ? relative(next, at) : "nothing", { note: next && absolute(next) }),
      figure("Last dispatched", gone ? relative(gone.at, at) : "none yet", {
        note: gone && absolute(gone.at), go: gone && (() => find({ id: gone.message_id })) })),
    unseen && anything && h("p", { class: "notice warn" }, seen
      ? `No dispatcher has been at work here since ${absolute(seen)}. Is the DAG with the StoreDispatchOperator paused or failing?`
      : "No dispatcher has been seen here within a day. Run a DAG with a StoreDispatchOperator, or nothing that waits is handed over."),
    h("div", { class: "charts" }, chart(summary.by_minute, "Due in the next hour"), chart(summary.by_hour, "Due in the next day")),
  ];
}

function rabbitmq(summary, context) {
  const { at, levels } = summary;
  const earliest = levels.map((level) => level.earliest).sort()[0];
  return [
    h("dl", { class: "figures" },
      figure("Waiting", summary.messages, { note: `topology ${summary.topology}` }),
      figure("Next may leave", levels.length ? relative(earliest, at) : "nothing waits"),
      figure("Stuck", summary.stuck, { tone: summary.stuck ? "bad" : null, note: summary.why_unknown }),
      figure("Unroutable", summary.unroutable ?? "no queue", { tone: summary.unroutable ? "bad" : null, note: summary.unroutable_queue })),
    summary.missing.length > 0 && h("p", { class: "notice error" },
      `Delay queues are missing: ${summary.missing.join(", ")}. Run the TopologyInstallOperator.`),
    summary.unroutable > 0 && context.connection.may.act && redrive(context, "Send unroutable messages again…"),
    levels.length > 0 && h("details", { open: levels.length <= 8, "data-key": "levels" }, h("summary", { "data-key": "levels-summary" }, "What waits, and when it leaves"),
      h("div", { class: "scroll" }, h("table", {},
        h("thead", {}, h("tr", {}, ["Queue", "Messages", "Stuck", "From", "Until"].map((name, i) =>
          h("th", { scope: "col", class: i === 1 || i === 2 ? "number" : null }, name)))),
        h("tbody", {}, levels.map((level) => h("tr", {},
          h("td", { class: "mono" }, level.queue),
          h("td", { class: "number" }, level.messages?.toLocaleString() ?? "missing"),
          h("td", { class: "number" }, level.stuck?.toLocaleString() ?? "unknown"),
          h("td", { class: "time" }, absolute(level.earliest)), h("td", { class: "time" }, absolute(level.latest)))))))),
  ];
}

function sqs(summary, context) {
  const dead = summary.dead_letter_queue;
  const row = (role, queue) => h("tr", {}, h("td", {}, role), queue
    ? [h("td", { class: "mono" }, queue.queue), ...[queue.waiting, queue.delayed, queue.in_flight].map((count) =>
      h("td", { class: "number" }, count.toLocaleString()))]
    : h("td", { colspan: 4, class: "muted" }, "there is none"));
  return [
    summary.risk && h("p", { class: "notice warn" }, summary.risk),
    h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, ["", "Queue", "Waiting", "Delayed", "In flight"].map((name, i) => h("th", { scope: "col", class: i > 1 ? "number" : null }, name)))),
      h("tbody", {}, row("Destination", summary.destination), row("Delay FIFO", summary.delay_queue), row("Dead letters", dead)))),
    h("p", { class: "muted" }, "Counts are SQS's own, which are approximate."),
    dead && dead.waiting > 0 && h("p", { class: "notice error" }, `${dead.waiting.toLocaleString()} messages were given up by their consumer.`),
    dead && dead.waiting > 0 && context.connection.may.act && redrive(context, "Move dead letters back…"),
  ];
}
