// The Airflow around this page: its colours and fonts, its address, and links to its other pages.
// Airflow shows the page in a sandboxed frame of the same origin, which may neither open windows nor leave by itself.

// Ours, and the variables of Airflow's design that they take their values from where there are such.
const TAKEN = {
  "--bg": "--chakra-colors-bg",
  "--bg-subtle": "--chakra-colors-bg-subtle",
  "--bg-muted": "--chakra-colors-bg-muted",
  "--fg": "--chakra-colors-fg",
  "--fg-muted": "--chakra-colors-fg-muted",
  "--border": "--chakra-colors-border",
  "--brand": "--chakra-colors-brand-solid",
  "--brand-contrast": "--chakra-colors-brand-contrast",
  "--brand-fg": "--chakra-colors-brand-fg",
  "--font": "--chakra-fonts-body",
  "--mono": "--chakra-fonts-mono",
};

/** The document of the Airflow that shows this page in a frame, or null when it is open by itself. */
export function surrounding() {
  try {
    return window.parent === window ? null : window.parent.document;
  } catch {
    return null; // another site's frame
  }
}

/** Follow Airflow's theme from now on. */
export function followTheme() {
  const around = surrounding();
  apply(around);
  if (around) {
    new MutationObserver(() => apply(around)).observe(around.documentElement, { attributes: true });
  } else {
    window.addEventListener("storage", () => apply(null));
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => apply(null));
  }
}

function apply(around) {
  const root = document.documentElement;
  root.dataset.theme = isDark(around) ? "dark" : "light";
  if (!around) return;
  const theirs = window.parent.getComputedStyle(around.documentElement);
  for (const [ours, name] of Object.entries(TAKEN)) {
    const value = theirs.getPropertyValue(name).trim();
    if (value) root.style.setProperty(ours, value);
    else root.style.removeProperty(ours);
  }
}

function isDark(around) {
  if (around) {
    const { classList, dataset } = around.documentElement;
    return classList.contains("dark") || dataset.theme === "dark";
  }
  const chosen = localStorage.getItem("theme");
  if (chosen === "dark" || chosen === "light") return chosen === "dark";
  return window.matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Go to another page of Airflow: by the router of the Airflow around this page, without loading all of it again. */
export function leave(event) {
  const around = surrounding();
  if (!around || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  const { href } = event.currentTarget;
  if (new URL(href).pathname.includes("/auth/")) {
    // the login is no page of the router
    const link = around.createElement("a");
    link.href = href;
    return link.click();
  }
  const { history, PopStateEvent: Popped } = window.parent;
  // the state that React Router gives to its own entries; it reads the address when it hears of a popped state
  const state = { usr: null, key: Math.random().toString(36).slice(2, 10), idx: (history.state?.idx ?? 0) + 1 };
  history.pushState(state, "", href);
  window.parent.dispatchEvent(new Popped("popstate", { state }));
}

/** Keep a query in Airflow's address, so that a reload shows the same. */
export function keep(query) {
  // the beginning of the address where Airflow's navigation shows this page
  const [base] = (surrounding() && /^.*\/plugin\/delayed-deliveries(?=\/|$)/.exec(window.parent.location.pathname)) ?? [];
  // Airflow takes over the address of the frame only when the frame is loaded; its router need not know of this
  if (base) window.parent.history.replaceState(window.parent.history.state, "", `${base}${location.pathname}${query}`);
}
