"""Why a connection to RabbitMQ failed, in plain words."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pika.connection import Parameters


def explain(error: BaseException, host: Parameters | None = None) -> str:
    """Say what kept a connection from being opened, or ended it, and what to look at.

    pika wraps the cause several times over; it is found among the wrapped ones. Names no secret.

    :param host: what was connected to, which tells more about some causes.
    """
    from pika import exceptions
    from pika.adapters.utils.connection_workflow import AMQPConnectorStackTimeout

    known: tuple[tuple[type[BaseException], str], ...] = (
        (socket.gaierror, "the host's name cannot be resolved"),
        (ConnectionRefusedError, "nothing listens on that host and port"),
        (TimeoutError, _NO_ANSWER),
        # how pika ends what takes too long, after the connection itself
        (AMQPConnectorStackTimeout, _NO_ANSWER),
        (exceptions.ConnectionOpenAborted, _NO_ANSWER),
        (ConnectionResetError, "the connection was cut; check the port, and whether it wants ssl"),
        (exceptions.ProbableAuthenticationError, _login_refused(host)),
        (exceptions.AuthenticationError, _login_refused(host)),
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
            return _closed(cause.reply_code, cause.reply_text, host)
        for kind, text in known:
            if isinstance(cause, kind):
                return text
    last = causes[-1]
    return str(last) or type(last).__name__


_NO_ANSWER = "no answer in time; check host, port and firewall"
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
        # with TLS 1.3 a client learns only after the handshake that its certificate does not do
        return f"the broker cut the connection right after the TLS handshake; {_CLIENT_CERTIFICATE}"
    return "what listens there does not speak AMQP 0-9-1; check the port, and whether it wants ssl"


def _login_refused(host: Parameters | None) -> str:
    if host is not None and getattr(host.credentials, "TYPE", None) == "EXTERNAL":
        return (
            "login by certificate refused; the broker needs a user of the certificate's name, and the mechanism"
            " EXTERNAL (plugin rabbitmq_auth_mechanism_ssl)"
        )
    return "login refused; check user and password (RabbitMQ lets the user 'guest' in from localhost only)"


def _closed(code: int, text: str, host: Parameters | None) -> str:
    if code == 403:
        return _login_refused(host)
    if code == 530:
        return f"the virtual host (the connection's schema) cannot be used: {text}"
    return f"the broker closed the connection: {code} {text}"


def _causes(error: object, depth: int = 0) -> Iterator[BaseException]:
    """Yield what an error wraps, the innermost first, then the error."""
    if not isinstance(error, BaseException) or depth > 8:
        return
    for inner in (*getattr(error, "exceptions", ())[-1:], getattr(error, "exception", None), *error.args):
        yield from _causes(inner, depth + 1)
    yield error
