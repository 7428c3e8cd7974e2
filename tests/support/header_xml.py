"""The headers that NServiceBus's MSMQ transport keeps as XML, as its XmlSerializer writes them (MsmqUtilities.cs).

``Convert`` writes a List of HeaderInfo, and ``DeserializeMessageHeaders`` reads it::

    <?xml version="1.0"?>
    <ArrayOfHeaderInfo xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" ...>
      <HeaderInfo>
        <Key>NServiceBus.MessageId</Key>
        <Value>...</Value>
      </HeaderInfo>
    </ArrayOfHeaderInfo>

As there: what follows the last end tag is ignored (old senders left null bytes), no bytes at all are no headers, a key
that is null is passed over, a key that occurs twice is an error, and a character that XML does not allow, such as
``&#x19;`` or ``&#x0;``, is read as what it stands for. Stricter than there: UTF-8 only, and nothing else may be among
the elements. A document type is refused before anything in it is looked at, so there are no entities to expand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from xml.parsers import expat

from airflow_delayed.errors import InvalidMessage

_ESCAPED = re.compile("[&<>\x00-\x08\x0b\x0c\x0e-\x1f]")
_NAMED = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_END = b"</ArrayOfHeaderInfo>"
_NIL = "http://www.w3.org/2001/XMLSchema-instance nil"
_TEXT = ("Key", "Value")
#: Which elements may be in which.
_IN = {(): ("ArrayOfHeaderInfo",), ("ArrayOfHeaderInfo",): ("HeaderInfo",), ("ArrayOfHeaderInfo", "HeaderInfo"): _TEXT}

#: Stands before the number of a character that XML does not allow, and doubled for itself: expat would refuse them.
_MARK = "\ue000"
_NOT_IN_XML = "\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff"
_HIDDEN = re.compile(f"[{_NOT_IN_XML}{_MARK}]|&#(?:x([0-9A-Fa-f]{{1,6}})|([0-9]{{1,7}}));")
_SHOWN = re.compile(f"{_MARK}(?:{_MARK}|([0-9a-f]+);)")
_FORBIDDEN = re.compile(f"[{_NOT_IN_XML}{_MARK}]")


def headers_xml(headers: Mapping[str, str | None]) -> bytes:
    """Write headers as .NET's XmlSerializer does on an XmlTextWriter: a value that is null has no element."""
    lines = [
        '<?xml version="1.0"?>',
        '<ArrayOfHeaderInfo xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"'
        ' xmlns:xsd="http://www.w3.org/2001/XMLSchema">',
    ]
    for key, value in headers.items():
        lines += ["  <HeaderInfo>", f"    {_element('Key', key)}"]
        lines += [] if value is None else [f"    {_element('Value', value)}"]
        lines.append("  </HeaderInfo>")
    return "\r\n".join([*lines, "</ArrayOfHeaderInfo>"]).encode()


def _element(name: str, text: str) -> str:
    escaped = _ESCAPED.sub(lambda found: _NAMED.get(found[0], f"&#x{ord(found[0]):X};"), text)
    return f"<{name}>{escaped}</{name}>" if text else f"<{name} />"


def read_headers_xml(data: bytes) -> dict[str, str | None]:
    """Return the headers; a value that is null is None.

    :raises InvalidMessage: it is something else than described above. The text shows nothing of the headers' values.
    """
    end = data.rfind(_END)
    data = data[: end + len(_END)] if end >= 0 else data.rstrip(b"\0")
    if not data:
        return {}
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _invalid_headers(f"are not UTF-8 at byte {error.start}") from None
    reader = _XmlHeaders()
    parser = expat.ParserCreate(namespace_separator=" ")
    parser.buffer_text = True
    parser.StartDoctypeDeclHandler = _refuse
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    parser.CharacterDataHandler = reader.text
    try:
        # as text, so that what the declaration says of the encoding does not matter
        parser.Parse(_HIDDEN.sub(_hide, text), True)
    except expat.ExpatError as error:
        problem = expat.ErrorString(error.code)
        raise _invalid_headers(f"are not XML: {problem}, line {error.lineno}, column {error.offset}") from None
    return reader.headers


def _invalid_headers(problem: str) -> InvalidMessage:
    return InvalidMessage("headers", problem)


def _refuse(*_: Any) -> None:
    raise _invalid_headers("have a document type, which NServiceBus never writes and which is not read")


def _hide(found: re.Match[str]) -> str:
    hexadecimal, decimal = found.groups()
    if hexadecimal or decimal:
        number = int(hexadecimal, 16) if hexadecimal else int(decimal)
        if number > 0x10FFFF or not _FORBIDDEN.match(chr(number)):
            return found[0]  # what is wrong with it, expat tells
        return _hidden(chr(number))
    return _hidden(found[0])


def _hidden(character: str) -> str:
    return _MARK + (_MARK if character == _MARK else f"{ord(character):x};")


def _show(found: re.Match[str]) -> str:
    return chr(int(found[1], 16)) if found[1] else _MARK


class _XmlHeaders:
    """Takes elements and text one after the other."""

    def __init__(self) -> None:
        self.headers: dict[str, str | None] = {}
        self._path: tuple[str, ...] = ()
        self._pair: dict[str, str | None] = {}
        self._nil = False
        self._text: list[str] = []

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name not in _IN.get(self._path, ()):
            raise _invalid_headers(f"have an element {name[:40]!r} where there is none in an ArrayOfHeaderInfo")
        if name in self._pair:
            raise _invalid_headers(f"have a second {name} in one HeaderInfo")
        self._path += (name,)
        self._nil = attributes.get(_NIL) in ("true", "1")
        self._text.clear()

    def text(self, data: str) -> None:
        if self._path[-1] in _TEXT:
            self._text.append(data)
        elif data.strip():
            raise _invalid_headers("have text between the elements of an ArrayOfHeaderInfo")

    def end(self, name: str) -> None:
        self._path = self._path[:-1]
        if name in _TEXT:
            self._pair[name] = None if self._nil else _SHOWN.sub(_show, "".join(self._text))
        elif name == "HeaderInfo":
            self._add(self._pair.get("Key"), self._pair.get("Value"))
            self._pair = {}

    def _add(self, key: str | None, value: str | None) -> None:
        if key is None:
            return
        if key in self.headers:
            raise _invalid_headers(f"have {key[:80]!r} twice")
        self.headers[key] = value
