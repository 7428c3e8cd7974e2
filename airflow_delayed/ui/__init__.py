"""The page of delayed deliveries in Airflow's UI."""

from __future__ import annotations
