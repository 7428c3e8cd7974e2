"""Headers as NServiceBus's MSMQ transport stores them."""

from __future__ import annotations

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.header_xml import headers_xml, read_headers_xml

from airflow_delayed.errors import InvalidMessage

NIL = 'xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" xsi:nil'


def document(inner: str) -> bytes:
    return f"<ArrayOfHeaderInfo>{inner}</ArrayOfHeaderInfo>".encode()


def pair(key: str, value: str) -> str:
    return f"<HeaderInfo><Key>{key}</Key><Value>{value}</Value></HeaderInfo>"


# a surrogate can be in a .NET string, and its XmlTextWriter refuses it
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(st.dictionaries(TEXT, st.none() | TEXT))
def test_what_was_written_is_read(headers):
    def read_by_xml(text: str | None) -> str | None:
        # the ends of lines are one character to every reader of XML, .NET's too
        return None if text is None else re.sub("\r\n?", "\n", text)

    wanted = {read_by_xml(key): read_by_xml(value) for key, value in headers.items()}
    if len(wanted) == len(headers):
        assert read_headers_xml(headers_xml(headers)) == wanted


@given(st.binary() | st.text("<>/&;#x0! []'\"ABCKHDeyadrInfoVlu-").map(str.encode))
def test_anything_else_is_refused_and_does_no_harm(data):
    for given_data in (data, document(data.decode(errors="replace"))):
        # any other error fails the test
        with contextlib.suppress(InvalidMessage):
            read_headers_xml(given_data)


@pytest.mark.parametrize(
    "data, headers",
    [
        (b"", {}),
        (b"\0\0\0", {}),
        (b"<ArrayOfHeaderInfo />", {}),
        (document(pair("a", "b")), {"a": "b"}),
        # a byte order mark, and the encoding that some writers declare
        (b"\xef\xbb\xbf" + b'<?xml version="1.0" encoding="utf-8"?>' + document(pair("a", "\u00fc")), {"a": "\u00fc"}),
        # upstream's tests: a control character; null bytes or anything else after the end
        (document(pair("a", "see '&#x19;'")), {"a": "see '\x19'"}),
        (document(pair("a", "b")) + b"\0" * 20, {"a": "b"}),
        (document(pair("a", "b")) + b"\xff\xfe bogus <", {"a": "b"}),
        (document(pair("a", "&#0;&#x0;&#x00;")), {"a": "\0\0\0"}),
        (document(pair("a", "\x0b&#xFFFF;")), {"a": "\x0b\uffff"}),
        # the character that stands for those on the way through the parser is itself a character
        (document(pair("a", "\ue000&#xE000;19;&#xe000;")), {"a": "\ue000\ue00019;\ue000"}),
        (document(pair("a", "&lt;&amp;&gt;&quot;&apos;&#65;&#x1F600;&#xD;\r\n")), {"a": "<&>\"'A\U0001f600\r\n"}),
        (document(pair("a", "<![CDATA[<b>]]><!-- no -->c")), {"a": "<b>c"}),
        # null: no element, or one that says so; empty: an element without text
        (document("<HeaderInfo><Key>a</Key></HeaderInfo>"), {"a": None}),
        (document(f'<HeaderInfo><Key>a</Key><Value {NIL}="true" /></HeaderInfo>'), {"a": None}),
        (document(f'<HeaderInfo><Key>a</Key><Value {NIL}="false">b</Value></HeaderInfo>'), {"a": "b"}),
        (document("<HeaderInfo><Key>a</Key><Value /></HeaderInfo>"), {"a": ""}),
        (document("<HeaderInfo><Value>of nothing</Value></HeaderInfo>" + pair("a", "b")), {"a": "b"}),
        (document("<HeaderInfo><Value>first</Value><Key>a</Key></HeaderInfo>"), {"a": "first"}),
    ],
)
def test_forms(data, headers):
    assert read_headers_xml(data) == headers


LAUGHS = (
    b'<!DOCTYPE x [<!ENTITY a "ha"><!ENTITY b "&a;&a;">]><ArrayOfHeaderInfo><HeaderInfo><Key>&b;</Key></HeaderInfo>'
    b"</ArrayOfHeaderInfo>"
)


@pytest.mark.parametrize(
    "data, problem",
    [
        (LAUGHS, "document type"),
        (b'<!DOCTYPE x SYSTEM "http://localhost/x">' + document(""), "document type"),
        (document(pair("a", "&b;")), "undefined entity"),
        (document(pair("a", "&#xD800;")), "invalid character number"),
        (document(pair("a", "&#x110000;")), "invalid character number"),
        (document(pair("a", "hush") + pair("a", "hush")), "'a' twice"),
        (document("<HeaderInfo><Key>a</Key><Key>b</Key></HeaderInfo>"), "a second Key"),
        (document("<Header />"), "an element 'Header'"),
        (document("<HeaderInfo><Key><b /></Key></HeaderInfo>"), "an element 'b'"),
        (document("<HeaderInfo>hush</HeaderInfo>"), "text between"),
        (b"<Headers />", "an element 'Headers'"),
        (b'<ArrayOfHeaderInfo xmlns="urn:x" />', "an element 'urn:x ArrayOfHeaderInfo'"),
        (b"<ArrayOfHeaderInfo><HeaderInfo>", "no element found"),
        (b'{"a": "hush"}', "are not XML"),
        (document(pair("a", "hush")).decode().encode("utf-16"), "are not UTF-8"),
        (document("\u00e4").decode().encode("latin-1"), "are not UTF-8 at byte 19"),
    ],
)
def test_what_is_refused(data, problem):
    with pytest.raises(InvalidMessage, match=problem) as caught:
        read_headers_xml(data)
    assert "hush" not in str(caught.value)
