"""The dispatcher: it claims due messages from the store, sends them, and settles what became of them."""

from __future__ import annotations

import airflow_delayed.store.alchemy  # noqa: F401
