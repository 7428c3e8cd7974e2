"""The public path of :mod:`airflow_delayed.origin`."""

from __future__ import annotations

from airflow_delayed.origin import MAX_NAME, Origin, SentBy

__all__ = ["MAX_NAME", "Origin", "SentBy"]
