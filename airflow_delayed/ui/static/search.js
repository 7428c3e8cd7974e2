// The search of a store's messages: one field with suggestions, a chip for each criterion, and the rarer fields.

import { get } from "./api.js";
import { h, meaning, show } from "./dom.js";
import { LATEST, absolute, fromField, toField, zone } from "./time.js";

export const STATES = ["waiting", "due", "in flight", "retrying", "failed", "expired", "dispatched", "cancelled"];
/** The criteria; they are in the page's address, so that it can be kept and passed on. */
export const FIELDS = ["id", "state", "tag", "destination", "due_from", "due_until", "dag_id", "run_id", "task_id", "map_index", "reason"];
const NAMES = { id: "id", state: "state", tag: "tag", destination: "destination", due_from: "due from", due_until: "due before",
  dag_id: "DAG", run_id: "run", task_id: "task", map_index: "map index", reason: "reason" };
/** What the field searches. */
const SEARCHED = ["id", "tag", "destination", "dag_id"];
const OF_A_DAG = ["run_id", "task_id", "map_index"];
const PAUSE = 200; // ms after a key, before suggestions are asked for
/** Stands for several states in the field of one. */
const KEPT = "*";

/** Seconds after its due time from which a message is overdue, whoever has it. */
export const LATE = 10;

/** The filter of what is overdue at a time of the server. */
export const overdue = (at) => ({ state: ["due", "in flight", "retrying"], due_until: new Date(Date.parse(at) - LATE * 1000).toISOString() });

/** A filter with all criteria; without a DAG what belongs to a DAG is left out. */
export function filterOf(given) {
  const filter = Object.fromEntries(FIELDS.map((name) => [name, given[name] ?? ""]));
  filter.state = [filter.state].flat().filter(Boolean);
  return filter;
}

export const isEmpty = (filter) => !FIELDS.some((name) => filter[name]?.length);

/** Whether what has left the store is found by an index too, so that it is listed with what is in it. */
export const together = ({ state, id, reason, tag, run_id: run }) => !state.length && !id && !reason && Boolean(tag || run);

/** What keeps a filter from being asked; null: nothing. */
export function problemOf(filter) {
  if (!filter.dag_id && OF_A_DAG.some((name) => filter[name] !== "")) return "Write the DAG too: a run, a task and a map index are looked up within a DAG.";
  return Date.parse(filter.due_from) >= Date.parse(filter.due_until) ? "“Due from” is not before “Due before”, so nothing can match." : null;
}

/** Draw the search; find(filter) is called with a new filter. Returns its field, an element with the criteria, a place for what can be done with all that match, and count(text) to show how many do. */
export function search(path, filter, find) {
  const matches = h("span", { class: "muted", role: "status" });
  const whole = h("span", { class: "buttons" });
  const element = h("div", { class: "criteria" }, matches, chips(filter, find), whole, more(filter, find));
  return { field: field(path, filter, find), element, whole, count: (text) => { if (matches.textContent !== text) matches.textContent = text; } };
}

/** The search field: suggestions come while one types; the arrows choose one, Enter takes the first. */
function field(path, filter, find) {
  const note = h("small", { id: "search-note", class: "muted" }, "Suggestions begin with what you type; upper and lower case count. What you choose is compared exactly. An id of id_columns is found by them: order_id=1001.");
  const list = h("ul", { class: "suggestions", id: "suggestions", "aria-label": "Suggestions", hidden: true }, h("li", {}, note));
  let turn = 0;
  let timer = null;
  const input = h("input", { type: "search", "aria-label": "Search by id, tag, destination or DAG", "aria-describedby": "search-note", "aria-keyshortcuts": "/", placeholder: "Search: id, tag, destination, DAG ( / )",
    autocomplete: "off", spellcheck: "false", "data-key": "search", maxlength: 250 });
  const take = ({ field: name, value }) => find({ ...filter, [name]: value });
  const suggest = async () => {
    const mine = ++turn;
    const text = input.value;
    if (!text) return draw([]);
    let found;
    try {
      found = (await get(`${path}/search`, { q: text })).matches;
    } catch {
      found = []; // the four exact criteria are offered all the same
    }
    if (mine !== turn) return null;
    const exact = found.filter((one) => one.exact);
    const rest = SEARCHED.filter((name) => !exact.some((one) => one.field === name)).map((name) => ({ field: name, value: text }));
    return draw([...exact, ...found.filter((one) => !one.exact), ...rest]);
  };
  const draw = (options) => {
    show(list, options.map((option) => h("li", {}, h("button", { type: "button", onclick: () => take(option) },
      h("span", { class: "muted" }, `${NAMES[option.field]} `), h("bdi", {}, option.value)))), h("li", {}, note));
    list.hidden = !options.length;
    return options;
  };
  const move = (event, steps) => {
    event.preventDefault();
    const all = [input, ...list.querySelectorAll("button")];
    all[(all.indexOf(document.activeElement) + steps + all.length) % all.length].focus();
  };
  input.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(suggest, PAUSE);
  });
  return h("form", { class: "field", onsubmit: async (event) => {
    event.preventDefault();
    clearTimeout(timer);
    const options = await suggest();
    if (options?.length) take(options[0]);
  }, onkeydown: (event) => {
    if (event.key === "ArrowDown") move(event, 1);
    else if (event.key === "ArrowUp") move(event, -1);
    else if (event.key === "Escape" && !list.hidden) {
      turn += 1;
      draw([]);
      input.focus();
    }
  } }, input, list);
}

function chips(filter, find) {
  const chip = (name, value, without) => h("span", { class: "chip", title: name === "state" ? meaning(value[0].toUpperCase() + value.slice(1)) : null },
    h("span", { title: value }, `${NAMES[name]}: `, h("strong", {}, name.startsWith("due_") ? absolute(value) : value)),
    h("button", { type: "button", "data-key": `remove ${name} ${value}`, "aria-label": `Remove ${NAMES[name]} ${value}`, onclick: () => find(without) }, "×"));
  const all = FIELDS.filter((name) => filter[name].length).flatMap((name) => (name === "state"
    ? filter.state.map((value) => chip(name, value, { ...filter, state: filter.state.filter((one) => one !== value) }))
    // without its DAG a run, a task or a map index cannot be looked up
    : [chip(name, filter[name], { ...filter, [name]: "", ...(name === "dag_id" ? Object.fromEntries(OF_A_DAG.map((one) => [one, ""])) : {}) })]));
  return [all, all.length > 1 && h("button", { type: "button", class: "plain", "data-key": "clear", onclick: () => find({}) }, "Clear")];
}

/** The form with all criteria. */
function more(filter, find) {
  const text = (name, label, options = {}) => h("label", {}, label, h("input", { name, value: filter[name], autocomplete: "off", spellcheck: "false", "data-key": name, ...options }));
  const moment = (name, label) => h("label", {}, `${label} (${zone()})`,
    h("input", { name, type: "datetime-local", step: 1, max: LATEST, value: toField(filter[name]), "data-key": name }));
  const send = (event) => {
    event.preventDefault();
    const given = Object.fromEntries(new FormData(event.currentTarget));
    for (const name of ["due_from", "due_until"]) {
      // a time that the user did not touch stays exact
      given[name] = given[name] && given[name] === toField(filter[name]) ? filter[name] : fromField(given[name]) ?? "";
    }
    given.state = given.state === KEPT ? filter.state : given.state;
    find({ ...given, reason: filter.reason });
  };
  const several = filter.state.length > 1;
  return h("details", { class: "more", "data-key": "more" }, h("summary", { "data-key": "more summary" }, "+ more"),
    h("form", { class: "filter", onsubmit: send },
      text("id", "Message id"),
      h("label", {}, "State", h("select", { name: "state", "data-key": "state" }, h("option", { value: "" }, "any"),
        several && h("option", { value: KEPT, selected: true }, filter.state.join(" or ")),
        STATES.map((state) => h("option", { value: state, selected: !several && filter.state[0] === state }, state)))),
      text("tag", "Tag"), text("destination", "Destination"),
      moment("due_from", "Due from"), moment("due_until", "Due before"),
      text("dag_id", "DAG"), text("run_id", "Run"), text("task_id", "Task"), text("map_index", "Map index", { type: "number", min: -1, step: 1 }),
      h("div", { class: "buttons" }, h("button", { class: "primary", "data-key": "find" }, "Find"))));
}
