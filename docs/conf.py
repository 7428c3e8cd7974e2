"""The documentation as a site: `make docs` builds it with Sphinx into build/docs.

Sphinx reads the Markdown of the whole repository, not of docs/ alone. So a relative link leads to the same file on the
site and in a plain view of the repository.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from sphinx.util.matching import patfilter

if TYPE_CHECKING:
    from sphinx.application import Sphinx

HERE = Path(__file__).resolve().parent
TOP = HERE.parent
sys.path[:0] = [str(TOP), str(HERE / "_sphinx")]

# The reference imports Airflow, which writes its configuration into its home.
_HOME = tempfile.TemporaryDirectory(prefix="airflow-docs-")
os.environ.update(AIRFLOW_HOME=_HOME.name, AIRFLOW__LOGGING__LOGGING_LEVEL="ERROR")
# It notes where it reads that, before it has read the level.
logging.getLogger("airflow").setLevel(logging.ERROR)

#: The side bar: captions, and their pages in order. A pattern adds the pages that are not listed before, by name.
SIDE_BAR = {
    "Start": [
        "README",
        *("docs/start/quickstart", "docs/start/install", "docs/start/which-transport"),
        *("docs/start/dags", "dags/*", "docs/start/rows", "docs/start/consumers", "docs/start/*"),
    ],
    "Amazon SQS": ["docs/sqs/README", "docs/sqs/queues", "docs/sqs/long-delays", "docs/sqs/*"],
    "RabbitMQ": ["docs/rabbitmq/install", "docs/rabbitmq/send", "docs/rabbitmq/*"],
    "SQL store": ["docs/store/README", "docs/store/dispatchers", "docs/store/change-your-mind", "docs/store/*"],
    "Together with .NET": ["docs/dotnet"],
    "Spark": ["docs/spark/*"],
    "Airflow": ["docs/airflow/sources", "docs/airflow/wait-and-retry", "docs/airflow/*"],
    "Operations": ["docs/operations/troubleshooting", "docs/operations/production", "docs/operations/**"],
    "Deploy": ["docs/deploy/*"],
    "Security": ["docs/security", "docs/security/*", "SECURITY"],
    "Upgrading": ["docs/upgrading", "CHANGELOG"],
    "Reference": ["docs/reference/operators", "docs/reference/sensors", "docs/reference/*"],
    "Development": ["CONTRIBUTING", "docs/development/*", "docs/compared", "tests/*"],
}
#: Titles in the side bar, where the page's own says less.
TITLES = {"README": "Overview </README>"}

project = "airflow_delayed"
author = "airflow_delayed contributors"
project_copyright = f"2026 {author}, Apache License 2.0"
_VERSION = re.search(r'__version__ = "(.*)"', (TOP / "airflow_delayed" / "__init__.py").read_text())
release = version = _VERSION[1] if _VERSION else ""

root_doc = "docs/README"
include_patterns = ["docs/**", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "dags/*.md", "tests/*.md"]
exclude_patterns = [".*", "build", "dist", "airflow_delayed", "benchmarks"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "reference"]
nitpicky = True
# Other packages, and the insides of this one that docstrings name for its developers, have no page to lead to.
_INSIDE = r"identity|intake|message|rabbitmq|spark|store\.(database|dispatch|filters\.MessageFilter|policy|transport)"
nitpick_ignore_regex = [("py:.*", r"(?!airflow_delayed\.).*"), ("py:.*", rf"airflow_delayed\.({_INSIDE})\b.*")]
highlight_language = "none"

myst_heading_anchors = 6
# Quotes and hyphens stay as they are written: a reader copies options from the text.
smartquotes = False

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
add_module_names = False

html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["_sphinx/static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
templates_path = ["_sphinx/templates"]
# Whoever opens the folder's index.html comes to the start page.
html_additional_pages = {"index": "to_start_page.html"}
html_copy_source = False
html_show_sphinx = False
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"


def setup(app: Sphinx) -> None:
    app.connect("source-read", _add_side_bar)


def _add_side_bar(app: Sphinx, page: str, source: list[str]) -> None:
    """Add the tables of contents to the start page, where a plain view of the repository does not show them."""
    if page != root_doc:
        return
    app.env.note_dependency(__file__)
    for caption, patterns in SIDE_BAR.items():
        lines = [f":caption: {caption}", ":hidden:", ":glob:", ""]
        rest = set(app.env.found_docs)
        for pattern in patterns:
            # a pattern that adds no page would be a warning
            if pages := patfilter(rest, pattern):
                rest.difference_update(pages)
                lines.append(TITLES.get(pattern, f"/{pattern}"))
        source[0] += "\n```{toctree}\n" + "\n".join(lines) + "\n```\n"
