"""Connections to RabbitMQ: pika's parameters, the order of the hosts, the login, and errors in plain words.

An Airflow connection has fields for host, port, login, password and virtual host. All other settings are in its extra,
under the names of RabbitMQ's own URIs (rabbitmq.com/docs/uri-query-parameters), since Airflow makes a URI's query the
extra.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import re
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pika import BlockingConnection, ConnectionParameters, PlainCredentials, SSLOptions, exceptions
from pika.adapters.utils.connection_workflow import AMQPConnectorException, AMQPConnectorStackTimeout
from pika.credentials import ExternalCredentials

from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.rabbitmq.wire import DecodingSelectConnection

if TYPE_CHECKING:
    from pika.connection import Parameters

log = logging.getLogger(__name__)
#: Seconds to connect to a host and log in, unless the extra ``connection_timeout`` says otherwise: of one host, and of
#: each of several. The kernel of a host whose broker is frozen still accepts connections, so only the time tells.
CONNECTION_TIMEOUT, CONNECTION_TIMEOUT_OF_SEVERAL = 15.0, 5.0
#: Seconds that a broker may block the connection, unless the extra ``blocked_timeout`` says otherwise.
BLOCKED_TIMEOUT = 300.0
#: Seconds that a send may be without a confirm, unless the extra ``confirm_timeout`` says otherwise.
CONFIRM_TIMEOUT = 60.0
#: Extras that need TLS; without it they are refused, since the user who sets them relies on it.
_TLS_EXTRAS = ("cacertfile", "certfile", "keyfile", "verify", "server_name_indication")
#: All extras of a connection.
EXTRAS = (
    *("ssl", *_TLS_EXTRAS, "auth_mechanism", "heartbeat", "connection_timeout", "blocked_timeout", "confirm_timeout"),
    *("management_url", "topology", "routing"),
)
#: A name that speaks of security, in any case and with any separators. Whoever sets such an extra relies on it.
_SECURITY = re.compile(
    r"ssl|tls|cert|^ca([_-]|file|path|$)|verif|key-?_?file|cipher|secur|^sni$|server_?name|auth_?mech", re.IGNORECASE
)


class BrokerParameters(ConnectionParameters):
    """pika's parameters, and what pika has no parameter for."""

    #: Seconds that a send may be without a confirm.
    confirm_timeout = CONFIRM_TIMEOUT
    #: The management API's address, as :func:`airflow_delayed.rabbitmq.management.reach` has it.
    management_url: str | None = None


def confirm_timeout(host: Parameters) -> float:
    """Return the seconds that a send may be without a confirm; also of pika's own parameters."""
    return host.confirm_timeout if isinstance(host, BrokerParameters) else CONFIRM_TIMEOUT


def parameters(
    conn_id: str,
    *,
    conn_type: str | None = None,
    host: str | None = None,
    port: int | None = None,
    login: str | None = None,
    password: str | None = None,
    schema: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> list[BrokerParameters]:
    """Return what pika needs to connect, for each host, in the order of the host field.

    :param conn_id: names the connection in errors and to the broker.
    :param conn_type: ``amqps`` turns TLS on, as the extra ``ssl`` does.
    :param host: one or several, separated by commas, each with a port of its own or without:
        ``rabbit1,rabbit2:5673,[::1]:5672``; none means localhost.
    :param port: of the hosts without one; none means 5672, with TLS 5671.
    :param schema: the virtual host as it is, not encoded; none means ``/``.
    :param extra: ``ssl``, ``cacertfile``, ``certfile``, ``keyfile``, ``verify``, ``server_name_indication``,
        ``auth_mechanism``, ``heartbeat`` (seconds), ``connection_timeout`` (milliseconds), ``blocked_timeout``
        and ``confirm_timeout`` (seconds); text, as a URI has it, or JSON's own types. An empty value is no value.
    :raises ValueError: a field cannot be read; it is named, its value is not shown.
    :raises TransportUnavailable: a certificate file cannot be read; it is named.
    """
    extras = _Extras(conn_id, extra)
    extras.check_names()
    context = ssl_context(conn_id, conn_type=conn_type, extra=extra)
    # a float as pika has it, and the same for each step before the login
    timeout = extras.number("connection_timeout", "a whole number of milliseconds, 1 or more", 1, whole=True)
    addresses = hosts(conn_id, host)
    timeout = timeout / 1000 if timeout else CONNECTION_TIMEOUT_OF_SEVERAL if addresses[1:] else CONNECTION_TIMEOUT
    heartbeat = extras.number("heartbeat", "a whole number of seconds from 0 to 65535", 0, 65_535, whole=True)
    blocked = extras.number("blocked_timeout", "a number of seconds, more than 0", math.ulp(0.0))
    confirm = extras.number("confirm_timeout", "a number of seconds, more than 0", math.ulp(0.0))
    credentials: PlainCredentials | ExternalCredentials
    if extras.one_of("auth_mechanism", "plain", "external") == "external":
        if context is None or not extras.text("certfile"):
            raise extras.error("auth_mechanism", "can be external only with TLS and a client's certfile")
        credentials = ExternalCredentials()
    else:
        credentials = PlainCredentials(login or "guest", password or "guest", erase_on_connect=False)
    name = extras.text("server_name_indication")
    found = [
        BrokerParameters(
            host=one,
            port=own_port or port or (5671 if context else 5672),
            virtual_host=schema or "/",
            credentials=credentials,
            ssl_options=SSLOptions(context, name or one) if context else None,
            heartbeat=None if heartbeat is None else int(heartbeat),
            socket_timeout=timeout,
            stack_timeout=timeout,
            blocked_connection_timeout=blocked or BLOCKED_TIMEOUT,
            client_properties={"connection_name": f"airflow-delayed {conn_id}"},
        )
        for one, own_port in addresses
    ]
    for each in found:
        each.confirm_timeout = confirm or CONFIRM_TIMEOUT
        each.management_url = extras.text("management_url")
    return found


def hosts(conn_id: str, host: str | None) -> list[tuple[str, int | None]]:
    """Return each host of a connection's field and its own port, if it has one.

    :raises ValueError: one cannot be read.
    """
    if not host or not host.strip():
        return [("localhost", None)]
    found = [_host(part.strip()) for part in host.split(",")]
    if None in found:
        raise ValueError(
            f"connection {conn_id!r}: host must be a name or an address, or several separated by commas, each with"
            " or without a port (rabbit1,rabbit2:5673,[::1]:5672); user and password have fields of their own"
        )
    return [each for each in found if each is not None]


def _host(part: str) -> tuple[str, int | None] | None:
    name, port = part, None
    if part.startswith("["):
        name, bracket, rest = part[1:].partition("]")
        if not bracket or rest[:1] not in ("", ":") or ":" not in name:
            return None
        port = rest[1:] if rest else None
    elif part.count(":") == 1:
        name, _, port = part.partition(":")
    if ":" in name:
        # Airflow takes the brackets off the address in a URI
        try:
            ipaddress.IPv6Address(name)
        except ValueError:
            return None
    if not name or any(character.isspace() or character in "/@?#" for character in name):
        return None
    if port is None:
        return name, None
    return (name, int(port)) if port.isascii() and port.isdigit() and 0 < int(port) < 65_536 else None


def ssl_context(
    conn_id: str, *, conn_type: str | None = None, extra: Mapping[str, Any] | None = None
) -> ssl.SSLContext | None:
    """Return the TLS context: how to verify the broker, and the client's certificate; None without TLS.

    The broker's certificate is verified by ``cacertfile``, or by the system's authorities. The management API of the
    same broker is called with this context too.

    :raises ValueError: an extra cannot be read.
    :raises TransportUnavailable: a certificate file cannot be read.
    """
    extras = _Extras(conn_id, extra)
    if not (extras.flag("ssl") or conn_type == "amqps"):
        for name in _TLS_EXTRAS:
            if extras.text(name):
                raise extras.error(name, "needs TLS: set the extra ssl to true, or use the connection type amqps")
        return None
    verify = extras.one_of("verify", "verify_peer", "verify_none")
    authorities, certificate, key = (extras.text(name) for name in ("cacertfile", "certfile", "keyfile"))
    if key and not certificate:
        raise extras.error("keyfile", "needs the certfile that it belongs to")
    for name in ("cacertfile", "certfile", "keyfile"):
        extras.check_file(name)
    try:
        context = ssl.create_default_context(cafile=authorities)
    except ssl.SSLError as error:
        raise extras.unreadable("cacertfile", "it has no certificate in PEM format") from error
    if certificate:
        try:
            # an empty passphrase: without one, OpenSSL would ask for it on the terminal, and wait
            context.load_cert_chain(certificate, key, password="")
        except (ssl.SSLError, ValueError) as error:
            why = "certificate and private key have to belong together, in PEM format, the key without a passphrase"
            raise extras.unreadable("certfile", f"with {f'keyfile {key!r}' if key else 'no keyfile'}: {why}") from error
    if verify == "verify_none":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


@cache
def _warn_of_extra(conn_id: str, name: str) -> None:
    # once a process: a connection's extras are read again for each send
    nearest = get_close_matches(name.lower(), EXTRAS, 1)
    advice = f"did you mean {nearest[0]!r}?" if nearest else f"those of this package are {', '.join(EXTRAS)}"
    log.warning("connection %r: the extra %r is unknown and ignored; %s", conn_id, name, advice)


class _Extras:
    """Reads the values of extras, which are text if they come from a URI or a form."""

    def __init__(self, conn_id: str, extra: Mapping[str, Any] | None) -> None:
        self._conn_id = conn_id
        self._extra = extra or {}

    def error(self, name: str, rule: str) -> ValueError:
        return ValueError(f"connection {self._conn_id!r}: the extra {name!r} {rule}")

    def unreadable(self, name: str, why: str) -> TransportUnavailable:
        return TransportUnavailable(
            f"connection {self._conn_id!r}: {name} {self.text(name)!r} cannot be used: {why}. It has to lie on every"
            " machine that sends, readable for Airflow's user"
        )

    def check_names(self) -> None:
        """Refuse an unknown extra that speaks of security; warn of any other, which may be another provider's."""
        for name in self._extra.keys() - EXTRAS:
            if self._extra[name] is None or self._extra[name] == "":
                continue
            if _SECURITY.search(name):
                raise self.error(
                    name,
                    "is unknown, and would not protect the connection. TLS is the extra ssl (true), or the connection"
                    f" type amqps; it is set by {', '.join(_TLS_EXTRAS)} and auth_mechanism, in lower case",
                )
            _warn_of_extra(self._conn_id, name)

    def text(self, name: str) -> str | None:
        value = self._extra.get(name)
        if value is None or value == "":
            return None
        if not isinstance(value, str):
            raise self.error(name, "must be text")
        return value

    def check_file(self, name: str) -> None:
        path = self.text(name)
        if path:
            try:
                Path(path).read_bytes()
            except (OSError, ValueError) as error:
                raise self.unreadable(name, getattr(error, "strerror", None) or "not a path") from error

    def flag(self, name: str) -> bool:
        value = str(self._extra.get(name, "")).strip().lower()
        if value in ("true", "1", "yes", "on"):
            return True
        if value in ("false", "0", "no", "off", "", "none"):
            return False
        raise self.error(name, "must be true or false")

    def one_of(self, name: str, default: str, *others: str) -> str:
        value = (self.text(name) or default).strip().lower()
        if value not in (default, *others):
            raise self.error(name, f"must be {' or '.join((default, *others))}; without it, it is {default}")
        return value

    def number(
        self, name: str, rule: str, least: float, most: float = math.inf, *, whole: bool = False
    ) -> float | None:
        value = self._extra.get(name)
        if value is None or value == "":
            return None
        kind: Callable[[Any], float] = int if whole else float
        try:
            # JSON may have a whole number as 30.0; true is refused, which Python takes for 1
            found = kind(value) if isinstance(value, str) else float(value)
            readable = not isinstance(value, bool) and math.isfinite(found) and (not whole or found == int(found))
        except (TypeError, ValueError, OverflowError):
            readable, found = False, 0.0
        if not readable or not least <= found <= most:
            raise self.error(name, f"must be {rule}")
        return found


Host = TypeVar("Host", bound="Parameters")

#: For each list of hosts the index of the host to try first: the one after the host that failed last. Hooks and sends
#: with the same hosts share it, so a frozen host costs its timeout once, and not once a call.
_first: dict[tuple[str, ...], int] = {}


def host_name(host: Parameters) -> str:
    """Return a host and its port, as errors name them."""
    return f"[{host.host}]:{host.port}" if ":" in host.host else f"{host.host}:{host.port}"


def in_turn(hosts: Sequence[Host]) -> list[Host]:
    """Return hosts in the order in which to try them: first the host that answered last, then the next ones.

    This process remembers which host that was.
    """
    first = _first.get(_names(hosts), 0)
    return [*hosts[first:], *hosts[:first]]


def failed(hosts: Sequence[Host], host: Host) -> None:
    """Remember that a host did not answer, or lost the connection: from now on the next one is tried first.

    :param hosts: all hosts of the connection, as its field has them.
    """
    names = _names(hosts)
    _first[names] = (names.index(host_name(host)) + 1) % len(names)


def _names(hosts: Sequence[Parameters]) -> tuple[str, ...]:
    return tuple(map(host_name, hosts))


class HostFailover:
    """Chooses the next host after a failure, and the wait before it.

    :param waits: seconds to wait after each round in which every host failed; a success starts them over.
    """

    def __init__(self, hosts: Sequence[Parameters], waits: Sequence[float]) -> None:
        self._all = hosts
        self._hosts = in_turn(hosts)
        self._waits = waits
        self._next = 0
        self._failures: list[str] = []
        self._unopened = 0

    @property
    def host(self) -> Parameters:
        """The host to connect to."""
        return self._hosts[self._next]

    @property
    def tries(self) -> int:
        """How many reconnects were tried since the last success."""
        return max(0, len(self._failures) - 1)

    @property
    def none_opened(self) -> bool:
        """Whether no host of the last round opened a connection: it did not answer, or refused the login."""
        return self._unopened >= len(self._hosts)

    def succeeded(self) -> None:
        """Note that this host confirmed messages, whatever happened to its connection then."""
        self._failures.clear()

    def failed(self, why: str, *, opened: bool) -> None:
        """Note why this host's connection failed, and go on to the next host."""
        self._failures.append(f"{host_name(self.host)}: {why}")
        failed(self._all, self.host)
        self._unopened = 0 if opened else self._unopened + 1
        self._next = (self._next + 1) % len(self._hosts)

    def wait(self) -> float | None:
        """Return the seconds to wait before the next host; None to give up."""
        rounds, more = divmod(len(self._failures), len(self._hosts))
        if more:
            return 0
        return self._waits[rounds - 1] if rounds <= len(self._waits) else None

    def __str__(self) -> str:
        """Each host of the last round and its problem."""
        return "; ".join(self._failures[-len(self._hosts) :])


#: Seconds that a host has for the login when a connection is tested; the test ends in any case after so many times that
#: (a name may stand for several addresses, and to resolve it takes time too).
_TEST_SECONDS = 5.0
_TEST_LIMIT = 1.6
#: Errors of opening a connection. That of a host which accepts it and never answers is no AMQPError.
_ERRORS = (exceptions.AMQPError, AMQPConnectorException, OSError)
#: The connection inside of a blocking one. Only a private argument sets it, whose type in pika's stubs is wrong.
_INNER: Any = DecodingSelectConnection


def connect(conn_id: str, hosts: Sequence[ConnectionParameters]) -> BlockingConnection:
    """Log in at the first host that accepts the login; the host that answered last is tried first.

    :raises TransportUnavailable: no host does; the error names each with its cause.
    """
    causes = []
    for host in in_turn(hosts):
        try:
            return BlockingConnection(host, _impl_class=_INNER)
        except _ERRORS as error:
            failed(hosts, host)
            causes.append(f"{host_name(host)}: {describe_error(error, host)}")
            last = error
    raise TransportUnavailable(f"connection {conn_id!r}: {'; '.join(causes)}") from last


def server_version(connection: BlockingConnection) -> str | None:
    """Return the broker's version, such as ``3.13.7``, from its AMQP greeting; None if it has none."""
    # the connection inside of pika's blocking one has the greeting, and pika does not expose it
    greeting = getattr(vars(connection).get("_impl"), "server_properties", None) or {}
    version = greeting.get("version")
    return (version.decode() if isinstance(version, bytes) else version) or None


def login_problems(hosts: Sequence[Parameters], *, seconds: float = _TEST_SECONDS) -> list[str | None]:
    """Log in at all hosts at once; return for each its problem, or None. Takes a few seconds at most.

    :param seconds: that each host has for the login.
    """

    def cause(host: Parameters) -> str | None:
        host = copy(host)
        host.socket_timeout = host.stack_timeout = seconds
        try:
            with muted_pika():
                BlockingConnection(host).close()
        except _ERRORS as error:
            return describe_error(error, host)
        return None

    # a thread may hang in the system's resolver; nothing waits for it
    pool = ThreadPoolExecutor(len(hosts))
    tests = [pool.submit(cause, host) for host in hosts]
    wait(tests, timeout=seconds * _TEST_LIMIT)
    pool.shutdown(wait=False)
    return [each.result() if each.done() else describe_error(TimeoutError()) for each in tests]


def describe_error(error: BaseException, host: Parameters | None = None) -> str:
    """Describe why a connection could not be opened, or ended, and what to check. The text has no secret.

    pika wraps the cause in several errors; this looks at the innermost ones first.

    :param host: the host of the connection; some causes can be described better with it.
    """
    known: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], str], ...] = (
        (socket.gaierror, "the host's name cannot be resolved"),
        (ConnectionRefusedError, "nothing listens on that host and port"),
        # with pika's errors for a login that takes too long, once the socket is connected
        ((TimeoutError, AMQPConnectorStackTimeout, exceptions.ConnectionOpenAborted), _NO_ANSWER),
        (ConnectionResetError, "the connection was cut; check the port, and whether it wants ssl"),
        ((exceptions.ProbableAuthenticationError, exceptions.AuthenticationError), _login_refused(host)),
        (
            exceptions.ProbableAccessDeniedError,
            "the virtual host (the connection's schema) does not exist, or the user has no rights in it",
        ),
        (exceptions.IncompatibleProtocolError, _no_amqp(host)),
        (exceptions.AMQPHeartbeatTimeout, "the broker sent no heartbeat"),
        (
            exceptions.ConnectionBlockedTimeout,
            "the broker blocked the connection for too long; it is short of memory or disk",
        ),
        (exceptions.StreamLostError, "the connection was lost"),
    )
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, ssl.SSLError):
            return _tls(cause)
        if isinstance(cause, exceptions.ConnectionClosed):
            return _closed_by_broker(cause.reply_code, cause.reply_text, host)
        for kind, text in known:
            if isinstance(cause, kind):
                return _LIMIT_REACHED if _LIMIT.search(repr(cause)) else text
    last = causes[-1]
    return str(last) or type(last).__name__


_NO_ANSWER = "no answer in time; check host, port and firewall"
#: RabbitMQ's words for a virtual host or a user that has as many connections as it may have.
_LIMIT = re.compile(r"connection limit \(\d+\) is reached")
_LIMIT_REACHED = (
    "the virtual host or the user has as many connections as it may have: raise its limit max-connections, or close"
    " connections of others"
)
_CLIENT_CERTIFICATE = (
    "it may demand a client certificate, by an authority that it knows (certfile, keyfile); check the port too"
)
#: X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH of OpenSSL.
_OTHER_NAME = (62, 64)


def _tls(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _OTHER_NAME:
            return (
                "the broker's TLS certificate is for another host; use a name that it is for, as the host or as"
                " server_name_indication"
            )
        return (
            f"the broker's TLS certificate is not trusted ({error.verify_message}); cacertfile has to have the"
            " authority that signed it"
        )
    if "ALERT" in (error.reason or ""):
        return f"the broker refused the TLS handshake ({error.reason}); {_CLIENT_CERTIFICATE}"
    return "the TLS handshake failed; check the port (usually 5671 with ssl, 5672 without)"


def _no_amqp(host: Parameters | None) -> str:
    if host is not None and host.ssl_options is not None:
        # with TLS 1.3 a client learns only after the handshake that its certificate is refused
        return f"the broker cut the connection right after the TLS handshake; {_CLIENT_CERTIFICATE}"
    return "it hangs, or what listens there does not speak AMQP 0-9-1; check the port, and whether it wants ssl"


def _login_refused(host: Parameters | None) -> str:
    if host is not None and getattr(host.credentials, "TYPE", None) == "EXTERNAL":
        return (
            "login by certificate refused; the broker needs a user of the certificate's name, and the mechanism"
            " EXTERNAL (plugin rabbitmq_auth_mechanism_ssl)"
        )
    return "login refused; check user and password (RabbitMQ lets the user 'guest' in from localhost only)"


def _closed_by_broker(code: int, text: str, host: Parameters | None) -> str:
    if code == 403:
        return _login_refused(host)
    if code == 530:
        return f"the virtual host (the connection's schema) cannot be used: {text}"
    if code == 541:
        return f"the broker could not do it ({text}). Has it lost its quorum? 'airflow delayed doctor' shows it"
    return f"the broker closed the connection: {code} {text}"


def _causes(error: object, depth: int = 0) -> Iterator[BaseException]:
    """Yield the errors that an error wraps, the innermost first, then the error itself."""
    if not isinstance(error, BaseException) or depth > 8:
        return
    for inner in (*getattr(error, "exceptions", ())[-1:], getattr(error, "exception", None), *error.args):
        yield from _causes(inner, depth + 1)
    yield error


_muted: ContextVar[bool] = ContextVar("airflow_delayed_rabbitmq_muted", default=False)


@contextmanager
def muted_pika() -> Iterator[None]:
    """Keep pika's own log lines out of a task's log, in this thread, unless the logger ``pika`` has a level.

    pika logs some ten lines for each connection, a warning for each refusal, which is how the broker answers the
    questions of this package, and a stack trace for each host that does not answer; the errors of this package describe
    all of that. To see them, give the logger a level: ``logging.getLogger("pika").setLevel("INFO")``.
    """
    for name in list(logging.root.manager.loggerDict):
        # a child logger does not inherit a filter; to add one twice has no effect
        if name.startswith("pika."):
            logging.getLogger(name).addFilter(_wanted)
    token = _muted.set(True)
    try:
        yield
    finally:
        _muted.reset(token)


def _wanted(_: logging.LogRecord) -> bool:
    return not _muted.get() or logging.getLogger("pika").level != logging.NOTSET
