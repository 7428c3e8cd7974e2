// The messages of a store: counts by state, a search, one page of a list, and the actions on the chosen messages.

import { act } from "./actions.js";
import { Fault, get, part } from "./api.js";
import { h, meaning, show } from "./dom.js";
import { badge, detail, taskAddress } from "./message.js";
import { filterOf, isEmpty, problemOf, search } from "./search.js";
import { leave } from "./airflow.js";
import { absolute, relative } from "./time.js";

/** States with the name of their count in the summary of a store. */
const COUNTED = [["due", "due"], ["in flight", "in_flight"], ["retrying", "retrying"], ["failed", "failed"], ["expired", "expired"], ["waiting", "waiting"], ["dispatched", null], ["cancelled", null]];
const BAD = new Set(["due", "failed"]);
const ACTIONS = [["cancel", "Cancel…"], ["reschedule", "Reschedule…"], ["retry", "Retry…"], ["erase", "Erase…"]];
/** The actions on a list of cancelled messages. */
const TAKEN_BACK = [["restore", "Take back…"], ["erase", "Erase…"]];
const LIMIT = 50;

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
    this.message = null; // the id of the message that is shown
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
    if (name === this.store.connection_id) this.drawStates();
  }

  /** The criteria of the page that is shown, and take(page, matching) for the answer or a Fault. */
  question() {
    const turn = ++this.turn;
    const asked = { ...this.filter, after: this.after, limit: LIMIT };
    // a later question may have been asked meanwhile
    return { asked: problemOf(this.filter) ? {} : asked, take: (page, matching) => turn === this.turn && !problemOf(this.filter) && this.take(page, matching) };
  }

  async load() {
    const { asked, take } = this.question();
    this.element.setAttribute("aria-busy", "true");
    const { state, reason } = this.filter;
    const [page, failures] = await Promise.all([get(`${this.path}/messages`, asked).catch((fault) => fault),
      // without them the list is there all the same
      state.join() === "failed" && !reason && get(`${this.path}/failures`).catch(() => null)]);
    this.failures = failures?.groups ?? [];
    take(page, null);
  }

  take(page, matching) {
    this.fault = page instanceof Error ? page : null;
    // without an answer the last list stays, greyed
    this.page = this.fault ? this.page : page;
    this.matching = matching ?? this.matching;
    const there = new Set(this.choosable());
    if (!this.all) this.choose((id) => there.has(id));
    this.element.setAttribute("aria-busy", "false");
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
    show(this.element, h("header", {}, h("h2", { id: "messages-title" }, "Messages in"), choice), this.states, this.search.element, this.list);
    this.drawStates();
    this.drawList();
  }

  drawStates() {
    if (!this.states) return;
    const summary = this.summaries.get(this.store.connection_id);
    const one = (name, count, filter, pressed) => h("button", { type: "button", title: meaning(name), "data-key": `state ${name}`, "aria-pressed": String(pressed),
      class: count && BAD.has(filter.state) ? "bad" : null, onclick: () => this.find(null, { ...this.filter, due_until: "", ...filter }) },
      name, count !== null && [" ", h("strong", {}, count === undefined ? "–" : count.toLocaleString())]);
    const { state, due_until: until } = this.filter;
    const chosen = state.length === 1 ? state[0] : null;
    const overdue = summary && new Date(Date.parse(summary.at) - 60_000).toISOString();
    show(this.states,
      summary?.overdue > 0 && one("Overdue", summary.overdue, { state: "due", due_until: overdue }, chosen === "due" && until !== ""),
      COUNTED.map(([name, count]) => one(name[0].toUpperCase() + name.slice(1), count ? summary?.[count] : null, { state: name }, chosen === name && (name !== "due" || until === ""))));
  }

  drawList() {
    const { page, fault } = this;
    this.search.count(fault || !page ? "" : this.counted());
    this.states.classList.toggle("stale", Boolean(fault && fault.status !== 400));
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

  /** How many messages match. */
  counted() {
    const { messages, remembered, next } = this.page;
    const here = messages.length + remembered.length;
    if (this.matching && next) return `${this.matching.at_least ? "at least " : ""}${this.matching.count.toLocaleString()} messages`;
    if (next || this.trail.length) return `more than ${(LIMIT * (this.trail.length + (next ? 1 : 0))).toLocaleString()} messages`;
    return here === 1 ? "1 message" : `${here.toLocaleString()} messages`;
  }

  empty() {
    return h("p", { class: "empty", role: "status" }, isEmpty(this.filter)
      ? "Nothing waits in this store. A DelayedSendOperator with store_conn_id puts messages here."
      : "No message in this store matches; texts are compared exactly, with upper and lower case. Without a state in the search, dispatched and cancelled messages are found by their id alone.");
  }

  actions() {
    const choosable = this.choosable();
    if (!choosable.length) return null;
    const { edit } = this.store.may;
    const more = this.page.next !== null || this.trail.length > 0;
    // who may only edit a DAG selects by it
    const filtered = edit ? !isEmpty({ ...this.filter, id: "" }) : this.filter.dag_id !== "";
    const chosen = this.all ? "All that match are chosen" : `${this.chosen.size} chosen`;
    const offer = !this.all && more && filtered && !this.filter.id && this.chosen.size === choosable.length;
    return h("div", { class: "bar-of-actions", role: "toolbar", "aria-label": "What to do with chosen messages" },
      h("span", { class: "muted", role: "status" }, chosen, offer && [" ", h("button", { type: "button", class: "plain", "data-key": "all", onclick: () => {
        this.all = true;
        this.drawList();
      } }, "choose all that match, on all pages")]),
      (this.page.messages.length ? ACTIONS : TAKEN_BACK).filter(([name]) => edit || name !== "erase").map(([name, label]) => h("button", { type: "button", "data-key": name, class: name === "erase" ? "danger" : null,
        disabled: !this.all && !this.chosen.size, onclick: () => this.act(name) }, label)));
  }

  act(name) {
    return this.change(name, this.all ? { filter: this.asFilter() } : { ids: [...this.chosen] });
  }

  async change(name, selection) {
    if (await act(name, this.store.connection_id, this.path, selection)) {
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
    const { messages, remembered, at } = this.page;
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
    const sender = (origin) => h("td", {}, origin && [h("a", { href: taskAddress(origin), onclick: leave }, origin.task_id || origin.dag_id),
      h("small", {}, `${origin.dag_id} ${origin.run_id}`)]);
    const idCell = (id) => h("td", { class: "id" }, h("a", { class: "mono", href: address(id), "data-key": `open ${id}`, onclick: open(id) }, id));
    return h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table" }, h("table", {},
      h("thead", {}, h("tr", {},
        may && h("th", {}, h("input", { type: "checkbox", "aria-label": "Choose all on this page", "data-key": "every", onchange: everything,
          checked: choosable.length > 0 && this.chosen.size === choosable.length })),
        ["Message", "State", "Due", "Destination", "Tag", "Sent by"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, messages.map((message) => h("tr", {},
        choiceCell(message.message_id),
        idCell(message.message_id),
        h("td", {}, badge(message.state), message.retry_count > 0 && h("small", {}, `${message.retry_count} failed ${message.retry_count === 1 ? "try" : "tries"}`),
          message.last_error && h("small", { class: "reason", title: message.last_error }, message.last_error)),
        h("td", { class: "time" }, absolute(message.due_at), h("small", {}, relative(message.due_at, at)),
          message.cancellable_longest && h("small", {}, `can be cancelled until ${absolute(message.cancellable_longest)}`)),
        h("td", {}, message.destination, h("small", {}, message.deliver_conn_id ?? "queue table")),
        h("td", {}, message.tag),
        sender(message.origin))),
      remembered.map((gone) => h("tr", {}, choiceCell(gone.message_id), idCell(gone.message_id),
        h("td", {}, badge(gone.state), h("small", {}, absolute(gone.at)), gone.restorable_until && h("small", {}, `can be taken back until ${absolute(gone.restorable_until)}`)),
        h("td", { class: "time" }, absolute(gone.due_at)), h("td", {}, gone.destination), h("td", {}, gone.tag), sender(gone.origin))))));
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
