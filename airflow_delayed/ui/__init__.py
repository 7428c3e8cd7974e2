"""The operations page in Airflow's UI, and its JSON API."""

from __future__ import annotations
