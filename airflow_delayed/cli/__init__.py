"""``airflow delayed ...`` on the command line."""

from __future__ import annotations
