"""Paths and URLs that a DAG author writes, as fsspec file systems."""

from __future__ import annotations

from os.path import abspath
from typing import Any

from airflow_delayed.addresses import secrets_of, shown, without_secrets
from airflow_delayed.errors import SourceError


def file_system(url: str) -> tuple[Any, str]:
    """Return the file system and the path in it of a local path, an ObjectStoragePath URL or any fsspec URL.

    :raises SourceError: no file system of that scheme is installed.
    """
    from airflow.sdk import ObjectStoragePath
    from airflow.sdk.log import mask_secret

    # what other packages log or raise of it is masked in this task's log
    for secret in secrets_of(url):
        mask_secret(secret)
    if "://" not in url:
        import fsspec

        # ".." and the like would hide which files lie in a folder
        return fsspec.filesystem("file"), abspath(url) if url.strip() else url
    try:
        path = ObjectStoragePath(url)
        return path.fs, abspath(path.path) if path.protocol == "file" else path.path
    except (ValueError, ImportError, NotImplementedError) as error:
        problem = error
    from fsspec.core import url_to_fs

    try:
        fs, inside = url_to_fs(url)
    except (ValueError, ImportError):
        raise SourceError(
            f"{shown(url)} cannot be opened: {without_secrets(str(problem), url)}; install the provider or the fsspec"
            " package for it"
        ) from None
    return fs, inside
