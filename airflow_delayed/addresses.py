"""Addresses of files as logs, errors and lineage may show them: without logins, queries and fragments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import unquote

#: The words of names whose values are secrets; some are also written together with the word before, as in PGPASSWORD.
_SECRET = re.compile(
    r"[a-z]*(password|passwd|passphrase|passcode|pwd|secrets?|credentials?|signature)"
    r"|(db|pg|my|sql|user|admin|root|login|ftp|smtp|proxy|key|trust)?pass"
    r"|(access|api|auth|bearer|client|csrf|id|refresh|sas|security|session|user)?tokens?"
    r"|(access|account|api|client|encryption|master|private|secret|shared|storage)?keys?"
    r"|authorization|bearer|jwt|hmac|sig|sas|dsn|jaas|conn(ection)?str(ing)?|j?sess(ion)?id|phpsessid"
)
#: The words of names whose values are secrets where they come last: authType and cookiePolicy are none.
_SECRET_AT_END = re.compile(r"[a-z]*auth|cookies?|assertion|pw")
#: Two words that are one.
_CONNECTION_STRING = re.compile(r"conn(ection)?[^a-z]*str(ing)?$", re.IGNORECASE)
#: Names of parts of a path, and long parts that no person would write, which may be tokens: of hexadecimal digits, of
#: letters of both cases and digits, and JSON Web Tokens. An id with hyphens (a UUID) is none.
_TOKEN_IN_PATH = re.compile(
    r"[0-9a-f]{32,}|[0-9A-F]{32,}|(?=.*[0-9])(?=.*[A-Z])(?=.*[a-z])[A-Za-z0-9_:~-]{20,}|eyJ[\w-]+(\.[\w-]*){1,4}"
)
#: A name with one of these ends describes a secret, such as its place or kind, or has another kind of key.
_HARMLESS = {
    *("file", "path", "location", "provider", "type", "class", "name"),
    *("column", "columns", "field", "fields", "serializer", "deserializer"),
}
_LOGIN_OF_ORACLE = re.compile("jdbc:[^@]*:[^/@:]*/([^@]+)@")
#: Between the addresses that fsspec chains, as in ``simplecache::https://...``.
_CHAIN = re.compile(r"::(?=[A-Za-z][A-Za-z0-9+.-]*:)")
#: Schemes where a user without a password may be a token. Elsewhere it names an Airflow connection.
_TOKENS = ("http", "https", "ftp", "ftps", "git", "webdav", "webdavs")
#: Schemes where a container stands in the place of the user.
_CONTAINERS = ("abfs", "abfss", "wasb", "wasbs")


class UrlParts(NamedTuple):
    """The parts of one address; ``user`` is everything before the host, ``query`` everything after the path."""

    scheme: str
    user: str
    host: str
    path: str
    query: str

    @property
    def shown_path(self) -> str:
        """The path without parameters (``;jsessionid=...``), and with ``***`` in the place of what may be a token.

        Only where a server makes up the paths, as with HTTP: keys and files of other schemes are shown as they are.
        """
        if self.scheme.lower() not in _TOKENS:
            return self.path
        hidden = {*_tokens(self.path)}
        parts = (part.partition(";")[0] for part in self.path.split("/"))
        return "/".join("***" if part in hidden else part for part in parts)


def shown(url: str) -> str:
    """Return a path or URL as logs and errors may show it. A path without a scheme is shown as it is."""
    return "::".join(_shown(one) for one in _CHAIN.split(url))


def parse(url: str) -> UrlParts | None:
    """Return the parts of an address, or None of a path. A password may have a slash, an @ or a question mark."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return None
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    before = authority.partition("@")[0]
    # after a colon is a port, or a password that may go on: up to the last @ that there is
    end = rest.rfind("@") if ":" in before else authority.rfind("@")
    user, rest = rest[: max(end, 0)], rest[end + 1 :]
    if user and scheme.lower() in _CONTAINERS and ":" not in user:
        user, rest = "", f"{user}@{rest}"
    cut = re.search(r"[?#;]" if scheme.startswith("jdbc:") else r"[?#]", rest)
    rest, query = (rest[: cut.start()], rest[cut.end() :]) if cut else (rest, "")
    host, slash, path = rest.partition("/")
    return UrlParts(scheme, user, host, slash + path, query)


def secrets_of(url: str) -> list[str]:
    """Return the secrets in a path or URL: a password, a token, and values of a query with the names of secrets.

    In the path of an HTTP URL these are the values of parameters with such names, and parts that may be tokens.

    The name of an Airflow connection, as in ``s3://conn_id@bucket``, is no secret.
    """
    return [secret for one in _CHAIN.split(url) for secret in _secrets(one) if secret]


def is_secret(name: str) -> bool:
    """Return whether an option or a parameter of this name has a secret as its value, as far as names go."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    if not words or words[-1].lower() in _HARMLESS:
        return False
    if _SECRET_AT_END.fullmatch(words[-1].lower()) or _CONNECTION_STRING.search(name):
        return True
    return any(_SECRET.fullmatch(word.lower()) for word in words)


def without_secrets(text: str, url: str) -> str:
    """Return the text of another library's error without the secrets of an address in it."""
    text = text.replace(url, shown(url))
    for secret in sorted(secrets_of(url), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def _shown(url: str) -> str:
    address = parse(url)
    if address is None:
        return "jdbc:***" if url.startswith("jdbc:") else url
    return f"{address.scheme}://{address.host}{address.shown_path}"


def _tokens(path: str) -> Iterator[str]:
    """Yield the parts of a path that may be tokens: by their form, or because the part before has a secret's name."""
    before = ""
    for part in path.split("/"):
        name = part.partition(";")[0]
        if name and (_TOKEN_IN_PATH.fullmatch(unquote(name)) or (is_secret(before) and "." not in name)):
            yield name
        before = name


def _secrets(url: str) -> Iterator[str]:
    address = parse(url)
    if address is None:
        yield from _LOGIN_OF_ORACLE.findall(url)
        return
    user, colon, password = address.user.partition(":")
    found = [password if colon else user if address.scheme.lower() in _TOKENS else ""]
    parameters = address.query
    if address.scheme.lower() in _TOKENS:
        found += _tokens(address.path)
        parameters = ";".join([parameters, *re.findall(";([^/]*)", address.path)])
    for part in re.split("[&;#]", parameters):
        name, _, value = part.partition("=")
        if is_secret(name):
            found.append(value)
    for secret in found:
        yield from dict.fromkeys((secret, unquote(secret)))
