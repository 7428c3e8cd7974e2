"""Pages of the documentation: their code blocks, and running them as they stand."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return each code block's language and text."""
    return _BLOCK.findall(page.read_text())


def run(page: Path, change: Callable[[str], str] = str) -> Iterator[None]:
    """Run a page's Python, block after block with the names of those before, and compare with the text that follows.

    Pauses after each block, so that a test can do what happens between two of them.

    :param change: is given each block before it is run.
    """
    printed: list[str] = []
    # not by stdout, where Airflow may log
    names: dict[str, Any] = {"print": lambda *words: printed.append(" ".join(map(str, words)) + "\n")}
    found = blocks(page)
    for number, (language, text) in enumerate(found):
        if language != "python":
            continue
        printed.clear()
        exec(compile(change(text), f"{page.name}, block {number}", "exec"), names)
        after = found[number + 1] if number + 1 < len(found) else ("", "")
        output, wanted = "".join(printed), after[1] if after[0] == "text" else ""
        assert output == wanted, f"{page.name}, block {number} printed\n{output}and the page says\n{wanted}"
        yield


def links(page: Path) -> list[str]:
    """Return what a page links to, without other sites."""
    return [link for link in re.findall(r"\]\(([^)]+)\)", page.read_text()) if "://" not in link]


def anchors(page: Path) -> set[str]:
    """Return the names that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
