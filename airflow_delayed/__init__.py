"""Delayed messages for Apache Airflow: delivered at their due time, whatever broker the user has."""

from __future__ import annotations

__version__ = "0.1.0"
