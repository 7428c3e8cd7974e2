"""The hooks: each turns an Airflow connection into a transport."""

from __future__ import annotations
