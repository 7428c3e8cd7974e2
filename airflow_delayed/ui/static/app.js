// The operations page: cards of all connections, and the messages of one store.

import { get } from "./api.js";
import { h, show } from "./dom.js";
import { FIELDS, Messages } from "./messages.js";
import { card } from "./overview.js";
import { followTheme } from "./theme.js";
import { absolute, onZone } from "./time.js";

const PAUSE = 30_000; // ms between two looks at the figures, while the page is seen

const overview = document.getElementById("overview");
const section = document.getElementById("messages");
const fresh = document.getElementById("fresh");
let cards = [];
let messages = null;
let started = false;

async function start() {
  let found;
  try {
    found = await get("connections");
  } catch (fault) {
    show(overview, h("p", { class: "notice error", role: "alert" }, fault.message));
    overview.setAttribute("aria-busy", "false");
    return;
  }
  started = true;
  const stores = found.connections.filter(({ kind }) => kind === "store");
  if (!found.connections.length) show(overview, found.hidden ? nothingToSee() : nothingConfigured());
  if (stores.length) messages = new Messages(section, stores, { changed: refresh, asked: remember });
  cards = found.connections.map((connection) => card(connection, (filter) => {
    messages.find(connection, filter);
    section.scrollIntoView({ behavior: "smooth", block: "start" });
  }));
  if (cards.length) show(overview, cards.map(({ element }) => element));
  overview.setAttribute("aria-busy", "false");
  section.hidden = !messages;
  // both at once: figures and list are there after the second round trip
  await Promise.all([refresh(), messages && firstList(stores)]);
}

function firstList(stores) {
  const given = new URLSearchParams(location.search);
  // what Airflow knows no name for stays in braces, such as the map index of a task that is not mapped
  const filter = Object.fromEntries(FIELDS.map((name) => [name, (given.get(name) ?? "").replace(/^\{[A-Z_]+\}$/, "")]));
  const store = stores.find(({ connection_id: name }) => name === given.get("store"));
  // who comes from a DAG or a task looks for its messages
  if (filter.dag_id) overview.before(section);
  return messages.find(store, filter);
}

function remember(store, filter) {
  const query = new URLSearchParams({ store, ...filter });
  for (const name of FIELDS) if (!query.get(name)) query.delete(name);
  history.replaceState(null, "", `?${query}`);
}

async function refresh() {
  if (!started) return start();
  await Promise.all(cards.map(({ load }) => load()));
  fresh.textContent = `Updated ${absolute(new Date().toISOString())}`;
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
  cards.forEach(({ redraw }) => redraw());
  messages?.draw();
});
document.getElementById("refresh").addEventListener("click", () => Promise.all([refresh(), messages?.load()]));
setInterval(() => document.visibilityState === "visible" && refresh(), PAUSE);
start();
