// Changing messages: what would happen is counted and asked first, what did happen is shown message by message.

import { get, post } from "./api.js";
import { h, open, show } from "./dom.js";
import { lines } from "./remedy.js";
import { LATEST, absolute, fromField, zone } from "./time.js";

const SAYS = {
  cancel: { title: "Cancel messages", go: "Cancel them", done: "cancelled", ask: "They will not be delivered, and a later send of the same ids does not bring them back." },
  reschedule: { title: "Reschedule messages", go: "Reschedule them", done: "rescheduled", ask: "They will be delivered then." },
  retry: { title: "Retry messages", go: "Retry them", done: "retried", ask: "They wait again, and are dispatched at once if they are due. Repair the cause first: otherwise they fail again." },
  restore: { title: "Take back a cancel", go: "Take it back", done: "restored", ask: "The messages wait again, and are delivered when they are due." },
  erase: { title: "Erase messages", go: "Erase them", done: "erased", ask: "Body, headers, tag and destination are removed for good. This cannot be undone.", grave: true },
};
/** The criteria that the commands have, too. */
const OPTIONS = ["tag", "destination", "due_from", "due_until", "dag_id", "run_id", "due_at"];
const AT_ONCE = "They are dispatched at once, for that time is not to come.";
/** Messages that the server changes in one step, and from how many on a command is named. */
const STEP = 10_000;
const VERY_MANY = 100_000;
const SHOWN = 100;
const NAMED = 5;
const DONE = new Set(Object.values(SAYS).map(({ done }) => done));

/** Ask, do, and show the result; resolves to whether anything may have changed. now: the store's time. */
export async function act(name, store, path, selection, now) {
  const says = SAYS[name];
  const title = `${says.title} in ${store}`;
  let work = null;
  await open(title, async (content, close) => {
    const ask = async (more) => {
      show(content, h("p", { role: "status" }, "Counting …"));
      try {
        const would = await post(`${path}/${name}`, { ...selection, ...more, dry_run: true });
        const overdue = !more.overdue_ok && would.outcomes.overdue;
        const past = name === "reschedule" && (more.delay_seconds === 0 || Date.parse(would.due_at) <= Date.parse(now));
        show(content, question(past ? { ...says, ask: AT_ONCE } : says, would, close, () => {
          work = carry(content, `${path}/${name}`, { ...selection, ...more, due_at: would.due_at ?? undefined, delay_seconds: undefined }, would, close, { name, store, selection });
        }, selection, commandOf(name, store, { ...selection.filter, overdue_ok: more.overdue_ok, due_at: would.due_at })), overdue > 0 && h("p", { class: "notice warn" }, `${count(overdue, "message is", "messages are")} overdue by now, and would be dispatched at once. `,
          h("button", { type: "button", onclick: () => ask({ ...more, overdue_ok: true }) }, "Take the overdue back too…")));
        // not the button that acts: who holds a key down has not read the question
        content.querySelector("footer button").focus();
      } catch (fault) {
        show(content, failed(fault));
      }
    };
    const more = name === "reschedule" ? await when(content) : {};
    return more === null ? close() : ask(more);
  });
  if (work === null) return false;
  const done = await work;
  // closed meanwhile: the result is shown nevertheless
  if (!done.seen) await open(title, (content, close) => show(content, done.nodes(close)));
  if (done.undo()) await act("restore", store, path, done.undo(), now);
  return true;
}

/** Do it, and show what became of it where the question was. */
async function carry(content, path, asked, would, close, { name, store, selection }) {
  let nodes;
  let undo = null;
  try {
    const sum = await steps(content, path, asked, would);
    const obstacles = name === "retry" && sum.changed ? await obstaclesOf(store) : [];
    const until = name === "cancel" && sum.changed ? await restorableUntil(path.replace(/cancel$/, "messages"), sum, selection) : null;
    nodes = (end) => result(name, sum, end, obstacles, until && h("p", {}, h("button", { type: "button", onclick: () => {
      undo = cancelled(sum, selection);
      end();
    } }, "Take it back…"), ` until ${absolute(until)}`));
  } catch (fault) {
    nodes = () => [failed(fault)];
  }
  const seen = content.isConnected;
  if (!seen) return { seen, nodes, undo: () => undo };
  show(content, nodes(close));
  await new Promise((resolve) => content.closest("dialog").addEventListener("close", resolve));
  return { seen, nodes, undo: () => undo };
}

const namesOf = (sum) => sum.messages.filter(({ outcome }) => outcome === "cancelled").map(({ message_id: id }) => id);

/** What a cancel has changed, as a selection: each message if the answers name them all. */
function cancelled(sum, { filter }) {
  const ids = namesOf(sum);
  return ids.length === sum.changed ? { ids } : { filter: { ...filter, state: ["cancelled"] } };
}

/** Until when a cancel can be taken back; null: it cannot. */
async function restorableUntil(messages, sum, { filter }) {
  const [id] = namesOf(sum);
  // the first that was cancelled, which is named, is the first that is kept no longer
  const found = await get(messages, { ...(id ? { id } : filter), state: "cancelled", limit: 1 }).catch(() => null);
  return found?.remembered[0]?.restorable_until ?? null;
}

/** What keeps messages of a store from being delivered, such as that no dispatcher is at work. */
async function obstaclesOf(store) {
  const { causes } = await get("health").catch(() => ({ causes: [] }));
  return causes.filter((cause) => cause.severity === "error" && (cause.connection_id === store || cause.kind !== "store"));
}

const failed = (fault) => h("p", { class: "notice error", role: "alert" }, fault.message);
const count = (number, one = "message", many = "messages") => `${number.toLocaleString()} ${number === 1 ? one : many}`;

function when(content) {
  return new Promise((resolve) => {
    const field = h("input", { type: "datetime-local", step: 1, max: LATEST, name: "due_at", required: true });
    show(content, h("form", { onsubmit: (event) => {
      event.preventDefault();
      resolve({ due_at: fromField(field.value) });
    } }, h("label", {}, `New due time (${zone()})`, field),
    h("p", { class: "muted" }, "A time in the past is dispatched at once."),
    h("footer", {}, h("button", { type: "button", onclick: () => resolve({ delay_seconds: 0 }) }, "Due now"),
      h("button", { class: "primary" }, "Go on"))));
    field.focus();
    content.closest("dialog").addEventListener("close", () => resolve(null));
  });
}

function outcomes(found) {
  return h("ul", {}, Object.entries(found).map(([outcome, number]) => h("li", {}, `${outcome}: `, h("strong", {}, number.toLocaleString()))));
}

/** What is chosen, in words: the first ids, or the filter. */
function chosen({ ids, filter }) {
  if (filter) return `By ${Object.entries(filter).map(([name, value]) => `${name.replaceAll("_", " ")} ${[value].flat().join(" or ")}`).join(", ")}`;
  return `${ids.slice(0, NAMED).join(", ")}${ids.length > NAMED ? ` and ${(ids.length - NAMED).toLocaleString()} more` : ""}`;
}

/** What left the store for a broker and is not due yet. */
function outOfReach({ out_of_reach: found, out_of_reach_at_least: least }) {
  return found.map(({ deliver_conn_id: name, messages, until }) => h("p", { class: "notice warn" },
    `${least ? "At least " : ""}${count(messages, "message was", "messages were")} dispatched to ${name}, ${messages === 1 ? "is due at" : "are due until"} ${absolute(until)} and cannot be taken back.`));
}

/** The command that does the same; null: it has no such filter. */
function commandOf(name, store, { state = [], overdue_ok: overdue, ...filter }) {
  const wanted = { retry: "failed", restore: "cancelled", erase: "cancelled" }[name];
  if (Object.keys(filter).some((one) => !OPTIONS.includes(one)) || (wanted && state.some((one) => one !== wanted))) return null;
  const quoted = (value) => (/^[\w@%+=:,./-]+$/.test(value) ? value : `'${String(value).replaceAll("'", "'\"'\"'")}'`);
  const given = [["store_conn_id", store], ...Object.entries(filter), ...(name === "retry" ? [] : state.map((one) => ["state", one]))].filter(([, value]) => value);
  // Python's older releases read no Z
  return `airflow delayed ${name} ${given.map(([option, value]) => `--${option.replaceAll("_", "-")} ${quoted(option.startsWith("due_") ? value.replace(/Z$/, "+00:00") : value)}`).join(" ")}${overdue ? " --overdue-ok" : ""}`;
}

/** What is said of a change that takes several steps. */
function ofSteps({ matching, next }, command) {
  return next && [h("p", {}, `The page does it in steps of ${STEP.toLocaleString()} messages, for as long as this stays open. What is done stays done.`),
    matching > VERY_MANY && command && h("div", {}, lines(`For so many there is a command, which needs no page: ${command}`))];
}

function question(says, would, close, go, selection, command) {
  const least = would.matching_at_least ? "At least " : "";
  const others = Object.entries(would.outcomes).length > 1 || would.changed !== would.total;
  if (!would.changed && !would.next) {
    return [
      h("p", { class: "notice warn" }, "Nothing would change. Outcomes:"), outcomes(would.outcomes), outOfReach(would), h("p", { class: "mono" }, chosen(selection)),
      h("footer", {}, h("button", { type: "button", class: "primary", onclick: close }, "Close")),
    ];
  }
  return [
    h("p", { class: "mono" }, chosen(selection)),
    h("p", {}, `${least}${count(would.matching, "message matches", "messages match")}. ${says.ask}`),
    outOfReach(would),
    would.due_at && h("p", {}, "New due time: ", h("strong", {}, absolute(would.due_at))),
    ofSteps(would, command),
    others && [h("p", {}, would.next ? "Outcomes of the first of them:" : "Outcomes:"), outcomes(would.outcomes)],
    h("footer", {}, h("button", { type: "button", onclick: close }, "Leave them as they are"),
      h("button", { type: "button", class: says.grave ? "danger solid" : "primary", onclick: go }, says.go)),
  ];
}

/** Do it step by step while the dialog is open, no more messages of a filter than there were when it was asked; what became of them all. */
async function steps(content, path, asked, would) {
  if (!asked.filter) {
    show(content, h("p", { role: "status" }, "At work …"));
    return post(path, { ...asked, dry_run: false });
  }
  const most = would.matching_at_least ? Infinity : would.matching;
  const sum = { total: 0, changed: 0, outcomes: {}, messages: [], out_of_reach: would.out_of_reach, out_of_reach_at_least: would.out_of_reach_at_least };
  const bar = h("progress", { max: would.matching, value: 0, "aria-label": "Progress" });
  const far = () => `${sum.total.toLocaleString()} of ${would.matching_at_least ? "at least " : ""}${would.matching.toLocaleString()} messages`;
  const line = h("p", { role: "status" }, "At work …");
  const stop = h("button", { type: "button", onclick: () => { stop.disabled = true; } }, "Stop");
  show(content, line, would.next && [bar, h("p", { class: "muted" }, "Keep this open: closed, it ends behind the step that is at work."), h("footer", {}, stop)]);
  let last = {};
  do {
    try {
      last = await post(path, { ...asked, dry_run: false, most: Number.isFinite(most) ? most - sum.total : undefined, after: last.next, audit: last.audit });
    } catch (fault) {
      if (!sum.total) throw fault;
      return { ...sum, shortfall: `Failed after ${far()}: ${fault.message} Ask again to go on with the others.` };
    }
    sum.total += last.total;
    sum.changed += last.changed;
    for (const [outcome, number] of Object.entries(last.outcomes)) sum.outcomes[outcome] = (sum.outcomes[outcome] ?? 0) + number;
    if (sum.messages.length < SHOWN) sum.messages.push(...last.messages);
    bar.value = sum.total;
    line.textContent = `${far()} …`;
  } while (last.next && sum.total < most && !stop.disabled && content.isConnected);
  if (last.next && sum.total < most) return { ...sum, shortfall: `Stopped after ${far()}; the others are unchanged.` };
  // what one step did it has looked at itself
  return would.next ? { ...sum, more: Boolean(last.next) } : { ...sum, more: Boolean(last.next), out_of_reach: last.out_of_reach, out_of_reach_at_least: last.out_of_reach_at_least };
}

function result(name, sum, close, obstacles, undo) {
  const missed = sum.total - sum.changed;
  // what was not changed comes first: it is what one looks for
  const named = [...sum.messages].sort((one, other) => DONE.has(one.outcome) - DONE.has(other.outcome)).slice(0, SHOWN);
  return [
    h("p", { class: `notice ${missed ? "warn" : "good"}`, role: "status" }, `${count(sum.changed)} ${SAYS[name].done}${missed ? `, ${missed.toLocaleString()} not` : ""}.`),
    outOfReach(sum),
    sum.shortfall && h("p", { class: "notice warn" }, sum.shortfall),
    undo,
    obstacles.map(({ where, what, remedy }) => h("p", { class: "notice error" }, "They may not be delivered yet: ", h("strong", {}, where), `: ${what}.`, remedy && ` What to do: ${remedy}.`)),
    sum.more && h("p", { class: "notice warn" }, "More messages match by now and were not changed: search again."),
    missed > 0 && outcomes(sum.outcomes),
    named.length > 0 && h("details", { open: missed > 0 && named.length <= 20 }, h("summary", {}, "Message by message"), h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table" }, h("table", {}, h("tbody", {},
      named.map((one) => h("tr", {}, h("td", { class: "mono" }, one.message_id), h("td", {}, one.outcome)))))),
      sum.total > named.length && h("p", { class: "muted" }, `${named.length.toLocaleString()} of ${count(sum.total)} are listed.`)),
    h("footer", {}, h("button", { type: "button", class: "primary", onclick: close }, "Done")),
  ];
}
