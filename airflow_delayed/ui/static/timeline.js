// A strip above the list: what a store dispatched, and what falls due, around now; a chart of bars, and the same as a table.

import { get, pathOf } from "./api.js";
import { h, show, svg } from "./dom.js";
import { absolute, clock, span, time } from "./time.js";

const SPANS = [[3600, "1 h"], [86_400, "24 h"]];
/** By the seconds of a step: what a bar counts. */
const PER = { 60: "a minute", 3600: "an hour" };
const EVERY = 30_000; // ms between two looks
/** Of the chart's own units: the width of a step and of the bar in it, and the height of the highest bar. */
const STEP = 10;
const BAR = 8;
const HEIGHT = 40;
const MOST = "1,000,000"; // messages of the past that the server counts
/** The parts of a bar, from below: name, colour, share of its width, and count. Late ones are thin, so that they are told without colours too. */
const PARTS = [
  ["On time", "good", 1, ({ past }) => (past ? past.dispatched - past.late : 0)],
  ["Late", "warn", 0.5, ({ past }) => past?.late ?? 0],
  ["Due", "chart", 1, ({ future }) => future?.messages ?? 0],
];
const timelines = new Map();

/** The timeline of a store, which is made once; onRange(from, until) gets the times of a bar. */
export function timeline(connection, onRange) {
  const key = pathOf(connection);
  if (!timelines.has(key)) timelines.set(key, new Timeline(key, onRange));
  return timelines.get(key);
}

const total = (counts) => counts.reduce((sum, count) => sum + count, 0);
/** The end of the axis: 1, 2 or 5 times a power of ten. */
const roundUp = (most) => [1, 2, 5, 10].map((one) => one * 10 ** Math.floor(Math.log10(Math.max(most, 4)))).find((one) => one >= Math.max(most, 4));

class Timeline {
  constructor(key, onRange) {
    Object.assign(this, { path: `${key}/timeline`, onRange, seconds: SPANS[0][0], asked: 0, at: null, steps: [] });
    this.buttons = SPANS.map(([seconds, name]) => h("button", { type: "button", "data-key": `${key} ${name}`, "aria-label": `${name} before and after now`, "aria-pressed": seconds === this.seconds, onclick: () => this.choose(seconds) }, name));
    this.chart = h("div", { class: "bars", tabindex: 0, role: "group", "aria-label": "Chart; arrow keys move over its bars, Enter shows the messages of one", "data-key": `${key} chart`,
      onkeydown: (event) => this.key(event), onpointerleave: () => this.tell(null) });
    this.figures = h("dl", {});
    this.legend = h("p", { class: "legend muted", role: "status" });
    this.table = h("div", {});
    this.element = h("figure", { class: "timeline", "aria-label": "Dispatched, and due" }, this.figures, this.chart,
      h("figcaption", {}, this.legend, h("span", { class: "spans" }, this.buttons),
        h("details", { "data-key": `${key} table` }, h("summary", { "data-key": `${key} table summary` }, "As a table"), this.table)));
  }

  choose(seconds) {
    this.seconds = seconds;
    this.found = null;
    this.buttons.forEach((button, number) => button.setAttribute("aria-pressed", SPANS[number][0] === seconds));
    this.asked = 0;
    this.refresh();
  }

  /** Take the figures of the store, which are newer than the chart, and look again. */
  take(current) {
    this.current = current;
    if (this.found) show(this.figures, this.summary(this.found));
    return this.refresh();
  }

  async refresh() {
    if (Date.now() - this.asked < EVERY) return;
    this.asked = Date.now();
    const { seconds } = this;
    try {
      const found = await get(this.path, { seconds });
      if (seconds === this.seconds) this.draw(found);
    } catch (fault) {
      if (!fault.whole) this.legend.textContent = fault.message;
    }
  }

  draw(found) {
    this.found = found;
    this.step = found.step_seconds;
    const steps = new Map(found.past.map((step) => [step.begin, { begin: step.begin, past: step }]));
    for (const step of found.future) steps.set(step.begin, { ...steps.get(step.begin), begin: step.begin, future: step });
    this.steps = [...steps.values()].sort((a, b) => Date.parse(a.begin) - Date.parse(b.begin));
    this.counts = this.steps.map((step) => PARTS.map(([, , , of]) => of(step)));
    const most = roundUp(Math.max(...this.counts.map(total)));
    const first = Date.parse(this.steps[0].begin);
    const now = (Date.parse(found.at) - first) / 1000 / this.step * STEP;
    const label = (text) => h("span", {}, clock(text));
    show(this.chart,
      h("span", { class: "most" }, `${most.toLocaleString("en", { notation: "compact" })} ${PER[this.step]}`),
      svg("svg", { viewBox: `0 0 ${this.steps.length * STEP} ${HEIGHT}`, preserveAspectRatio: "none" }, this.steps.map((_, at) => this.bar(at, most)),
        svg("line", { class: "now", x1: now, x2: now, y1: 0, y2: HEIGHT })),
      h("span", { class: "axis" }, label(this.steps[0].begin), label(found.at), label(this.end(this.steps.at(-1)))));
    show(this.figures, this.summary(found));
    show(this.table, this.asTable());
    this.tell(null);
  }

  /** One bar: its parts stand on each other. All of its step says what it is, and can be pressed. */
  bar(at, most) {
    let y = HEIGHT;
    const parts = PARTS.map(([, tone, share], number) => {
      const height = this.counts[at][number] / most * HEIGHT;
      y -= height;
      return height > 0 && svg("rect", { class: tone, x: at * STEP + 1, y, width: BAR * share, height });
    });
    return svg("g", { role: "img", onclick: () => this.pick(at), onpointerenter: () => this.tell(at) }, svg("title", {}, this.words(at)),
      svg("rect", { class: "place", x: at * STEP, y: 0, width: STEP, height: HEIGHT }), parts);
  }

  end({ begin }) {
    return new Date(Date.parse(begin) + this.step * 1000).toISOString();
  }

  /** From, until, and the counts. */
  words(at) {
    const counts = PARTS.map(([name], number) => [name, this.counts[at][number]]).filter(([, count]) => count);
    return `${absolute(this.steps[at].begin, { seconds: false })} to ${clock(this.end(this.steps[at]))}: ${counts.map(([name, count]) => `${name} ${count.toLocaleString()}`).join(", ") || "nothing"}`;
  }

  /** Throughput, lateness, and what falls due; what is overdue by now is late too, and what falls due within the hour is as the other figures have it. */
  summary({ past, past_is_cut: cut, future }) {
    const [, name] = SPANS.find(([seconds]) => seconds === this.seconds);
    const sent = total(past.map((step) => step.dispatched));
    const overdue = this.current?.overdue ?? 0;
    const latest = Math.max(...past.map((step) => step.max_late_seconds), ...(this.current?.lateness ?? []).map(({ late_seconds: late }) => late));
    const all = sent + overdue;
    const onTime = sent - total(past.map((step) => step.late));
    // the last step is not over
    return [["Dispatched", `${(past.at(-2)?.dispatched ?? 0).toLocaleString()} ${PER[this.step]}`, cut ? `${sent.toLocaleString()} of the last ${MOST}` : `${sent.toLocaleString()} in ${name}`],
      ["Lateness", all ? `up to ${span(latest)}` : "–", all ? `${Math.floor(onTime / all * 100)} % within 5 s${overdue ? ", overdue ones too" : ""}` : "none dispatched"],
      ["Due", ((this.seconds === SPANS[0][0] ? this.current?.due_within_hour : null) ?? total(future.map(({ messages }) => messages))).toLocaleString(), `in the next ${name}`]]
      .map(([term, value, note]) => h("div", {}, h("dt", {}, term), h("dd", {}, value, h("small", {}, note))));
  }

  /** The legend, with the counts of a bar, or of all of them. */
  tell(at) {
    this.at = at;
    this.chart.querySelectorAll("g").forEach((bar, number) => bar.classList.toggle("told", number === at));
    if (!this.found) return;
    const step = this.steps[at];
    const parts = PARTS.map(([name, tone], number) => [name, tone, step ? this.counts[at][number] : total(this.counts.map((counts) => counts[number]))]).filter(([, , count]) => count);
    const late = step?.past?.max_late_seconds;
    show(this.legend, step ? `${absolute(step.begin, { seconds: false })} to ${clock(this.end(step))}` : `In all at ${absolute(this.found.at).slice(11)}`, ": ", parts.length ? parts.map(([name, tone, count]) => h("span", {}, h("i", { class: tone }), `${name} ${count.toLocaleString()}`)) : "nothing",
      late > 0 && h("span", {}, `the latest by ${span(late)}`));
  }

  key(event) {
    const to = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (to && this.found) {
      const now = this.steps.findIndex(({ future }) => future);
      this.tell(Math.min(this.steps.length - 1, Math.max(0, (this.at ?? now - to) + to)));
      event.preventDefault();
    } else if (event.key === "Enter" && this.at !== null) {
      this.pick(this.at);
    }
  }

  pick(at) {
    const { begin } = this.steps[at];
    this.onRange(new Date(begin).toISOString(), this.end(this.steps[at]));
  }

  asTable() {
    const used = this.steps.map((step, at) => [step, this.counts[at]]).filter(([, counts]) => total(counts));
    return h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table" }, h("table", {},
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "From"), PARTS.map(([name]) => h("th", { scope: "col", class: "number" }, name)))),
      h("tbody", {}, used.map(([{ begin }, counts]) => h("tr", {}, h("td", { class: "time" }, time(begin, (text) => absolute(text, { seconds: false }))),
        counts.map((count) => h("td", { class: "number" }, count.toLocaleString())))))));
  }
}
