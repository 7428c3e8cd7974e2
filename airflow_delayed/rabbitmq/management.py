"""A small client of RabbitMQ's management API. Whoever calls it has to manage without: it may be off or not allowed."""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any
from urllib.parse import quote, unquote

import httpx
from pika import ConnectionParameters, PlainCredentials

from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.rabbitmq import facts
from airflow_delayed.rabbitmq.facts import Facts, PolicyFacts

#: The management API listens this far above AMQP, with RabbitMQ's default ports (5672 -> 15672, 5671 -> 15671).
PORT_OFFSET = 10_000
#: What the extra ``management_url`` says to do without.
NONE = "none"
#: Seconds to connect, and to wait for each answer.
_TIMEOUT = httpx.Timeout(5, connect=2)
_IN_THE_CLEAR = (
    "the extra management_url has http, and would send in the clear the login that AMQP sends over TLS; use https, or"
    " put a login of its own into management_url"
)
_QUEUE_COLUMNS = "name,type,durable,arguments,messages_ready,message_bytes_ready,messages_dlx,consumers"


class Management:
    """One virtual host over one management API. A context manager."""

    def __init__(self, client: httpx.Client, virtual_host: str) -> None:
        self._client = client
        self._vhost = quote(virtual_host, safe="")

    def __enter__(self) -> Management:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.close()

    @property
    def where(self) -> str:
        """Its address, without a login."""
        return str(self._client.base_url).rstrip("/")

    def version(self) -> str | None:
        """Return the broker's version, such as ``3.13.7``."""
        found = self._get("overview", columns="rabbitmq_version")
        return found.get("rabbitmq_version") if isinstance(found, dict) else None

    def survey(self, *, flags: bool = False) -> Facts:
        """Return what it tells; what it does not tell, also for want of a right, is None.

        :param flags: ask for the feature flags too, which administrators alone are told.
        """
        policies, operator = self._list("policies"), self._list("operator-policies")
        exchanges, bindings = self._list("exchanges"), self._list("bindings")
        features = self._get("feature-flags") if flags else None
        return Facts(
            why=f"the management API at {self.where} does not tell this user",
            queues=self.queues(),
            exchanges=None if exchanges is None else facts.exchanges(exchanges),
            bindings=None if bindings is None else facts.bindings(bindings),
            policies=None
            if policies is None or operator is None
            else facts.policies(policies, operator=False) + facts.policies(operator, operator=True),
            flags=None if features is None else {flag["name"]: flag["state"] for flag in features},
        )

    def queues(self) -> Mapping[str, facts.QueueFacts] | None:
        """Return the queues of the virtual host by name."""
        found = self._list("queues", columns=_QUEUE_COLUMNS)
        return None if found is None else facts.queues(found)

    def put_policy(self, policy: PolicyFacts) -> None:
        """Set a policy.

        :raises TransportUnavailable: it was not accepted; the text says what the user lacks.
        """
        body = {
            "pattern": policy.pattern,
            "apply-to": policy.apply_to,
            "priority": policy.priority,
            "definition": dict(policy.definition),
        }
        self._change("PUT", policy.name, body)

    def delete_policy(self, name: str) -> None:
        """Remove a policy.

        :raises TransportUnavailable: the API refused; the text says what the user lacks.
        """
        self._change("DELETE", name)

    def _change(self, method: str, name: str, body: Mapping[str, Any] | None = None) -> None:
        path = f"/api/policies/{self._vhost}/{quote(name, safe='')}"
        try:
            answer = self._client.request(method, path, json=body)
        except (httpx.HTTPError, OSError) as error:
            raise TransportUnavailable(f"the management API at {self.where} did not answer: {_cause(error)}") from error
        if answer.status_code in (401, 403):
            raise TransportUnavailable(
                f"the management API at {self.where} refused policy {name!r}; the user needs the tag policymaker"
            )
        if answer.is_error and not (method == "DELETE" and answer.status_code == 404):
            raise TransportUnavailable(
                f"the management API at {self.where} refused policy {name!r}: status {answer.status_code}"
            )

    def _list(self, what: str, **query: str) -> list[dict[str, Any]] | None:
        found = self._get(f"{what}/{self._vhost}", **query)
        return found if isinstance(found, list) else None

    def _get(self, path: str, **query: str) -> Any:
        try:
            answer = self._client.get(f"/api/{path}", params=query)
            return answer.json() if answer.is_success else None
        except (httpx.HTTPError, OSError, ValueError):
            return None


def reach(parameters: Sequence[ConnectionParameters], url: str | None = None) -> tuple[Management | None, str | None]:
    """Return the management API of a broker's first host that answers, or None and why there is none.

    :param parameters: of the broker's hosts, for AMQP; the login and the TLS context are theirs.
    :param url: ``http(s)://[user:password@]host[:port][/path]``; by default 10,000 ports above AMQP's, with https if
        that has TLS; ``none`` to do without. With http and AMQP over TLS it needs a login of its own, for that of AMQP
        is not sent in the clear.
    :raises ValueError: the url cannot be read.
    """
    if url and url.strip().lower() == NONE:
        return None, "the extra 'management_url' turns the management API off"
    why = "there is no host"
    for host in parameters[:1] if url else parameters:
        client, why = _client(host, url)
        if client is None:
            continue
        try:
            # the overview is what every user with one of the tags may read
            answer = client.get("/api/overview", params={"columns": "rabbitmq_version"})
            if answer.is_success and isinstance(answer.json(), dict):
                return Management(client, host.virtual_host), None
            why = _refusal(answer.status_code, str(client.base_url))
        except (httpx.HTTPError, OSError, ValueError) as error:
            why = f"no management API at {str(client.base_url).rstrip('/')}: {_cause(error)}"
        client.close()
    return None, why


def _client(host: ConnectionParameters, url: str | None) -> tuple[httpx.Client | None, str]:
    context = host.ssl_options.context if host.ssl_options else None
    login = host.credentials if isinstance(host.credentials, PlainCredentials) else None
    user, password = (login.username, login.password) if login else (None, None)
    if url:
        address = _parsed(url)
        if address.username:
            user, password = unquote(address.username), unquote(address.password)
        elif context and address.scheme == "http":
            return None, _IN_THE_CLEAR
        address = address.copy_with(userinfo=b"")
    else:
        port = host.port + PORT_OFFSET
        if port >= 65_536:
            return None, f"no management API is known: nothing can listen on port {port}; set the extra management_url"
        address = httpx.URL(scheme="https" if context else "http", host=host.host, port=port)
    if user is None or password is None:
        return None, "the management API needs a user and a password; put them into the extra management_url"
    verify: ssl.SSLContext | bool = False
    if address.scheme == "https":
        verify = context or ssl.create_default_context()
    # AMQP goes through no proxy either
    client = httpx.Client(
        base_url=address, auth=httpx.BasicAuth(user, password), verify=verify, timeout=_TIMEOUT, trust_env=False
    )
    return client, ""


def _parsed(url: str) -> httpx.URL:
    try:
        address = httpx.URL(url.strip())
    except (httpx.InvalidURL, ValueError):
        address = httpx.URL()
    if address.scheme not in ("http", "https") or not address.host:
        # it may hold a password, so it is not shown
        raise ValueError("the extra 'management_url' must be http(s)://host:port, or 'none'")
    return address


def _refusal(status: int, where: str) -> str:
    where = where.rstrip("/")
    if status in (401, 403):
        return (
            f"the management API at {where} refused the user; it needs the tag management, or a password that is right"
        )
    return f"what listens at {where} is no management API (status {status})"


def _cause(error: Exception) -> str:
    if isinstance(error, httpx.TimeoutException):
        return "no answer in time"
    if isinstance(error, httpx.ConnectError):
        return "it cannot be reached"
    return type(error).__name__
