// The look of the Airflow around this page: its colours, its fonts, and whether it is light or dark at the moment.

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

/** Go to another page of Airflow: the frame itself may not, but a link of the document around it may. */
export function leave(event) {
  const around = surrounding();
  if (!around || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  const link = around.createElement("a");
  link.href = event.currentTarget.href;
  link.click();
}
