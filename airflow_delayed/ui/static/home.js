// The card of Airflow's home: the verdict, by Airflow's own React and Chakra, which it puts into global names for plugins.

const { createElement: h, useEffect, useState } = globalThis.React;
const { Box, Heading, Text } = globalThis.ChakraUI;
const { Link } = globalThis.ReactRouterDOM;

const PAUSE = 30_000; // ms between two looks, while the page is seen
const SHOWN = 3; // causes
const HEADS = { ok: "Delivering", degraded: "Needs a look", failing: "Not delivering" };
const TONES = { ok: "green", degraded: "orange", failing: "red" };
// this file is at delayed-deliveries/static/<hash>/home.js, or without the hash
const health = new URL(import.meta.url.replace(/static\/.*$/, "api/v1/health"));

function Verdict() {
  const [verdict, setVerdict] = useState(null);
  const [fault, setFault] = useState(null);
  useEffect(() => {
    let there = true;
    const load = async () => {
      try {
        const answer = await fetch(health, { credentials: "same-origin" });
        const body = await answer.json();
        if (!answer.ok) throw new Error(body?.error?.message ?? `The server answered ${answer.status}.`);
        if (there) setVerdict(body);
        if (there) setFault(null);
      } catch (error) {
        if (there) setFault(error.message);
      }
    };
    load();
    const timer = setInterval(() => document.visibilityState === "visible" && load(), PAUSE);
    return () => {
      there = false;
      clearInterval(timer);
    };
  }, []);
  const head = fault ? "Not known" : !verdict ? "Looking …" : verdict.partly ? "Partly delivering" : HEADS[verdict.status];
  const causes = fault ? [fault] : (verdict?.causes ?? []).slice(0, SHOWN).map(({ where, what }) => `${what.startsWith(where) ? what : `${where}: ${what}`}.`);
  const more = fault ? 0 : (verdict?.causes.length ?? 0) - causes.length;
  const tone = fault ? "orange" : TONES[verdict?.status] ?? "gray";
  return h(Box, { role: "region", "aria-label": "Delayed deliveries", borderWidth: 1, borderLeftWidth: 4, borderLeftColor: `${tone}.500`, borderRadius: 8, p: 4, my: 2 },
    h(Heading, { size: "md" }, "Delayed deliveries: ", head),
    causes.map((cause, index) => h(Text, { key: index, mt: 1, overflowWrap: "anywhere" }, cause)),
    more > 0 && h(Text, { mt: 1 }, `${more} more.`),
    h(Text, { mt: 2 }, h(Link, { to: "/plugin/delayed-deliveries", style: { textDecoration: "underline" } }, "Open the page")));
}

globalThis.AirflowPlugin = Verdict;
