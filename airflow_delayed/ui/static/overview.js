// One card for each connection: its figures, its charts, and its problems.

import { get, pathOf } from "./api.js";
import { chart } from "./chart.js";
import { redrive } from "./redrive.js";
import { h, show } from "./dom.js";
import { absolute, relative, span } from "./time.js";

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
  let turn = 0;
  let shown = "";

  async function load() {
    const mine = ++turn;
    let answered = true;
    try {
      const found = await get(`${pathOf(connection)}/summary`);
      if (mine !== turn) return true; // a later question has been asked meanwhile
      last = found;
      shown = "";
      loaded(last);
      show(body, draw(last, { connection, find, reload: load }));
      age.textContent = last.age_seconds >= 1 ? `${span(last.age_seconds)} old` : "";
    } catch (fault) {
      if (mine !== turn) return true;
      answered = false;
      // the last figures stay, greyed and with their age; the same alert is not repeated, and a lost login is the verdict's
      const alert = fault.status !== 401 && h("p", { class: "notice error", role: "alert" }, fault.message);
      if (shown !== fault.message) show(body, alert, last && h("div", { class: "stale" }, draw(last, { connection, find, reload: load })));
      shown = fault.message;
      age.textContent = last ? `last seen ${absolute(last.at)}` : "";
    }
    element.setAttribute("aria-busy", "false");
    return answered;
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
  const { at, last_dispatched: gone, next_due: next } = summary;
  const hour = new Date(Date.parse(at) + 3_600_000).toISOString();
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
    h("div", { class: "charts" }, chart(summary.by_minute, "Due in the next hour"), chart(summary.by_hour, "Due in the next day")),
  ];
}

function rabbitmq(summary, context) {
  const { at, levels, unavailable } = summary;
  const earliest = levels.map((level) => level.earliest).sort()[0];
  return [
    h("dl", { class: "figures" },
      figure("Waiting", unavailable.length && !summary.messages ? null : summary.messages, {
        tone: unavailable.length ? "bad" : null, note: unavailable.length ? `and what waits in ${unavailable.length} queues without a leader` : `topology ${summary.topology}` }),
      figure("Next leaves its delay queue", levels.length ? relative(earliest, at) : "nothing waits"),
      figure("Past their time, not moved on", summary.stuck, { tone: summary.stuck ? "bad" : null, note: summary.why_unknown }),
      figure("Unroutable", summary.unroutable ?? (unavailable.includes(summary.unroutable_queue) ? "unknown" : "no queue"), { tone: summary.unroutable ? "bad" : null, note: summary.unroutable_queue })),
    summary.unroutable > 0 && context.connection.may.edit && redrive(context, "Send unroutable messages again…"),
    levels.length > 0 && h("details", { open: levels.length <= 8, "data-key": "levels" }, h("summary", { "data-key": "levels-summary" }, "What waits, and when it leaves"),
      h("div", { class: "scroll" }, h("table", {},
        h("thead", {}, h("tr", {}, ["Queue", "Messages", "Not moved on", "From", "Until"].map((name, i) =>
          h("th", { scope: "col", class: i === 1 || i === 2 ? "number" : null }, name)))),
        h("tbody", {}, levels.map((level) => h("tr", {},
          h("td", { class: "mono" }, level.queue),
          h("td", { class: "number" }, level.messages?.toLocaleString() ?? "unknown"),
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
    h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, ["", "Queue", "Waiting", "Delayed", "In flight"].map((name, i) => h("th", { scope: "col", class: i > 1 ? "number" : null }, name)))),
      h("tbody", {}, row("Destination", summary.destination), row("Delay FIFO", summary.delay_queue), row("Dead letters", dead)))),
    h("p", { class: "muted" }, "Counts are SQS's own, which are approximate."),
    dead && dead.waiting > 0 && context.connection.may.edit && redrive(context, "Move dead letters back…"),
  ];
}
