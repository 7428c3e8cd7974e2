// What a screen reader and a keyboard need beyond the theme.
document.addEventListener("DOMContentLoaded", () => {
  const label = (selector, name) => document.querySelector(selector)?.setAttribute("aria-label", name);
  label("aside.sidebar-drawer", "Pages");
  label("aside.toc-drawer", "On this page");
  // an empty heading of a table's column is none
  for (const heading of document.querySelectorAll("th")) {
    if (!heading.textContent.trim()) heading.replaceWith(document.createElement("td"));
  }
  // what is wider than the page is scrolled by arrow keys
  const watched = new ResizeObserver((boxes) => {
    for (const { target } of boxes) {
      if (target.scrollWidth > target.clientWidth) target.tabIndex = 0;
      else target.removeAttribute("tabindex");
    }
  });
  for (const box of document.querySelectorAll("pre, .table-wrapper")) watched.observe(box);
});
