"""The public path of :mod:`airflow_delayed.identity`."""

from __future__ import annotations

from airflow_delayed.identity import MAX_NAME, Origin, SentBy

__all__ = ["MAX_NAME", "Origin", "SentBy"]
