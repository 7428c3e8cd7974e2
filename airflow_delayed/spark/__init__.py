"""Sending from Spark's executors, which need neither Airflow nor its connections."""

from __future__ import annotations
