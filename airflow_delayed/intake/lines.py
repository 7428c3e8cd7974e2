"""The content of a source's files: opened inside their folder, and read within bounds."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from airflow_delayed.addresses import without_secrets
from airflow_delayed.errors import SourceError
from airflow_delayed.intake.files import SourceFile, check_inside

#: Longest line, in bytes: more than any transport carries as one message.
MAX_LINE = 16 * 1024 * 1024
#: What a compressed file may unpack to: so many bytes, and beyond the first of these bounds so many times its own size.
#: Rows of JSON unpack to 5 to 30 times their size.
UNPACKED_IN_ANY_CASE = 64 * 1024 * 1024
MAX_RATIO = 200
MAX_UNPACKED = 64 * 1024 * 1024 * 1024


@contextmanager
def opened(fs: Any, file: SourceFile) -> Iterator[Any]:
    """Open a file for its bytes, as they are stored.

    :raises SourceError: it was replaced by a link that leads out of the source's folder.
    """
    with fs.open(file.path, "rb") as handle:
        if file.folder is not None:
            # the name may lead elsewhere than when it was listed: what counts is the file that was opened
            real = check_inside(file.path, file.folder)
            if not os.path.samestat(os.lstat(real), os.fstat(handle.fileno())):
                raise SourceError(f"{file.name} was replaced while it was opened; run the task again")
        yield handle


def iter_lines(fs: Any, file: SourceFile) -> Iterator[bytes]:
    """Yield a text file's lines with their ends; compressed files are unpacked on the way.

    :raises SourceError: it is torn, a line is too long, or it unpacks to far more than its size.
    """
    from fsspec.compression import compr
    from fsspec.core import get_compression

    packing = get_compression(file.path, "infer")
    try:
        with opened(fs, file) as handle:
            stream = handle if packing is None else compr[packing](handle, mode="r")
            most = _unpacked_at_most(file) if packing else None
            number = 0
            with io.BufferedReader(_Counted(stream, file, most), 1 << 17) as lines:
                while line := lines.readline(MAX_LINE + 1):
                    number += 1
                    if len(line) > MAX_LINE:
                        raise SourceError(
                            f"{file.name} row {number:,} is a line of more than {MAX_LINE:,} bytes, the longest that is"
                            " read; is the file JSON lines, with one object a line? Send a reference to a body as large"
                        )
                    yield line
    except SourceError:
        raise
    except Exception as error:
        # each packing has errors of its own, and fsspec knows more packings than are installed here
        raise SourceError(
            f"{file.name} cannot be read as lines of text: {without_secrets(str(error), file.path)}"
        ) from error


def _unpacked_at_most(file: SourceFile) -> int:
    if file.size is None:
        return MAX_UNPACKED
    return min(MAX_UNPACKED, max(UNPACKED_IN_ANY_CASE, MAX_RATIO * file.size))


class _Counted(io.RawIOBase):
    """A stream that ends with an error when more comes out of it than may."""

    def __init__(self, stream: Any, file: SourceFile, most: int | None) -> None:
        self._stream = stream
        self._file = file
        self._most = most
        self._count = 0

    def readable(self) -> bool:
        """Return that it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read some bytes."""
        data = self._stream.read(len(buffer))
        self._count += len(data)
        if self._most is not None and self._count > self._most:
            raise SourceError(
                f"{self._file.name} unpacks to more than {self._most:,} bytes, the most that is unpacked from a file of"
                f" its size ({self._file.size or 0:,} bytes); unpack it before, or split it, if its content is right"
            )
        buffer[: len(data)] = data
        return len(data)
