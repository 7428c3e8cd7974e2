// The page's requests to its server; addresses are relative to the page, wherever Airflow is mounted.

/** An error, with a text for people. */
export class Fault extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
    /** It is about all of the page: the verdict says it, once. */
    this.whole = code === "login" || code === "away";
  }
}

const PATIENCE = 10_000; // ms; the server itself gives a connection five seconds

const broken = () => new Fault(0, "away", "Airflow's API server does not answer. Check that it is running; this page tries again by itself.");

export function get(path, query = {}) {
  const given = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const one of [value].flat()) if (one !== null && one !== undefined && one !== "") given.append(name, one);
  }
  const asked = given.toString();
  return ask(`api/v1/${path}${asked ? `?${asked}` : ""}`, { signal: AbortSignal.timeout(PATIENCE) });
}

export function post(path, body) {
  return ask(`api/v1/${path}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
}

async function ask(address, options) {
  let answer;
  try {
    answer = await fetch(address, { credentials: "same-origin", ...options });
  } catch {
    throw broken();
  }
  const body = await answer.json().catch((error) => {
    if (error instanceof SyntaxError) return null;
    throw broken();
  });
  if (answer.ok && body !== null) return body;
  if (answer.status === 401) throw new Fault(401, "login", "Your login has ended.");
  const { code = "internal", message = `The server answered ${answer.status}. Its log says more.` } = body?.error ?? {};
  throw new Fault(answer.status, code, message);
}

/** Ask Airflow's own API, with the user's login; the page is mounted one level below Airflow. */
export async function airflow(method, path, body) {
  const answer = await fetch(`../api/v2/${path}`, { method, credentials: "same-origin",
    headers: { "Content-Type": "application/json" }, body: body && JSON.stringify(body) }).catch(() => { throw broken(); });
  if (!answer.ok) throw new Fault(answer.status, "airflow", answer.status === 403 ? "You may not change this DAG." : `Airflow answered ${answer.status}.`);
  return answer.json();
}

/** A part of a path. */
export const part = encodeURIComponent;

/** The path of a connection. */
export const pathOf = ({ kind, connection_id, queue }) => ({
  store: `stores/${part(connection_id)}`,
  rabbitmq: `rabbitmq/${part(connection_id)}`,
  sqs: `sqs/${part(connection_id)}/${part(queue ?? "")}`,
})[kind];
