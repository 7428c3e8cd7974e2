"""The documentation's site as `make docs` builds it: links, search, both themes, a phone, and the reference."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from functools import cache, partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from urllib.parse import unquote, urlsplit

import pytest
from airflow.sdk import BaseHook, BaseNotifier, BaseOperator, BaseSensorOperator
from airflow.triggers.base import BaseTrigger
from bs4 import BeautifulSoup
from support import axe

import airflow_delayed
from airflow_delayed import errors
from airflow_delayed.cli.definition import get_delayed_commands
from airflow_delayed.provider_info import get_provider_info
from services import chromium

pytestmark = pytest.mark.long

HERE = Path(__file__).resolve().parents[2]
SEARCH = "search.html?q=erase"
#: The start page, a page with tables and code, a page of the reference, and the search.
PAGES = ("docs/README.html", "docs/sqs/long-delays.html", "docs/reference/sensors.html", SEARCH)
RESULTS = "[...document.querySelectorAll('#search-results ul.search > li > a')].map(link => link.getAttribute('href'))"


def build(top: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the documentation of a repository, as `make docs` does."""
    # a warning of Python's in the build is none of the documentation's
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    return subprocess.run([top / ".ci/docs", folder], env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    built = build(HERE, folder)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where a server without any program of its own serves the site."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *words: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def page(address: str) -> Iterator[chromium.Page]:
    with chromium.running() as browser:
        yield browser.open(address)


@cache
def parsed(file: Path) -> BeautifulSoup:
    return BeautifulSoup(file.read_text(), "html.parser")


@cache
def anchors(file: Path) -> set[str]:
    return set(re.findall(r' id="([^"]+)"', file.read_text()))


def test_no_link_is_dead_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    dead, foreign, links = [], [], 0
    for file in site.rglob("*.html"):
        for kind, link in re.findall(r'<(a|img|link|script|iframe)\b[^>]*?\s(?:href|src)="([^"]*)"', file.read_text()):
            target = urlsplit(unescape(link))
            if target.scheme or target.netloc:
                if kind != "a":
                    foreign.append((file.name, link))
                continue
            links += 1
            other = (file.parent / unquote(target.path)).resolve() if target.path else file
            anchor = unquote(target.fragment)
            if not other.is_file() or (anchor and other.suffix == ".html" and anchor not in anchors(other)):
                dead.append((file.relative_to(site).as_posix(), link))
    assert dead == []
    assert foreign == []
    assert links > 1000


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ("erase", "docs/store/change-your-mind.html"),
        ("messages are late", "docs/operations/doctor.html"),
        ("on_conflict", "docs/reference/operators.html"),
        ("exactly once", "docs/store/README.html"),
        ("AccessDenied", "docs/reference/errors.html"),
        ("long delays sqs", "docs/sqs/long-delays.html"),
    ],
)
def test_the_search_finds(page: chromium.Page, address: str, query: str, wanted: str) -> None:
    page.go(f"{address}docs/README.html")
    page.fill("input.sidebar-search", query)
    page.press("Enter")
    page.wait_for("location.pathname.endsWith('/search.html') && /found \\d+/.test(document.body.innerText)")
    found = [urlsplit(link).path.lstrip("./") for link in page.evaluate(RESULTS)]
    assert wanted in found[:15]


def show(page: chromium.Page, address: str, path: str, theme: str = "light") -> None:
    page.go(f"{address}{path}")
    if path == SEARCH:
        page.wait_for("/found \\d+/.test(document.body.innerText)")
    page.evaluate(f"document.body.dataset.theme = '{theme}'")


@pytest.mark.parametrize("path", PAGES)
def test_axe_finds_nothing_in_either_theme(page: chromium.Page, address: str, path: str) -> None:
    page.resize(1280, 1400)
    backgrounds = set()
    for theme in ("light", "dark"):
        show(page, address, path, theme)
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert axe.violations(page) == [], theme
        if wanted := os.environ.get("SCREENSHOTS"):
            Path(wanted).mkdir(parents=True, exist_ok=True)
            page.screenshot(Path(wanted, f"{Path(urlsplit(path).path).stem}-{theme}.png"))
    assert len(backgrounds) == 2


@pytest.mark.parametrize("path", [*PAGES, "README.html", "docs/store/dispatchers.html", "docs/rabbitmq/verify.html"])
def test_a_phone_shows_a_page_without_scrolling_sideways(page: chromium.Page, address: str, path: str) -> None:
    page.resize(390, 844)
    show(page, address, path)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def described(site: Path, path: str) -> str:
    """What the reference says of a class or function."""
    for file in (site / "docs" / "reference").glob("*.html"):
        if path in anchors(file):
            heading = parsed(file).find(id=path)
            assert heading is not None
            return heading.find_next_sibling("dd").get_text()
    raise AssertionError(f"{path} is in no page of the reference: add it to a page of docs/reference/")


def public_classes() -> list[type]:
    modules = [
        import_module(found.name)
        for found in walk_packages(airflow_delayed.__path__, "airflow_delayed.")
        if found.name.split(".")[1] in ("operators", "sensors", "hooks", "triggers", "notifications")
    ]
    bases = (BaseOperator, BaseSensorOperator, BaseHook, BaseNotifier, BaseTrigger)
    return [
        found
        for module in modules
        for found in vars(module).values()
        if isinstance(found, type)
        and issubclass(found, bases)
        and found.__module__ == module.__name__
        and not inspect.isabstract(found)
        # the base of several
        and found.__name__ != "ThreadTrigger"
    ]


@pytest.mark.parametrize("each", public_classes(), ids=lambda each: each.__name__)
def test_the_reference_describes_each_class_and_each_of_its_parameters(site: Path, each: type) -> None:
    text = described(site, f"{each.__module__}.{each.__name__}")
    own = set(inspect.signature(each).parameters) - {"kwargs", "context"}
    inherited = {name for base in each.__mro__[1:] if "__init__" in vars(base) for name in parameters(base)}
    assert {name for name in own - inherited if name not in text} == set()
    for field in getattr(each, "template_fields", ()):
        assert field in text


def parameters(base: type) -> set[str]:
    return set(inspect.signature(base.__init__).parameters)  # type: ignore[misc]


def test_the_reference_has_each_error_command_and_option(site: Path) -> None:
    text = parsed(site / "docs/reference/errors.html").get_text()
    own = [name for name, each in vars(errors).items() if getattr(each, "__mro__", ())[-2:-1] == (BaseException,)]
    assert len(own) > 15
    assert [name for name in own if name not in text] == []
    text = parsed(site / "docs/reference/command-line.html").get_text()
    (group,) = get_delayed_commands()
    for command in group.subcommands:
        assert f"airflow delayed {command.name}" in text
        assert [flag for each in command.args for flag in each.flags if flag not in text] == []
    text = parsed(site / "docs/reference/configuration.html").get_text()
    assert [name for name in get_provider_info()["config"]["delayed"]["options"] if name not in text] == []


def test_no_help_has_a_word_in_brackets() -> None:
    """Airflow's help would take it for a style, and leave it out."""
    (group,) = get_delayed_commands()
    texts = [command.description or command.help for command in group.subcommands]
    texts += [each.kwargs.get("help", "") for command in group.subcommands for each in command.args]
    assert [text for text in texts if re.search(r"\[[a-z]", text)] == []
