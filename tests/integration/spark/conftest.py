"""What the tests with Spark share: a session, a file of connections, and a store that waits in PostgreSQL."""

from __future__ import annotations

from support.spark import (  # noqa: F401
    connections_fixture,
    spark_fixture,
    spark_submit_fixture,
    waiting_store_fixture,
)
