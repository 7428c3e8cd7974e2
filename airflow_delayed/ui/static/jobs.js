// Changes of many messages, which the server works on: how far they are, and the button that stops them.

import { get, post } from "./api.js";
import { h, show } from "./dom.js";
import { absolute } from "./time.js";

const PAUSE = 1_000; // ms between two looks at a job while its dialog is open

const isAtWork = ({ state }) => state === "running" || state === "stopping";
const far = ({ considered, total, total_at_least: least }) => `${considered.toLocaleString()} of ${least ? "at least " : ""}${total.toLocaleString()} messages`;
const bar = (job) => h("progress", { max: Math.max(job.total, job.considered, 1), value: job.considered, "aria-label": `Progress of ${job.action}` });
const stopper = (job, stop) => isAtWork(job) && job.may_stop && h("button", { type: "button", "data-key": `stop ${job.job}`, disabled: job.state === "stopping", onclick: stop }, "Stop");

/** Why a job changed less than all; nothing if it is done. */
export function shortfall(job) {
  if (job.state === "stopped") return `Stopped by ${job.stopped_by} after ${far(job)}; the others are unchanged.`;
  if (job.state === "failed") return `Failed after ${far(job)}: ${job.problem} Start it again to go on with the others.`;
  if (job.state === "interrupted") return `Interrupted after ${far(job)}: its server gave the last sign of life at ${absolute(job.seen_at)}. Start it again to go on with the others.`;
  return null;
}

/** Start a job, and show it until it ends or the dialog is closed, after which it goes on; resolves to what was seen last. */
export async function work(content, path, asked) {
  let job = await post(path, asked);
  const place = h("div", { class: "content" });
  const problem = h("p", { class: "muted" });
  const stop = async () => {
    await post(`${path}/${job.job}/stop`, {}).then(take, complain);
  };
  const complain = (fault) => { problem.textContent = fault.message; };
  const take = (found) => {
    job = found;
    problem.textContent = "";
    show(place, bar(job), h("p", {}, far(job)), h("footer", {}, stopper(job, stop)));
  };
  show(content, h("p", { role: "status" }, "At work on the server. You may close this: it goes on."), place, problem);
  take(job);
  while (content.isConnected && isAtWork(job)) {
    await new Promise((resolve) => { setTimeout(resolve, PAUSE); });
    if (content.isConnected) await get(`${path}/${job.job}`).then(take, complain);
  }
  return { ...job, goesOn: isAtWork(job) };
}

/** Show the latest jobs of a store, a line each. */
export function lines(element, found, path, again) {
  element.hidden = !found.length;
  const selected = (selection) => Object.entries(selection).map(([name, value]) => `${name} ${[value].flat().join(" or ")}`).join(", ");
  show(element, found.map((job) => h("p", { class: `job notice ${isAtWork(job) ? "" : job.state === "done" ? "good" : "warn"}` },
    h("span", {}, h("strong", {}, `${job.action} by ${job.who}`), ` (${selected(job.selection)}): ${shortfall(job) ?? `${far(job)}, ${job.state}`}`),
    isAtWork(job) && bar(job),
    stopper(job, (event) => post(`${path}/jobs/${job.job}/stop`, {}).catch((fault) => event.target.after(` ${fault.message}`)).then(again)))));
}
