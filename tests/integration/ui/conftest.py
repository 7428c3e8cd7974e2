"""What the tests of the operations page share: the page, and a store in a database of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from airflow.sdk import DAG
from support.operations_page import dags, own_store_fixture, page_fixture, served_page_fixture  # noqa: F401


@pytest.fixture
def nightly(airflow_db: None) -> Iterator[None]:
    """The DAG ``nightly``, which nobody has paused."""
    with dags(DAG("nightly")):
        yield
