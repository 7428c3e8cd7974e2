// What a store's dispatchers did, and what falls due, around now: a chart by uPlot, and the same as a table.

import { get, pathOf } from "./api.js";
import { h, show } from "./dom.js";
import { absolute, clock } from "./time.js";

const SPANS = [[3600, "1 h"], [86_400, "24 h"], [604_800, "7 d"]];
const HEIGHT = 180;
const EVERY = 30_000; // ms between two looks
const NAMED = 5; // destinations with a colour of their own
const PAST = [["On time", "on_time", "--good"], ["Late", "late", "--warn"], ["Failed", "failed", "--bad"]];
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
  if (!timelines.has(key)) timelines.set(key, new Timeline(connection, key));
  const one = timelines.get(key);
  one.onRange = onRange;
  one.refresh();
  return one.element;
}

class Timeline {
  constructor(connection, key) {
    this.path = `${key}/history`;
    this.seconds = SPANS[0][0];
    this.asked = 0;
    this.buttons = SPANS.map(([seconds, name]) => h("button", { type: "button", "data-key": `${key} ${name}`, "aria-pressed": seconds === this.seconds, onclick: () => this.choose(seconds) }, name));
    this.chart = h("div", { class: "bars", tabindex: 0, role: "group", "aria-label": "Chart; arrow keys move over its bars, Enter shows the messages of one", "data-key": `${key} chart`, onkeydown: (event) => this.key(event) });
    this.said = h("p", { class: "muted", role: "status" });
    this.forecast = h("ul", { class: "forecast", "aria-label": "Forecast", hidden: true });
    this.table = h("div", {});
    this.element = h("figure", { class: "timeline" },
      h("figcaption", {}, "Dispatched, and due", h("span", { class: "spans" }, this.buttons)), this.chart, this.said, this.forecast,
      h("details", { "data-key": `${key} table` }, h("summary", { "data-key": `${key} table summary` }, "As a table"), this.table));
    new ResizeObserver(() => this.plot?.setSize({ width: this.width(), height: HEIGHT })).observe(this.chart);
  }

  choose(seconds) {
    this.seconds = seconds;
    this.buttons.forEach((button, number) => button.setAttribute("aria-pressed", SPANS[number][0] === seconds));
    this.asked = 0;
    this.refresh();
  }

  async refresh() {
    if (Date.now() - this.asked < EVERY) return;
    this.asked = Date.now();
    const { seconds } = this;
    try {
      const [found, uPlot] = await Promise.all([get(this.path, { seconds }), loadLibrary()]);
      if (seconds === this.seconds) this.draw(found, uPlot);
    } catch (fault) {
      if (!fault.whole) this.said.textContent = fault.message;
    }
  }

  width() {
    return Math.max(200, this.chart.clientWidth);
  }

  /** Make rows of bars: of each step the counts of the past, and what falls due by destination. */
  rows(found) {
    const names = found.destinations.slice(0, NAMED);
    const steps = new Map(found.past.map((step) => [step.begin, { begin: step.begin, past: step }]));
    for (const step of found.future) steps.set(step.begin, { ...steps.get(step.begin), begin: step.begin, future: step });
    this.series = [...PAST.map(([name, field, colour]) => ({ name, colour, of: ({ past }) => past?.[field] ?? 0 })),
      ...names.map((name, at) => ({ name: `Due: ${name || "others"}`, colour: `--chart-${at + 1}`, of: ({ future }) => future?.by_destination[at] ?? 0 }))];
    if (found.destinations.length > NAMED) this.series.push({ name: "Due: others", colour: "--fg-muted", of: ({ future }) => (future?.by_destination ?? []).slice(NAMED).reduce((sum, count) => sum + count, 0) });
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
    const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
    const axis = { stroke: () => colour("--fg-muted"), grid: { stroke: () => colour("--border"), width: 1 }, ticks: { show: false }, font: "11px sans-serif" };
    this.plot?.destroy();
    this.plot = new uPlot({
      width: this.width(), height: HEIGHT, legend: { show: false },
      cursor: { y: false, points: { show: false }, drag: { x: true, y: false, setScale: false } },
      scales: { x: { time: true }, y: { range: (_, __, most) => [0, Math.max(4, most * 1.05)] } },
      axes: [{ ...axis, values: (_, ticks) => ticks.map((tick) => this.label(tick)) },
        { ...axis, size: 44, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? tick.toLocaleString() : "")) }],
      series: [{}, ...this.series.map(({ colour: name }) => ({ fill: () => colour(name), width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [0.8, 40], align: 1 }) })).reverse()],
      hooks: {
        draw: [(plot) => this.line(plot, colour("--fg"))],
        setCursor: [(plot) => this.tell(plot.cursor.idx)],
        setSelect: [(plot) => plot.select.width > 3 && this.range(plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x"))],
      },
    }, [this.steps.map(({ begin }) => Date.parse(begin) / 1000), ...sums.reverse()], this.chart);
    this.plot.over.addEventListener("dblclick", () => this.pick());
    this.chart.setAttribute("aria-busy", "false");
    show(this.table, this.asTable());
    this.forecast.hidden = !found.forecast.length;
    show(this.forecast, found.forecast.map((one) => h("li", { class: one.ends_at ? "late" : "muted" }, one.text)));
    this.tell(null);
  }

  label(seconds) {
    const moment = new Date(seconds * 1000).toISOString();
    return this.seconds === 604_800 ? absolute(moment).slice(5, 10) : clock(moment);
  }

  line(plot, colour) {
    const x = Math.round(plot.valToPos(Date.parse(this.now) / 1000, "x", true));
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = colour;
    ctx.setLineDash([4, 4]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.restore();
  }

  /** Say what a bar has, or all of them. */
  tell(at) {
    const parts = this.series.map(({ name }, number) => [name, at === null || at === undefined ? this.counts[number].reduce((sum, count) => sum + count, 0) : this.counts[number][at]]);
    const from = at === null || at === undefined ? "In all" : absolute(this.steps[at].begin, { seconds: false });
    this.said.textContent = `${from}: ${parts.filter(([, count]) => count).map(([name, count]) => `${name} ${count.toLocaleString()}`).join(", ") || "nothing"}`;
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
      h("tbody", {}, used.map(([{ begin }, at]) => h("tr", {}, h("td", { class: "time" }, absolute(begin, { seconds: false })),
        this.counts.map((counts) => h("td", { class: "number" }, counts[at].toLocaleString())))))));
  }
}
