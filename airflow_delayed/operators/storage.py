"""Paths and URLs that a DAG author writes, as fsspec file systems."""

from __future__ import annotations

from os.path import abspath
from typing import Any
from urllib.parse import urlsplit

from airflow_delayed.errors import SourceError


def shown(url: str) -> str:
    """Return a path or URL as logs and errors may show it: without a password."""
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    name, colon, _ = user.partition(":")
    return parts._replace(netloc=f"{name}:***@{host}").geturl() if at and colon else url


def file_system(url: str) -> tuple[Any, str]:
    """Return the file system and the path in it of a local path, an ObjectStoragePath URL or any fsspec URL.

    :raises SourceError: no file system of that scheme is installed.
    """
    from airflow.sdk import ObjectStoragePath

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
            f"{urlsplit(url).scheme}:// cannot be opened: {problem}; install the provider or the fsspec package for it"
        ) from problem
    return fs, inside
