"""A DAG bundle that has versions: the folders of a folder, of which its file "current" names the newest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from airflow.dag_processing.bundles.base import BaseDagBundle, BundleVersion


class Releases(BaseDagBundle):
    """The bundle.

    :param folder: has the versions.
    """

    supports_versioning = True

    def __init__(self, *, folder: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._folder = Path(folder)
        self._newest = self.version or self._current()

    @property
    def path(self) -> Path:
        return self._folder / self._newest

    def get_current_version(self) -> BundleVersion:
        return BundleVersion(version=self._newest)

    def refresh(self) -> None:
        self._newest = self._current()

    def _current(self) -> str:
        return (self._folder / "current").read_text()
