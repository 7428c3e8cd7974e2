"""Small files that executors and the driver share: a path on this machine, or any URL that Arrow or fsspec opens.

Arrow is imported where it is used: Airflow reads a DAG's operators without it.
"""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

from airflow_delayed.errors import SourceError


class Place:
    """A file or a folder.

    :raises SourceError: nothing opens a URL of that scheme.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._fs, self._path = _open(url)

    def write(self, content: Any) -> None:
        """Write a file of JSON; who reads it meanwhile finds the old one or the new one, whole."""
        text = json.dumps(content).encode()
        if not self._local:
            # an object store shows an object when it is complete
            with self._fs.open_output_stream(self._path) as stream:
                stream.write(text)
            return
        self._fs.create_dir(self._path.rpartition("/")[0] or "/", recursive=True)
        unfinished = f"{self._path}.{uuid4().hex[:8]}.unfinished"
        with self._made(unfinished) as stream:
            stream.write(text)
        self._fs.move(unfinished, self._path)

    def _made(self, path: str) -> Any:
        from pyarrow.fs import LocalFileSystem

        # a new file of this machine, never what somebody's link leads to
        return open(path, "xb") if isinstance(self._fs, LocalFileSystem) else self._fs.open_output_stream(path)

    def read(self) -> Any:
        """Read a file of JSON.

        :raises OSError: it is not there.
        """
        with self._fs.open_input_stream(self._path) as stream:
            return json.loads(stream.read())

    def child(self, name: str) -> Place:
        """Return a file or folder in this folder."""
        made = Place.__new__(Place)
        made.url, made._fs, made._path = f"{self.url.rstrip('/')}/{name}", self._fs, f"{self._path.rstrip('/')}/{name}"
        return made

    def children(self) -> list[Place]:
        """Return the JSON files in this folder; none if it is not there."""
        from pyarrow.fs import FileSelector, FileType

        found = self._fs.get_file_info(FileSelector(self._path, allow_not_found=True))
        names = sorted(info.base_name for info in found if info.type == FileType.File)
        return [self.child(name) for name in names if name.endswith(".json")]

    def remove(self) -> None:
        """Remove this folder, if it is there."""
        from pyarrow.fs import FileType

        if self._fs.get_file_info(self._path).type == FileType.Directory:
            self._fs.delete_dir(self._path)

    @property
    def _local(self) -> bool:
        from pyarrow.fs import LocalFileSystem

        # a move within HDFS is as good; there and elsewhere that Arrow knows, only object stores cannot move
        return isinstance(self._fs, LocalFileSystem) or self._fs.type_name == "hdfs"


def _open(url: str) -> tuple[Any, str]:
    from pyarrow import ArrowInvalid
    from pyarrow.fs import FileSystem, FSSpecHandler, LocalFileSystem, PyFileSystem

    if "://" not in url:
        return LocalFileSystem(), url
    # Hadoop's names of what others call s3 and abfs
    plain = url.replace("s3a://", "s3://", 1)
    try:
        fs, path = FileSystem.from_uri(plain)
    except ArrowInvalid as problem:
        try:
            from fsspec.core import url_to_fs

            other, path = url_to_fs(url)
        except (ImportError, ValueError):
            scheme = url.partition("://")[0]
            raise SourceError(f"{scheme}:// cannot be opened: {problem}; install the fsspec package for it") from None
        return PyFileSystem(FSSpecHandler(other)), path
    return fs, path
