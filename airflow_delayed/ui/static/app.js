// The operations page: the verdict, the messages of one store, and a card for each connection.

import { followTheme, keep } from "./airflow.js";
import { Fault, get } from "./api.js";
import { h, rest, show } from "./dom.js";
import { Messages } from "./messages.js";
import { card } from "./overview.js";
import { FIELDS } from "./search.js";
import { absolute, onZone, utc, zone } from "./time.js";
import { verdict } from "./verdict.js";

const PAUSE = 5_000; // ms between two looks at figures and list, while the page is seen

const overview = document.getElementById("overview");
const section = document.getElementById("messages");
const fresh = document.getElementById("fresh");
let cards = [];
let messages = null;
let started = false;
let updated = null;
let busy = false;
let again = false; // asked for while an answer waits for the pointer to rest

const storeOf = (name) => messages?.stores.find(({ connection_id: id }) => id === name);
const top = verdict(document.getElementById("verdict"), {
  find: (name, filter) => {
    if (!filter) return cards.find(({ connection }) => connection.connection_id === name)?.element.scrollIntoView({ block: "center" });
    messages?.find(storeOf(name), filter);
    return section.scrollIntoView({ block: "start" });
  },
  retry: (name, filter) => {
    messages.find(storeOf(name), filter);
    return messages.change("retry", { filter });
  },
  failed: (name) => messages?.summaries.get(name)?.failed,
  connections: () => cards.map(({ connection }) => connection),
});

async function start() {
  let found;
  try {
    found = await get("connections");
  } catch {
    // the verdict, which asks the same server, says why
    await look();
    return undefined;
  }
  started = true;
  const stores = found.connections.filter(({ kind }) => kind === "store");
  if (!found.connections.length) show(overview, found.hidden ? nothingToSee() : nothingConfigured());
  if (stores.length) messages = new Messages(section, stores, { changed: look, asked: remember });
  cards = found.connections.map((connection) => card(connection, {
    find: (filter) => {
      messages.find(connection, filter);
      section.scrollIntoView({ block: "start" });
    },
    loaded: (summary) => messages?.count(connection, summary),
  }));
  // side by side, so that a short card beside a long one leaves no hole
  const [left, right] = [true, false].map((isStore) => cards.filter(({ connection }) => (connection.kind === "store") === isStore));
  if (cards.length) show(overview, [left, right].map((column) => column.length > 0 && h("div", {}, column.map(({ element }) => element))));
  overview.setAttribute("aria-busy", "false");
  section.hidden = document.getElementById("search").hidden = !messages;
  // at once: they are there after the second round trip
  if (messages) restore();
  await look();
}

/** Show what the address says. */
function restore() {
  const given = new URLSearchParams(location.search);
  const values = (name) => given.getAll(name).filter(Boolean);
  const filter = Object.fromEntries(FIELDS.map((name) => [name, name === "state" ? values(name) : values(name)[0] ?? ""]));
  const store = messages.stores.find(({ connection_id: name }) => name === given.get("store"));
  return messages.restore(store, filter, given.get("message"));
}

/** Keep what is shown in the address: Back goes to the view before, and the address can be passed on. */
function remember(store, filter, message, again) {
  const query = new URLSearchParams({ store });
  for (const name of FIELDS) for (const value of [filter[name]].flat()) if (value) query.append(name, value);
  if (message) query.set("message", message);
  const address = `?${query}`;
  keep(address);
  if (address === location.search) return;
  if (again) history.replaceState(null, "", address);
  else history.pushState(null, "", address);
}

/** Ask for all that is shown by one request; a list that is being asked for is left to its own. */
async function look() {
  const list = messages && !messages.refused && section.getAttribute("aria-busy") !== "true" ? messages.question() : null;
  const store = messages?.store.connection_id;
  const found = await get("live", { store, ...list?.asked }).catch((fault) => fault);
  // what is shown at first has nobody aiming at it
  if (top.at()) await rest();
  const lost = found instanceof Error ? Object.assign(found, { whole: true }) : null;
  const missing = cards.filter(({ connection: { kind, connection_id: name, queue }, take }) => {
    const one = lost ? null : found.connections.find((other) => other.kind === kind && other.connection_id === name && (other.queue ?? null) === (queue ?? null));
    if (!lost && !one) return false; // no longer configured: a reload shows what is
    const answer = lost ?? (one.error ? faultOf(one.error) : one.summary);
    take(answer, one?.summary);
    return answer instanceof Error;
  }).map(({ connection: { connection_id: name, queue } }) => (queue ? `${name}: ${queue}` : name));
  if (list && found.error) missing.push("the list of messages");
  // after the figures, of which it has the number of failed messages
  top.take(lost ?? found.health);
  if (list) list.take(lost ?? (found.error ? faultOf(found.error) : found.page), found.matching, await list.beside);
  say(missing, !lost);
}

const faultOf = ({ code, message }) => new Fault(0, code, message);

/** Say when the page was updated; missing: what has no new answer. */
function say(missing, some) {
  // by the server's clock: the browser's may be wrong
  if (some) updated = top.at() ?? updated;
  const of = updated && `${absolute(updated)} (${zone()})`;
  fresh.title = updated && utc(updated);
  fresh.textContent = some ? `Updated ${of}${missing.length ? `, but not ${missing.join(", ")}` : ""}` : of ? `Not updated since ${of}` : "Not updated";
}

async function refresh() {
  if (!started) return start();
  if (busy) return undefined;
  busy = true;
  try {
    do {
      again = false;
      await look();
    } while (again);
  } finally {
    busy = false;
  }
  return undefined;
}

function nothingToSee() {
  return h("div", { class: "card" }, h("h2", {}, "Nothing here that you may see"),
    h("p", {}, "Figures and lists of a connection are for those who may read that connection in Airflow. Ask an administrator for that right."));
}

function nothingConfigured() {
  return h("div", { class: "card" }, h("h2", {}, "Nothing is shown yet"),
    h("p", {}, "Say in Airflow's configuration which connections this page shows, and restart the API server:"),
    h("pre", {}, "[delayed]\npage_stores = my_store\npage_rabbitmq = my_rabbitmq\npage_sqs = my_aws:my-queue"));
}

followTheme();
onZone(() => {
  top.redraw();
  cards.forEach(({ redraw }) => redraw());
  if (!messages) return;
  messages.strip.asked = 0;
  messages.draw();
});
window.addEventListener("popstate", () => messages && restore());
const searching = (event) => {
  event.preventDefault();
  document.querySelector("#search input")?.focus();
};
document.getElementById("skip").addEventListener("click", searching);
window.addEventListener("keydown", (event) => event.key === "/" && !event.target.closest("input, select, textarea, dialog") && searching(event));
const ask = () => {
  again = busy;
  refresh();
};
document.getElementById("refresh").addEventListener("click", ask);
window.addEventListener("paused", ask);
setInterval(() => document.visibilityState === "visible" && !document.querySelector("dialog") && refresh(), PAUSE);
start();
