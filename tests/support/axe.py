"""axe, which looks for what keeps people from using a page."""

from __future__ import annotations

import sys
from pathlib import Path

from services import chromium

_SOURCE = Path(sys.prefix, "neighbour", "axe_playwright_python", "axe.min.js")
_VIOLATIONS = """axe.run(document).then(found => found.violations.map(
  each => `${each.id}: ${each.help}: ${each.nodes.slice(0, 3).map(node => node.html.slice(0, 200)).join(' | ')}`))"""


def violations(page: chromium.Page) -> list[str]:
    """Return what axe finds in the page's own document, a line for each rule."""
    return list(page.load(f"{_SOURCE.read_text()};\n{_VIOLATIONS}"))
