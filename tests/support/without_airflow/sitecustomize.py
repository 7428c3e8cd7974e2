"""Refuses Airflow to every Python that has this folder on its PYTHONPATH, as on a machine that has none."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType


class Refusal:
    """A finder that stands before all others."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name.partition(".")[0] == "airflow":
            raise ModuleNotFoundError(f"No module named {name!r}: this Python has no Airflow", name=name)


sys.meta_path.insert(0, Refusal())
