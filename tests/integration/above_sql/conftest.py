"""These tests are above SQL: their store is on SQLite, and on each database in a long run; see support.stores."""

from __future__ import annotations

from support.stores import plain_store_fixture  # noqa: F401
