// The messages of a store: counts by state, a search, one page of a list, and the actions on the chosen messages.

import { act } from "./actions.js";
import { Fault, get, part } from "./api.js";
import { h, meaning, show } from "./dom.js";
import { badge, detail, taskAddress } from "./message.js";
import { LATE, filterOf, isEmpty, overdue, problemOf, search, together } from "./search.js";
import { leave } from "./airflow.js";
import { absolute, relative, span, time } from "./time.js";
import { timeline } from "./timeline.js";

/** States with the name of their count in the summary of a store. */
const COUNTED = [["due", "due"], ["in flight", "in_flight"], ["retrying", "retrying"], ["failed", "failed"], ["expired", "expired"], ["waiting", "waiting"], ["dispatched", null], ["cancelled", null]];
const BAD = new Set(["Overdue", "Due", "Failed"]);
const ACTIONS = [["cancel", "Cancel…"], ["reschedule", "Reschedule…"], ["retry", "Retry…"], ["restore", "Take back…"], ["erase", "Erase…"]];
const LIMIT = 50;
/** States of messages that are late once they are due. */
const TO_COME = new Set(["waiting", "due", "in flight", "retrying"]);
const COLUMNS = [["Message", "id"], ["State", "state"], ["Due", "time"], ["Late", "late"], ["Destination"], ["Tag"], ["Sent by"]];

export class Messages {
  constructor(element, stores, { changed, asked }) {
    Object.assign(this, { element, stores, changed, asked });
    this.store = stores[0];
    this.filter = filterOf({});
    this.trail = []; // the tokens of the pages before this one
    this.after = null;
    this.page = null;
    this.fault = null;
    this.chosen = new Set();
    this.all = false;
    this.turn = 0;
    this.summaries = new Map();
    this.failures = [];
    this.counts = null; // of what matches, by state
    this.message = null; // the id of the message that is shown
    this.byLateness = false;
  }

  get path() {
    return `stores/${part(this.store.connection_id)}`;
  }

  /** Show the messages that match a filter, from the first page on; again: the address has it already. */
  find(store, filter, { again = false } = {}) {
    this.store = store ?? this.store;
    this.filter = filterOf(filter);
    this.trail = [];
    this.after = null;
    // until the answer comes no action may reach the old list: it may be of another store
    this.page = null;
    this.fault = null;
    this.failures = [];
    this.counts = null;
    this.matching = null;
    this.choose(() => false);
    this.asked(this.store.connection_id, this.filter, null, again);
    this.draw();
    const problem = problemOf(this.filter);
    if (problem) {
      this.fault = new Fault(400, "invalid", problem);
      this.turn += 1;
      this.element.setAttribute("aria-busy", "false");
      return this.drawList();
    }
    return this.load();
  }

  /** Show what an address says: a filter, and perhaps one message. */
  async restore(store, filter, message) {
    this.message = null;
    document.querySelectorAll("dialog").forEach((dialog) => dialog.close());
    const loaded = this.find(store, filter, { again: true });
    if (message) this.open(message, true);
    return loaded;
  }

  /** Show one message in a dialog; the address names it meanwhile. */
  async open(id, again = false) {
    this.message = id;
    this.asked(this.store.connection_id, this.filter, id, again);
    await detail(this.path, id, this.store.may, (name) => this.change(name, { ids: [id] }));
    if (this.message !== id) return;
    this.message = null;
    this.asked(this.store.connection_id, this.filter, null, true);
  }

  /** Take the figures of a store. */
  count({ connection_id: name }, summary) {
    this.summaries.set(name, summary);
    if (name !== this.store.connection_id) return;
    this.drawStates();
    this.strip.take(summary);
  }

  /** A filter that makes no sense is not asked for again. */
  get refused() {
    return this.fault?.status === 400;
  }

  /** The criteria of the page that is shown; what stands beside it, which comes later; and take(page, matching, beside) for the answer or a Fault. */
  question() {
    const turn = ++this.turn;
    const { filter } = this;
    const { state, id, ...others } = filter;
    // the list is there without them all the same
    const also = (wanted, path, query) => (wanted ? get(`${this.path}/${path}`, query).catch(() => null) : null);
    return {
      asked: { ...filter, after: this.after, limit: LIMIT },
      beside: Promise.all([also(state.join() === "failed" && !filter.reason, "failures"), also(!id && !isEmpty({ ...filter, state: "" }), "states", others),
        also(together(filter), "messages", { ...others, state: ["dispatched", "cancelled"], limit: LIMIT })]),
      // a later question may have been asked meanwhile
      take: (...answer) => turn === this.turn && this.take(...answer),
    };
  }

  async load() {
    const { asked, beside, take } = this.question();
    this.element.setAttribute("aria-busy", "true");
    take(await get(`${this.path}/messages`, asked).catch((fault) => fault), null, await beside);
  }

  take(page, matching, [failures, counts, left]) {
    this.failures = failures?.groups ?? this.failures;
    this.counts = counts ?? this.counts;
    this.fault = page instanceof Error ? page : null;
    // without an answer the last list stays, greyed
    this.page = this.fault ? this.page : page;
    // behind the last of what is in the store
    if (left && !this.fault && !page.next) this.page = { ...page, remembered: left.remembered, left: left.next !== null };
    this.matching = matching ?? this.matching;
    const there = new Set(this.choosable());
    if (!this.all) this.choose((id) => there.has(id));
    this.element.setAttribute("aria-busy", "false");
    this.drawStates();
    this.drawList();
  }

  /** The ids of the list that the user may choose: those of messages, and of cancelled ones that can be taken back. */
  choosable() {
    if (!this.page) return [];
    const { messages, remembered } = this.page;
    return [...messages, ...remembered.filter((one) => one.restorable_until)].filter((one) => one.may_change).map((one) => one.message_id);
  }

  choose(keep) {
    this.chosen = new Set([...this.chosen].filter(keep));
    this.all = false;
  }

  draw() {
    this.list = h("div", {});
    this.states = h("div", { class: "states", role: "group", "aria-label": "Messages by state" });
    const choice = h("select", { "aria-label": "Store", "data-key": "store", onchange: (event) => this.find(this.stores[event.target.selectedIndex], this.filter) },
      this.stores.map((store) => h("option", { selected: store === this.store }, store.connection_id)));
    this.search = search(this.path, this.filter, (filter) => this.find(null, filter));
    this.strip = timeline(this.store, (from, until) => this.find(null, { due_from: from, due_until: until }));
    this.strip.refresh();
    show(document.getElementById("search"), this.search.field);
    show(this.element, h("header", {}, h("h2", { id: "messages-title" }, "Messages in"), choice, this.states), this.strip.element, this.search.element, this.list);
    this.drawStates();
    this.drawList();
  }

  drawStates() {
    if (!this.states) return;
    const summary = this.summaries.get(this.store.connection_id);
    const one = (name, count, filter, pressed, plus = false) => h("button", { type: "button", title: meaning(name), "data-key": `state ${name}`, "aria-pressed": String(pressed),
      class: count && BAD.has(name) ? "bad" : null, onclick: () => this.find(null, { ...this.filter, due_until: "", ...filter }) },
      name, count !== null && [" ", h("strong", {}, count === undefined ? "–" : count.toLocaleString(), count > 0 && plus && "+")]);
    const { state, due_until: until } = this.filter;
    const chosen = state.length === 1 ? state[0] : null;
    const late = summary && overdue(summary.at);
    // those of the search; without one those of the store
    const found = this.counts?.counts;
    const number = (name, count) => (found ? found[name] ?? (count ? 0 : null) : count ? summary?.[count] : null);
    const isOverdue = until !== "" && state.join() === late?.state.join();
    show(this.states,
      summary?.overdue > 0 && (isOverdue || !found) && one("Overdue", summary.overdue, late, isOverdue),
      COUNTED.map(([name, count]) => one(name[0].toUpperCase() + name.slice(1), number(name, count), { state: name }, chosen === name, this.counts?.at_least)));
  }

  drawList() {
    const { page, fault } = this;
    this.search.count(fault || !page ? "" : this.counted());
    show(this.search.whole, this.ofWhole());
    this.states.classList.toggle("stale", Boolean(fault && !this.refused));
    if (fault) {
      const age = page && h("p", { class: "muted" }, `The list is from ${absolute(page.at)}.`);
      const alert = !fault.whole && h("p", { class: "notice error", role: "alert" }, fault.message, " ",
        h("button", { type: "button", "data-key": "again", onclick: () => this.load() }, "Try again"));
      return show(this.list, alert, age, page ? h("div", { class: "stale" }, this.table()) : fault.whole && h("p", { class: "empty", role: "status" }, "There is no list yet."));
    }
    if (!page) return show(this.list, h("p", { class: "empty", role: "status" }, "Looking …"));
    if (!page.messages.length && !page.remembered.length) return show(this.list, this.empty(), this.pages());
    return show(this.list, this.causes(), this.actions(), this.table(), this.pages());
  }

  /** Failed messages by cause: why, how many, and the way to see or retry all of a cause. */
  causes() {
    return this.failures.length > 0 && h("ul", { class: "groups", "aria-label": "Failed messages by cause" }, this.failures.map(({ reason, destination, count }, index) => {
      const filter = filterOf({ state: "failed", reason, destination });
      return h("li", {}, h("span", {}, h("strong", {}, count.toLocaleString()), ` ${reason ?? "for an unknown reason"} `, h("span", { class: "muted" }, destination)),
        reason && this.store.may.read && h("button", { type: "button", "data-key": `show cause ${index}`, onclick: () => this.find(null, filter) }, "Show"),
        reason && this.store.may.read && this.store.may.edit && h("button", { type: "button", "data-key": `retry cause ${index}`, onclick: () => this.change("retry", { filter: { state: ["failed"], reason, destination } }) }, `Retry ${count.toLocaleString()}…`));
    }));
  }

  /** What can be done with all of a run, which need not be chosen first. */
  ofWhole() {
    const { dag_id, run_id } = this.filter;
    // who may only edit a DAG
    const may = this.store.may.edit || this.page?.messages.some((one) => one.may_change);
    if (!dag_id || !run_id || !may) return [];
    return [h("button", { type: "button", "data-key": "cancel run", onclick: () => this.change("cancel", { filter: { dag_id, run_id } }) }, "Cancel the run…")];
  }

  /** How many messages match. */
  counted() {
    const { messages, remembered, next } = this.page;
    const here = messages.length + remembered.length;
    if (this.matching && next) return `${this.matching.at_least ? "at least " : ""}${this.matching.count.toLocaleString()} messages`;
    if (this.page.left) return `more than ${here.toLocaleString()} messages`;
    if (next || this.trail.length) return `more than ${(LIMIT * (this.trail.length + (next ? 1 : 0))).toLocaleString()} messages`;
    return here === 1 ? "1 message" : `${here.toLocaleString()} messages`;
  }

  empty() {
    return h("p", { class: "empty", role: "status" }, isEmpty(this.filter)
      ? "Nothing waits in this store. A DelayedSendOperator with store_conn_id puts messages here."
      : "No message in this store matches; texts are compared exactly, with upper and lower case. Without a state in the search, dispatched and cancelled messages are found by id, tag or run.");
  }

  actions() {
    const choosable = this.choosable();
    if (!choosable.length) return null;
    const { edit } = this.store.may;
    const more = this.page.next !== null || this.trail.length > 0;
    // who may only edit a DAG selects by it
    const filtered = edit ? !isEmpty({ ...this.filter, id: "" }) : this.filter.dag_id !== "";
    const some = this.all || this.chosen.size > 0;
    const { messages, remembered } = this.page;
    const there = { restore: remembered.length > 0, erase: edit };
    const chosen = this.all ? "All that match are chosen" : `${this.chosen.size} chosen`;
    const offer = !this.all && more && filtered && !this.filter.id && this.chosen.size === choosable.length;
    return h("div", { class: some ? "bar-of-actions chosen" : "bar-of-actions", role: "toolbar", "aria-label": "What to do with chosen messages" },
      h("span", { class: "muted", role: "status" }, chosen, offer && [" ", h("button", { type: "button", class: "plain", "data-key": "all", onclick: () => {
        this.all = true;
        this.drawList();
      } }, "choose all that match, on all pages")]),
      ACTIONS.filter(([name]) => there[name] ?? messages.length > 0).map(([name, label]) => {
        const can = this.all || this.idsFor(name).length > 0;
        // it keeps the focus when nothing is chosen any more
        return h("button", { type: "button", "data-key": name, class: name === "erase" ? "danger" : null, "aria-disabled": !can, onclick: () => can && this.act(name) }, label);
      }));
  }

  /** Of what is chosen: what a change can be about. Only a cancelled message can be taken back, or else erased. */
  idsFor(name) {
    const cancelled = new Set(this.page.remembered.map((one) => one.message_id));
    return [...this.chosen].filter((id) => name === "erase" || cancelled.has(id) === (name === "restore"));
  }

  act(name) {
    return this.change(name, this.all ? { filter: this.asFilter() } : { ids: this.idsFor(name) });
  }

  async change(name, selection) {
    if (await act(name, this.store.connection_id, this.path, selection, this.page?.at)) {
      this.choose(() => false);
      await this.load();
      this.changed();
    }
  }

  asFilter() {
    const filter = Object.fromEntries(Object.entries(this.filter).filter(([name, value]) => name !== "id" && value.length));
    // a list of what has left the store: of that only cancelled messages can be changed
    if (!this.page.messages.length) filter.state = ["cancelled"];
    if (filter.map_index) filter.map_index = Number(filter.map_index);
    return filter;
  }

  table() {
    const choosable = this.choosable();
    const may = choosable.length > 0;
    const toggle = (id) => (event) => {
      if (event.target.checked) this.chosen.add(id);
      else this.chosen.delete(id);
      this.all = false;
      this.drawList();
    };
    const everything = (event) => {
      this.chosen = new Set(event.target.checked ? choosable : []);
      this.all = false;
      this.drawList();
    };
    const open = (id) => (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      this.open(id);
    };
    const address = (id) => `?${new URLSearchParams({ store: this.store.connection_id, message: id })}`;
    const choiceCell = (id) => may && h("td", {}, choosable.includes(id) && h("input", { type: "checkbox", "aria-label": `Choose ${id}`, "data-key": `choose ${id}`,
      checked: this.all || this.chosen.has(id), onchange: toggle(id) }));
    // of a line; all of it where the pointer rests
    const cell = (text, small) => h("td", { class: small ? "place" : null, title: [text, small].filter(Boolean).join(", ") || null }, text, small && h("small", {}, small));
    const sender = (origin) => (origin ? h("td", { title: `${origin.task_id} ${origin.dag_id} ${origin.run_id}` }, h("a", { href: taskAddress(origin), onclick: leave }, origin.task_id || origin.dag_id),
      h("small", {}, `${origin.dag_id} ${origin.run_id}`)) : h("td", {}));
    const rows = this.rows();
    const sort = () => {
      this.byLateness = !this.byLateness;
      this.drawList();
    };
    return h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table" }, h("table", { class: rows.some(({ note }) => note) ? "list noted" : "list" },
      h("thead", {}, h("tr", {},
        may && h("th", { class: "choice" }, h("input", { type: "checkbox", "aria-label": "Choose all on this page", "data-key": "every", onchange: everything,
          checked: choosable.length > 0 && this.chosen.size === choosable.length })),
        COLUMNS.map(([name, kind]) => h("th", { scope: "col", class: kind, "aria-sort": kind === "late" && this.byLateness ? "descending" : null }, kind === "late"
          ? h("button", { type: "button", class: "plain", "data-key": "sort", title: "Sorts the rows of this page", onclick: sort }, this.byLateness ? "Late ↓" : "Late") : name)))),
      h("tbody", {}, rows.map(({ message_id: id, state, note, late, due_at: due, until, destination, deliver_conn_id: connection, tag, origin }) => h("tr", {},
        choiceCell(id),
        h("td", { class: "id", title: id }, h("a", { class: "mono", href: address(id), "data-key": `open ${id}`, onclick: open(id) }, id)),
        h("td", { class: "state" }, badge(state), note && h("small", { class: "reason", title: note }, note)),
        h("td", { class: "time", title: until || null }, time(due), until && h("small", {}, until)),
        h("td", { class: late > LATE ? "late bad" : "late" }, late === null ? "" : span(late)),
        cell(destination, connection), cell(tag), sender(origin))))));
  }

  /** The rows of the list: messages, and what has left the store; sorted by lateness, if that is wanted, within this page. */
  rows() {
    const { messages, remembered, at } = this.page;
    const since = (due) => (Date.parse(at) - Date.parse(due)) / 1000;
    const waiting = messages.map((one) => ({
      ...one, late: TO_COME.has(one.state) && since(one.due_at) >= 0 ? since(one.due_at) : null,
      deliver_conn_id: one.deliver_conn_id ?? "queue table",
      note: [one.retry_count > 0 && `${one.retry_count} failed ${one.retry_count === 1 ? "try" : "tries"}`, one.last_error].filter(Boolean).join(": "),
      // the end of its cancel where it is another time than the due time
      until: [(since(one.due_at) < 0 || !TO_COME.has(one.state)) && relative(one.due_at, at), Math.abs(Date.parse(one.cancellable_until) - Date.parse(one.due_at)) >= 1000
        && `can be cancelled until ${absolute(one.cancellable_until)}`].filter(Boolean).join(", "),
    }));
    const gone = remembered.map((one) => ({
      ...one, late: one.late_seconds, note: absolute(one.at) + (one.restorable_until ? `, can be taken back until ${absolute(one.restorable_until)}` : ""),
    }));
    const rows = [...waiting, ...gone];
    return this.byLateness ? rows.sort((one, other) => (other.late ?? -1) - (one.late ?? -1)) : rows;
  }

  pages() {
    const turn = (after, trail) => () => {
      Object.assign(this, { after, trail });
      return this.load().then(() => this.element.scrollIntoView({ block: "start" }));
    };
    if (!this.trail.length && !this.page.next) return null;
    return h("nav", { class: "pages", "aria-label": "Pages" },
      h("span", { class: "muted" }, `Page ${this.trail.length + 1}`),
      h("button", { type: "button", "data-key": "previous", disabled: !this.trail.length, onclick: turn(this.trail.at(-1) ?? null, this.trail.slice(0, -1)) }, "Previous"),
      h("button", { type: "button", "data-key": "next", disabled: !this.page.next, onclick: turn(this.page.next, [...this.trail, this.after]) }, "Next"));
  }
}
