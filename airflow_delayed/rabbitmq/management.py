"""A small client of RabbitMQ's management API, and the facts that it learns of a virtual host.

Its callers have to manage without it: the API may be off or not allowed. An API that is there and does not answer in
time is another case (:attr:`Facts.silent`): the API of each node waits for a node that hangs.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import httpx
from pika import ConnectionParameters, PlainCredentials
from pika.connection import Parameters

from airflow_delayed.errors import TransportUnavailable
from airflow_delayed.rabbitmq.connection import in_turn

#: The management API listens this far above AMQP, with RabbitMQ's default ports (5672 -> 15672, 5671 -> 15671).
PORT_OFFSET = 10_000
#: The value of the extra ``management_url`` that turns the API off.
NONE = "none"
#: Seconds to connect, and to wait for each answer.
_TIMEOUT = httpx.Timeout(5, connect=2)
#: Seconds for the first answer of each of several hosts: a frozen host accepts the connection and is silent.
_FIRST_ANSWER = httpx.Timeout(2)
_IN_THE_CLEAR = (
    "the extra management_url has http, and would send in the clear the login that AMQP sends over TLS; use https, or"
    " put a login of its own into management_url"
)
#: The type of exchange that the plugin rabbitmq_delayed_message_exchange adds.
PLUGIN_TYPE = "x-delayed-message"
_QUEUE_COLUMNS = "name,type,durable,arguments,messages_ready,message_bytes_ready,messages_dlx"
_STATE_COLUMNS = "state,node,leader,members,online"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFacts:
    """A queue as the management API lists it. A count is None if the broker has no statistics of it (yet).

    Statistics are up to 5 s old, and a queue that was just declared has none.
    """

    name: str
    type: str = "classic"
    durable: bool = True
    arguments: Mapping[str, Any] = field(default_factory=dict)
    ready: int | None = None
    ready_bytes: int | None = None
    #: Messages that at-least-once dead-lettering could not pass on; a passive declare does not count them.
    stuck: int | None = None
    #: ``running``, ``down``, ``minority`` (not in RabbitMQ 3.10), ...; None: no leader has sent statistics.
    state: str | None = None
    #: The node of a classic queue, or of a leader that has sent statistics.
    node: str | None = None
    #: Of a quorum queue or a stream: the node of its leader, the nodes of all members, and of its running members.
    leader: str | None = None
    members: tuple[str, ...] = ()
    online: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeFacts:
    """An exchange as the management API lists it."""

    name: str
    type: str
    durable: bool = True
    arguments: Mapping[str, Any] = field(default_factory=dict)
    #: Messages inside an exchange of the plugin rabbitmq_delayed_message_exchange; None for other exchanges.
    messages_delayed: int | None = None


class BindingFacts(NamedTuple):
    """A binding, of a queue or of an exchange."""

    source: str
    target: str
    is_queue: bool
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFacts:
    """A policy of the virtual host, or an operator policy."""

    name: str
    pattern: str
    apply_to: str = "all"
    priority: int = 0
    definition: Mapping[str, Any] = field(default_factory=dict)
    operator: bool = False

    def __str__(self) -> str:
        return f"{'operator policy' if self.operator else 'policy'} {self.name!r}"

    def matches(self, name: str, kind: str) -> bool:
        """Whether it may apply to something of this name and kind: ``exchanges``, ``quorum_queues``, ...

        RabbitMQ's patterns are PCRE; a pattern that Python cannot read counts as a match, so that a user looks at it.
        """
        if self.apply_to not in ("all", kind) and not (self.apply_to == "queues" and kind.endswith("_queues")):
            return False
        try:
            return re.search(self.pattern, name) is not None
        except re.error:
            return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a virtual host has; None for what could not be learnt, with the reason in ``why``."""

    why: str | None = None
    #: Whether the API is there, and did not list the queues in time. Then a node of the cluster hangs, or is cut off,
    #: and AMQP may count 0 messages in a queue that has some.
    silent: bool = False
    queues: Mapping[str, QueueFacts] | None = None
    exchanges: Mapping[str, ExchangeFacts] | None = None
    bindings: tuple[BindingFacts, ...] | None = None
    policies: tuple[PolicyFacts, ...] | None = None
    #: State of each feature flag; the API shows them to administrators alone.
    flags: Mapping[str, str] | None = None
    #: Whether each node of the cluster runs; the API shows the nodes to users with the tag ``monitoring``.
    nodes: Mapping[str, bool] | None = None

    def applied(self, name: str, kind: str) -> tuple[PolicyFacts, ...]:
        """Return the policies that apply to something: of each sort the one with the highest priority."""
        found: list[PolicyFacts] = []
        for operator in (False, True):
            matching = [p for p in self.policies or () if p.operator is operator and p.matches(name, kind)]
            found += sorted(matching, key=lambda policy: -policy.priority)[:1]
        return tuple(found)

    def setting(self, queue: QueueFacts, name: str) -> tuple[Any, str]:
        """Return a queue's setting in force, and its origin: an argument or a policy. Of two limits the smaller counts.

        :param name: as policies have it, such as ``max-length``.
        """
        found: list[tuple[Any, str]] = []
        if f"x-{name}" in queue.arguments:
            found.append((queue.arguments[f"x-{name}"], "an argument"))
        for policy in sorted(self.applied(queue.name, f"{queue.type}_queues"), key=lambda policy: not policy.operator):
            if name in policy.definition:
                found.append((policy.definition[name], str(policy)))
        if not found:
            return None, ""
        return min(found) if all(isinstance(value, int) for value, _ in found) else found[0]


class Management:
    """One virtual host over one management API. A context manager."""

    def __init__(self, client: httpx.Client, virtual_host: str) -> None:
        self._client = client
        self._vhost = quote(virtual_host, safe="")
        self._failure: str | None = None
        #: Whether it did not answer in time once; it is asked nothing more then.
        self._silent = False

    def __enter__(self) -> Management:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection to it."""
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
        """Return what the API shows; None for what it does not show, also for want of a right.

        :param flags: ask for the feature flags too, which it shows to administrators alone.
        """
        nodes = self.nodes()
        policies, operator = self._list("policies"), self._list("operator-policies")
        exchanges, bindings = self._list("exchanges"), self._list("bindings")
        features = self._get("feature-flags") if flags else None
        # last, since of all these the list of queues waits longest for a node that hangs
        known = self.list_queues()
        return replace(
            known,
            nodes=nodes,
            exchanges=None if exchanges is None else _exchanges(exchanges),
            bindings=None if bindings is None else _bindings(bindings),
            policies=None
            if policies is None or operator is None
            else _policies(policies, operator=False) + _policies(operator, operator=True),
            flags=None if features is None else {flag["name"]: flag["state"] for flag in features},
        )

    def list_queues(self) -> Facts:
        """Return the queues alone, and why there are none."""
        queues = self.queues()
        why = f"the management API at {self.where} {self._failure or 'does not tell this user'}"
        return Facts(why=why, silent=self._silent and queues is None, queues=queues)

    def queues(self) -> Mapping[str, QueueFacts] | None:
        """Return the queues of the virtual host by name."""
        found = self._list("queues", columns=f"{_QUEUE_COLUMNS},{_STATE_COLUMNS}")
        return None if found is None else _queues(found)

    def nodes(self) -> Mapping[str, bool] | None:
        """Return whether each node of the cluster runs."""
        found = self._get("nodes", columns="name,running")
        return {node["name"]: node.get("running", False) for node in found} if isinstance(found, list) else None

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

    def _list(self, kind: str, **query: str) -> list[dict[str, Any]] | None:
        found = self._get(f"{kind}/{self._vhost}", **query)
        return found if isinstance(found, list) else None

    def _get(self, path: str, **query: str) -> Any:
        if self._silent:
            return None
        try:
            answer = self._client.get(f"/api/{path}", params=query)
            self._silent = answer.is_server_error
            if self._silent:
                self._failure = f"did not answer all questions: status {answer.status_code}"
            return answer.json() if answer.is_success else None
        except (httpx.HTTPError, OSError, ValueError) as error:
            # it has answered before, so it is there
            self._silent = isinstance(error, httpx.TimeoutException)
            self._failure = f"did not answer all questions: {_cause(error)}"
            return None


def reach(parameters: Sequence[ConnectionParameters], url: str | None = None) -> tuple[Management | None, Facts]:
    """Return the management API of a broker's first host that answers, or None; and the facts without it.

    The host that answered last over AMQP is asked first, and the others together if it does not answer.

    :param parameters: of the broker's hosts, for AMQP; the login and the TLS context are theirs.
    :param url: ``http(s)://[user:password@]host[:port][/path]``; by default 10,000 ports above AMQP's, with https if
        that has TLS; ``none`` to do without. With http and AMQP over TLS it needs a login of its own, for that of AMQP
        is not sent in the clear.
    :raises ValueError: the url cannot be read.
    """
    if url and url.strip().lower() == NONE:
        return None, Facts(why="the extra 'management_url' turns the management API off")
    first, *others = parameters[:1] if url else in_turn(parameters)
    timeout = _FIRST_ANSWER if others else _TIMEOUT
    answers = [_ask(first, url, timeout)]
    if others and isinstance(answers[0], Facts):
        # side by side, for while a node hangs the others may not answer either
        with ThreadPoolExecutor(len(others)) as pool:
            answers += pool.map(lambda host: _ask(host, url, timeout), others)
    found = [answer for answer in answers if isinstance(answer, Management)]
    for another in found[1:]:
        another.close()
    absent = [answer for answer in answers if isinstance(answer, Facts)]
    if found:
        return found[0], Facts()
    return None, next((facts for facts in absent if facts.silent), absent[0])


def _ask(host: Parameters, url: str | None, timeout: httpx.Timeout) -> Management | Facts:
    """Return the management API of a host, or why there is none."""
    client, why = _client_for(host, url)
    if client is None:
        return Facts(why=why)
    where, silent = str(client.base_url).rstrip("/"), False
    try:
        # every user with one of the tags may read the overview
        answer = client.get("/api/overview", params={"columns": "rabbitmq_version"}, timeout=timeout)
        if answer.is_success and isinstance(answer.json(), dict):
            return Management(client, host.virtual_host)
        why = _refusal(answer.status_code, where)
    except (httpx.HTTPError, OSError, ValueError) as error:
        silent = isinstance(error, httpx.TimeoutException) and _listens(client.base_url)
        why = f"the management API at {where} {'gave' if silent else 'cannot be asked:'} {_cause(error)}"
    client.close()
    return Facts(why=why, silent=silent)


def _listens(address: httpx.URL) -> bool:
    """Whether a port takes connections: a firewall that drops packets does not, and a host that hangs does.

    httpx has one error for a connection that is not taken and for a TLS handshake without an answer.
    """
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        with socket.create_connection((address.host, port), timeout=_TIMEOUT.connect):
            return True
    except OSError:
        return False


def survey(management: Management | None, absent: Facts, *, flags: bool = False) -> Facts:
    """Return the facts that the management API shows.

    :param absent: the facts without it.
    """
    return management.survey(flags=flags) if management else absent


def list_queues(host: Parameters, url: str | None, seconds: float) -> Facts:
    """Return the queues that the management API of one host lists within some seconds; the url is that of reach."""
    if url and url.strip().lower() == NONE:
        return Facts()
    found = _ask(host, url, httpx.Timeout(seconds))
    if isinstance(found, Facts):
        return found
    with found as management:
        return management.list_queues()


def _client_for(host: Parameters, url: str | None) -> tuple[httpx.Client | None, str]:
    """Return a client of the management API of a host, or None and why there is none; the url is that of reach."""
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
        # the url may hold a password, so the error does not show it
        raise ValueError("the extra 'management_url' must be http(s)://host:port, or 'none'")
    return address


def _refusal(status: int, where: str) -> str:
    if status in (401, 403):
        return (
            f"the management API at {where} refused the user; it needs the tag management, or a password that is right"
        )
    return f"what listens at {where} is no management API (status {status})"


def _cause(error: Exception) -> str:
    if isinstance(error, httpx.TimeoutException):
        return "no answer in time; that is so while a node of its cluster hangs or is cut off"
    if isinstance(error, httpx.ConnectError):
        return "it cannot be reached"
    return type(error).__name__


def _queues(answer: Iterable[Mapping[str, Any]]) -> dict[str, QueueFacts]:
    """Read the management API's list of queues."""
    return {
        found["name"]: QueueFacts(
            name=found["name"],
            type=found.get("type", "classic"),
            durable=found.get("durable", True),
            arguments=found.get("arguments") or {},
            ready=found.get("messages_ready"),
            ready_bytes=found.get("message_bytes_ready"),
            stuck=found.get("messages_dlx"),
            state=found.get("state"),
            node=found.get("node"),
            leader=found.get("leader"),
            members=tuple(found.get("members") or ()),
            online=tuple(found.get("online") or ()),
        )
        for found in answer
    }


def _exchanges(answer: Iterable[Mapping[str, Any]]) -> dict[str, ExchangeFacts]:
    """Read the management API's list of exchanges."""
    return {
        found["name"]: ExchangeFacts(
            name=found["name"],
            type=found["type"],
            durable=found.get("durable", True),
            arguments=found.get("arguments") or {},
            messages_delayed=found.get("messages_delayed"),
        )
        for found in answer
    }


def _bindings(answer: Iterable[Mapping[str, Any]]) -> tuple[BindingFacts, ...]:
    """Read the management API's list of bindings, without those of the default exchange."""
    return tuple(
        BindingFacts(found["source"], found["destination"], found["destination_type"] == "queue", found["routing_key"])
        for found in answer
        if found["source"]
    )


def _policies(answer: Iterable[Mapping[str, Any]], *, operator: bool) -> tuple[PolicyFacts, ...]:
    """Read the management API's list of policies, or of operator policies."""
    return tuple(
        PolicyFacts(
            name=found["name"],
            pattern=found["pattern"],
            apply_to=found.get("apply-to", "all"),
            priority=found.get("priority", 0),
            definition=found.get("definition") or {},
            operator=operator,
        )
        for found in answer
    )
