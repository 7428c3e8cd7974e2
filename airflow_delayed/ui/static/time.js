// Times as Airflow shows them: in the zone that its user chose in the page's corner.

import { h } from "./dom.js";

const KEY = "timezone"; // where Airflow's pages keep the choice

/** The zone's name; UTC if nothing (that this browser knows) was chosen. */
export function zone() {
  let name = localStorage.getItem(KEY) ?? "UTC";
  try {
    name = JSON.parse(name);
  } catch {
    // older releases write the bare name
  }
  if (name === "local") return Intl.DateTimeFormat().resolvedOptions().timeZone;
  try {
    return new Intl.DateTimeFormat("en", { timeZone: name }).resolvedOptions().timeZone;
  } catch {
    return "UTC";
  }
}

/** Call back when the user chooses another zone. */
export function onZone(callback) {
  window.addEventListener("storage", (event) => event.key === KEY && callback());
}

function parts(moment, name) {
  const format = new Intl.DateTimeFormat("en-CA", {
    timeZone: name, hourCycle: "h23", year: "numeric", month: "2-digit", day: "2-digit",
    hour: "2-digit", minute: "2-digit", second: "2-digit",
  });
  return Object.fromEntries(format.formatToParts(moment).map(({ type, value }) => [type, value]));
}

/** 2026-11-21 14:03:22; a text that is no time as it is. */
export function absolute(text, { seconds = true } = {}) {
  if (!text || Number.isNaN(Date.parse(text))) return text ?? "";
  const p = parts(new Date(text), zone());
  return `${p.year}-${p.month}-${p.day} ${p.hour}:${p.minute}${seconds ? `:${p.second}` : ""}`;
}

/** 14:03 */
export function clock(text) {
  const p = parts(new Date(text), zone());
  return `${p.hour}:${p.minute}`;
}

/** 2026-11-21 14:03:22 UTC */
export const utc = (text) => `${new Date(text).toISOString().slice(0, 19).replace("T", " ")} UTC`;

/** A time as an element, which says it in UTC too where the pointer rests. */
export const time = (text, as = absolute) => text && h("time", { datetime: text, title: utc(text) }, as(text));

const OF_THE_SERVER = /(\d{4}-\d\d-\d\d)(?: at)? (\d\d:\d\d(?::\d\d)?)(?: to (?:(\d{4}-\d\d-\d\d) )?(\d\d:\d\d(?::\d\d)?))? UTC/g;

/** A text of the server, which has its times in UTC, with them in the chosen zone. */
export function inZone(text) {
  const one = (day, hour) => absolute(`${day}T${hour}Z`, { seconds: hour.length > 5 });
  return text.replace(OF_THE_SERVER, (_, day, from, last, until) => one(day, from) + (until ? ` to ${one(last ?? day, until)}` : ""));
}

const DAY = 86_400_000; // ms
/** The last moment that a field of date and time takes. */
export const LATEST = "9999-12-31T23:59:59";

const STEPS = [[60, "s"], [60, "min"], [24, "h"], [Infinity, "d"]];

/** A span of seconds as people say it: 42 s, 3 min, 5.2 h. */
export function span(seconds) {
  let amount = Math.abs(seconds);
  for (const [size, unit] of STEPS) {
    if (amount < size) return `${amount < 10 && unit !== "s" ? amount.toFixed(1).replace(/\.0$/, "") : Math.round(amount)} ${unit}`;
    amount /= size;
  }
  return "";
}

/** in 3 min, or 3 min ago; by the server's clock. */
export function relative(text, now) {
  if (!text) return "";
  const left = (new Date(text) - new Date(now)) / 1000;
  if (Math.abs(left) < 1) return "now";
  return left > 0 ? `in ${span(left)}` : `${span(left)} ago`;
}

/** What a field for date and time holds, read as a time in the chosen zone; null if it is empty.
 *
 * Of a time that happens twice the first is taken; a time that clocks skip is as far behind the gap. */
export function fromField(value) {
  if (!value) return null;
  const wanted = Date.parse(`${value}Z`);
  if (Number.isNaN(wanted)) return null;
  const [before, after] = [offset(wanted - DAY), offset(wanted + DAY)];
  const fits = [before, after].find((one) => offset(wanted - one) === one);
  return new Date(wanted - (fits ?? before)).toISOString();
}

/** The other way round. */
export function toField(text) {
  return text && !Number.isNaN(Date.parse(text)) ? absolute(text).replace(" ", "T") : "";
}

function offset(moment) {
  const p = parts(new Date(moment), zone());
  const seen = Date.UTC(p.year, p.month - 1, p.day, p.hour, p.minute, p.second);
  return seen - Math.floor(moment / 1000) * 1000;
}
