// The verdict's headline: how each destination fares.

import { pathOf } from "./api.js";
import { h } from "./dom.js";
import { pause, selectionsOf } from "./pauses.js";
import { clock, span, time } from "./time.js";

/** What keeps the messages of a destination, by the code of its cause. */
const WORDS = { "destination-refuses": "refused", "destination-missing": "not there", "connection-fails": "connection fails", unreachable: "unreachable", silent: "no answer",
  "no-dispatcher": "no dispatcher", "dispatcher-fails": "dispatcher fails", overdue: "late" };
/** Causes that begin with the first late message: its lateness stands on the line already. */
const OF_LATENESS = new Set(["no-dispatcher", "overdue"]);
const FIRST = 6;
const ON_A_PHONE = 2;
const SHORT = 10; // s, below which a span has parts of a second

/** A line with each destination, which who may edit its store can pause; on a phone the gravest alone, the others one press away. */
export function destinations(lateness, { phone, connections }) {
  const first = phone ? ON_A_PHONE : FIRST;
  const [seen, others] = [lateness.slice(0, first), lateness.slice(first)];
  const stores = new Map(connections.filter(({ kind, may }) => kind === "store" && may.edit).map((one) => [one.connection_id, one]));
  const line = (one) => item(one, stores.get(one.store_conn_id));
  return lateness.length > 0 && h("ul", { class: "destinations", "aria-label": "By destination" }, seen.map(line),
    others.length > 0 && h("li", {}, h("details", { "data-key": "destinations" }, h("summary", { "data-key": "destinations summary" }, `${others.length} more`), h("ul", {}, others.map(line)))));
}

function item({ store_conn_id: name, conn_id: connection, destination, status, code, since, late_seconds: late, p99_seconds: p99, dispatched }, store) {
  const title = [connection, destination].filter(Boolean).join("/");
  const word = status === "late" && !late && !code ? "late in the last 2 min" : WORDS[code] ?? status;
  const selections = selectionsOf({ destination, deliver_conn_id: connection });
  return h("li", { class: status, title: `${title}, of store ${name}` }, h("strong", {}, title), ` ${word}`, since && !OF_LATENESS.has(code) && [" since ", time(since, clock)],
    late > 0 ? `, ${span(late)} late` : dispatched > 0 && p99 !== null && `, ${p99 ? `99 % within ${p99 < SHORT ? `${Number(p99.toFixed(2))} s` : span(p99)}` : "on time"}`,
    store && status !== "paused" && [" ", h("button", { type: "button", class: "plain", "data-key": `pause ${name} ${title}`, "aria-label": `Pause ${title}`, onclick: () => pause(pathOf(store), selections) }, "Pause…")]);
}
