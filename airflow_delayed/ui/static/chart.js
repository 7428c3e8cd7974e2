// A bar chart of what falls due, in plain SVG, and the same as a table for those who cannot see it.

import { h, s } from "./dom.js";
import { absolute, clock } from "./time.js";

const WIDTH = 340;
const HEIGHT = 92;
const FOOT = 16;

/** @param {{begin: string, messages: number}[]} bars  @param {string} title what the chart shows */
export function chart(bars, title) {
  const most = Math.max(1, ...bars.map((bar) => bar.messages));
  const total = bars.reduce((sum, bar) => sum + bar.messages, 0);
  const step = WIDTH / Math.max(1, bars.length);
  const room = HEIGHT - FOOT;
  const drawn = bars.map((bar, index) => {
    const height = bar.messages ? Math.max(2, (bar.messages / most) * (room - 12)) : 0;
    return s("g", {},
      s("title", {}, `${absolute(bar.begin, { seconds: false })}: ${bar.messages.toLocaleString()}`),
      // the whole column can be pointed at
      s("rect", { x: index * step, y: 0, width: step, height: room, class: "column" }),
      s("rect", { x: index * step + step * 0.12, y: room - height, width: step * 0.76, height, rx: 1, class: "bar" }));
  });
  const every = Math.ceil(bars.length / 4);
  const labels = bars.map((bar, index) => index % every === 0
    && s("text", { x: index * step + 2, y: HEIGHT - 3, class: "label" }, clock(bar.begin)));
  return h("figure", { class: "chart" },
    h("figcaption", {}, title, h("span", { class: "muted" }, ` ${total.toLocaleString()} in all, at most ${(total ? most : 0).toLocaleString()} in one bar`)),
    s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${total.toLocaleString()} in all` },
      s("line", { x1: 0, x2: WIDTH, y1: room, y2: room, class: "axis" }), drawn, labels),
    h("details", { "data-key": title }, h("summary", { "data-key": `${title} summary` }, "As a table"),
      h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "From"), h("th", { scope: "col", class: "number" }, "Messages"))),
        h("tbody", {}, bars.filter((bar) => bar.messages).map((bar) => h("tr", {},
          h("td", {}, absolute(bar.begin, { seconds: false })), h("td", { class: "number" }, bar.messages.toLocaleString())))))));
}
