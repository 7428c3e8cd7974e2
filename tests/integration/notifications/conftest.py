"""What the tests of notifiers and the listener share; they are above SQL, see support.stores."""

from __future__ import annotations

from support.etl import broker_fixture, etl_fixture, reachable_fixture  # noqa: F401
from support.stores import plain_store_fixture  # noqa: F401
