"""A plugin that leaves only the tests that need a server: pytest -p support.needing --needing=postgres.

They are those that ask for its URL, or are parametrised with its name. `make test-newest` uses it.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--needing", metavar="SERVER", help="rabbitmq, postgres or mariadb")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    server = config.getoption("needing")
    others = [item for item in items if not _needs(item, server)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


def _needs(item: pytest.Item, server: str) -> bool:
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return f"{server}_url" in item.fixturenames or any(
        isinstance(value, str) and value == server for value in parameters
    )
