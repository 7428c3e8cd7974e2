"""Tests of one live Airflow; a package, so that it ends with the last of them."""

from __future__ import annotations
