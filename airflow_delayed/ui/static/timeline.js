// A strip above the list: what a store's dispatchers did, and what falls due, around now; a chart by uPlot, and the same as a table.

import { get, pathOf } from "./api.js";
import { h, show } from "./dom.js";
import { absolute, clock, span, time } from "./time.js";

const SPANS = [[3600, "1 h"], [86_400, "24 h"], [604_800, "7 d"]];
/** By the seconds of a step: what a bar counts. */
const PER = { 60: "a minute", 3600: "an hour", 21_600: "in 6 h" };
const HEIGHT = 56;
const EVERY = 30_000; // ms between two looks
const NAMED = 5; // destinations with a colour of their own
const LEAST = 0.02; // of all that falls due, for a colour of its own
const PAST = [["On time", "on_time", "good"], ["Late", "late", "warn"], ["Failed", "failed", "bad"]];
const timelines = new Map();
let library = null; // of uPlot, once a chart asked for it

/** Load uPlot: a script that sets a global, and no module. */
function loadLibrary() {
  library ??= new Promise((resolve, reject) => {
    const failed = () => { library = null; reject(new Error("The chart's library could not be loaded; reload the page.")); };
    document.head.append(h("script", { src: new URL("uplot.js", import.meta.url), onload: () => resolve(globalThis.uPlot), onerror: failed }));
  });
  return library;
}

/** The timeline of a store, which is made once; onRange(from, until) gets the times of a bar or of a drag. */
export function timeline(connection, onRange) {
  const key = pathOf(connection);
  if (!timelines.has(key)) timelines.set(key, new Timeline(key, onRange));
  return timelines.get(key);
}

const total = (counts) => counts.reduce((sum, count) => sum + count, 0);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);
/** The end of the axis: 1, 2 or 5 times a power of ten. */
const roundUp = (most) => [1, 2, 5, 10].map((one) => one * 10 ** Math.floor(Math.log10(Math.max(most, 4)))).find((one) => one >= Math.max(most, 4));

class Timeline {
  constructor(key, onRange) {
    Object.assign(this, { path: `${key}/history`, onRange, seconds: SPANS[0][0], asked: 0 });
    this.buttons = SPANS.map(([seconds, name]) => h("button", { type: "button", "data-key": `${key} ${name}`, "aria-label": `${name} before and after now`, "aria-pressed": seconds === this.seconds, onclick: () => this.choose(seconds) }, name));
    this.chart = h("div", { class: "bars", tabindex: 0, role: "group", "aria-label": "Chart; arrow keys move over its bars, Enter shows the messages of one", "data-key": `${key} chart`, onkeydown: (event) => this.key(event) });
    this.figures = h("dl", {});
    this.legend = h("p", { class: "legend muted", role: "status" });
    this.table = h("div", {});
    this.element = h("figure", { class: "timeline", "aria-label": "Dispatched, and due" }, this.figures, this.chart,
      h("figcaption", {}, this.legend, h("span", { class: "spans" }, this.buttons),
        h("details", { "data-key": `${key} table` }, h("summary", { "data-key": `${key} table summary` }, "As a table"), this.table)));
    new ResizeObserver(() => this.plot?.setSize({ width: this.width(), height: HEIGHT })).observe(this.chart);
    // its colours are the theme's
    new MutationObserver(() => this.plot?.redraw()).observe(document.documentElement, { attributes: true });
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
      const [found, uPlot] = await Promise.all([get(this.path, { seconds }), loadLibrary()]);
      if (seconds === this.seconds) this.draw(found, uPlot);
    } catch (fault) {
      if (!fault.whole) this.legend.textContent = fault.message;
    }
  }

  width() {
    return Math.max(200, this.chart.clientWidth);
  }

  /** Make rows of bars: of each step the counts of the past, and what falls due by destination, the largest ones by name. */
  rows(found) {
    const sums = found.destinations.map((_, at) => total(found.future.map(({ by_destination: counts }) => counts[at])));
    const all = total(sums);
    const named = [...sums.keys()].filter((at) => found.destinations[at] && sums[at] > all * LEAST).sort((a, b) => sums[b] - sums[a]).slice(0, NAMED);
    const steps = new Map(found.past.map((step) => [step.begin, { begin: step.begin, past: step }]));
    for (const step of found.future) steps.set(step.begin, { ...steps.get(step.begin), begin: step.begin, future: step });
    this.series = [...PAST.map(([name, field, tone]) => ({ name, tone, of: ({ past }) => past?.[field] ?? 0 })),
      ...named.map((at, number) => ({ name: `Due: ${found.destinations[at]}`, tone: `chart-${number + 1}`, of: ({ future }) => future?.by_destination[at] ?? 0 })),
      { name: named.length ? "Due: others" : "Due", tone: "fg-muted", of: ({ future }) => (future ? future.messages - total(named.map((at) => future.by_destination[at])) : 0) }];
    this.steps = [...steps.values()].sort((a, b) => (a.begin < b.begin ? -1 : 1));
    this.counts = this.series.map(({ of }) => this.steps.map(of));
  }

  draw(found, uPlot) {
    this.rows(found);
    this.now = found.at;
    this.step = found.step_seconds;
    // bars of one step stand on each other: the highest sum is drawn first
    const sums = [];
    this.counts.forEach((counts, number) => sums.push(counts.map((count, at) => count + (number ? sums[number - 1][at] : 0))));
    const axis = { stroke: () => colour("fg-muted"), grid: { stroke: () => colour("border"), width: 1 }, ticks: { show: false }, font: "11px sans-serif", gap: 3 };
    this.plot?.destroy();
    this.plot = new uPlot({
      width: this.width(), height: HEIGHT, legend: { show: false }, padding: [7, 8, 0, 0],
      cursor: { y: false, points: { show: false }, drag: { x: true, y: false, setScale: false } },
      scales: { x: { time: true }, y: { range: (_, __, most) => [0, roundUp(most)] } },
      axes: [{ ...axis, size: 17, values: (_, ticks) => ticks.map((tick) => this.label(tick)) },
        { ...axis, size: 74, splits: (_, __, ___, most) => [0, most], values: (_, ticks) => ticks.map((tick) => (tick ? `${tick.toLocaleString("en", { notation: "compact" })} ${PER[this.step]}` : "0")) }],
      series: [{}, ...this.series.map(({ tone }) => ({ fill: () => colour(tone), width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [0.8, 40], align: 1 }) })).reverse()],
      hooks: {
        draw: [(plot) => this.line(plot)],
        setCursor: [(plot) => this.tell(plot.cursor.idx)],
        setSelect: [(plot) => plot.select.width > 3 && this.range(plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x"))],
      },
    }, [this.steps.map(({ begin }) => Date.parse(begin) / 1000), ...sums.reverse()], this.chart);
    this.plot.over.addEventListener("dblclick", () => this.pick());
    this.found = found;
    show(this.figures, this.summary(found));
    show(this.table, this.asTable());
    this.tell(null);
  }

  /** Throughput, lateness, and what falls due; what is overdue by now is late too, and what falls due within the hour is as the other figures have it. */
  summary({ past, future }) {
    const [, name] = SPANS.find(([seconds]) => seconds === this.seconds);
    const sent = total(past.map((step) => step.dispatched));
    const overdue = this.current?.overdue ?? 0;
    const latest = Math.max(...past.map((step) => step.max_late_seconds), ...(this.current?.lateness ?? []).map(({ late_seconds: late }) => late));
    const all = sent + overdue;
    // the last step is not over
    return [["Dispatched", `${(past.at(-2)?.dispatched ?? 0).toLocaleString()} ${PER[this.step]}`, `${sent.toLocaleString()} in ${name}`],
      ["Lateness", all ? `up to ${span(latest)}` : "–", all ? `${Math.floor(total(past.map((step) => step.on_time)) / all * 100)} % within 5 s${overdue ? ", overdue ones too" : ""}` : "none dispatched"],
      ["Due", ((this.seconds === SPANS[0][0] ? this.current?.due_within_hour : null) ?? total(future.map(({ messages }) => messages))).toLocaleString(), `in the next ${name}`]]
      .map(([term, value, note]) => h("div", {}, h("dt", {}, term), h("dd", {}, value, h("small", {}, note))));
  }

  label(seconds) {
    const moment = new Date(seconds * 1000).toISOString();
    return this.seconds === 604_800 ? absolute(moment).slice(5, 10) : clock(moment);
  }

  line(plot) {
    const x = Math.round(plot.valToPos(Date.parse(this.now) / 1000, "x", true));
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = colour("fg");
    ctx.setLineDash([4, 4]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.restore();
  }

  /** The legend, with the counts of a bar, or of all of them. */
  tell(at) {
    const step = this.steps[at];
    const parts = this.series.map(({ name, tone }, number) => [name, tone, step ? this.counts[number][at] : total(this.counts[number])]).filter(([, , count]) => count);
    const late = step?.past?.max_late_seconds;
    show(this.legend, step ? absolute(step.begin, { seconds: false }) : `In all at ${absolute(this.now).slice(11)}`, ": ", parts.length ? parts.map(([name, tone, count]) => h("span", {}, h("i", { class: tone }), `${name} ${count.toLocaleString()}`)) : "nothing",
      late > 0 && h("span", {}, `the latest by ${span(late)}`));
  }

  key(event) {
    const to = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (to && this.plot) {
      const now = this.steps.findIndex(({ begin }) => Date.parse(begin) + this.step * 1000 > Date.parse(this.now));
      const at = Math.min(this.steps.length - 1, Math.max(0, (this.plot.cursor.idx ?? now - to) + to));
      this.plot.setCursor({ left: this.plot.valToPos(Date.parse(this.steps[at].begin) / 1000 + this.step / 2, "x"), top: 10 });
      this.tell(at);
      this.at = at;
      event.preventDefault();
    } else if (event.key === "Enter") {
      this.pick(this.at);
    }
  }

  pick(at = this.plot?.cursor.idx) {
    if (at === null || at === undefined) return;
    const begin = Date.parse(this.steps[at].begin) / 1000;
    this.range(begin, begin + this.step);
  }

  range(from, until) {
    const text = (seconds) => new Date(seconds * 1000).toISOString();
    this.onRange(text(from), text(until));
  }

  asTable() {
    const used = this.steps.map((step, at) => [step, at]).filter(([, at]) => this.counts.some((counts) => counts[at]));
    return h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table" }, h("table", {},
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "From"), this.series.map(({ name }) => h("th", { scope: "col", class: "number" }, name)))),
      h("tbody", {}, used.map(([{ begin }, at]) => h("tr", {}, h("td", { class: "time" }, time(begin, (text) => absolute(text, { seconds: false }))),
        this.counts.map((counts) => h("td", { class: "number" }, counts[at].toLocaleString())))))));
  }
}
