"""Reports of transports: findings about a topology, counts of messages, and how far a send has come.

The errors carry these reports, so this module imports nothing of the package.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from datetime import datetime
from enum import Enum
from itertools import islice
from operator import attrgetter
from typing import Any, ClassVar, Protocol, TypeVar


class Countable(Protocol):
    """A message, as far as reports count it."""

    @property
    def destination(self) -> str:
        """The queue that receives it."""
        ...

    @property
    def due_at(self) -> datetime:
        """When it is delivered."""
        ...


class State(str, Enum):
    """The state of one part of a topology: found, planned or changed."""

    OK = "ok"
    PLANNED = "would create"
    CREATED = "created"
    MISSING = "missing"
    DIFFERS = "differs"
    WOULD_REPAIR = "would repair"
    REPAIRED = "repaired"
    WOULD_DELETE = "would delete"
    DELETED = "deleted"
    #: It exists, and messages cannot pass for the time being; ``found`` is the reason.
    BLOCKED = "blocked"
    #: Messages are delivered, with a condition that a user should know: ``found``.
    WARNING = "warning"
    #: It could not be examined; ``found`` is the reason.
    UNKNOWN = "unknown"


#: How many parts or destinations a report names in its text; of more it has the number.
MOST_PARTS = 8
#: How many destinations an asset event or a manifest names; the others are counted.
MOST_DESTINATIONS = 100

_UNREADY = (State.MISSING, State.DIFFERS)
_SEVERITIES = {
    **dict.fromkeys((*_UNREADY, State.BLOCKED), "error"),
    State.WARNING: "warning",
    State.UNKNOWN: "unknown",
}
#: The severities of findings, the gravest first: what is unknown may be an error.
SEVERITIES = ("error", "unknown", "warning", "ok")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What is true of one part that messages need: a queue, an exchange, a table, a node, a dispatcher."""

    state: State
    #: The part, such as ``queue orders``.
    resource: str
    #: One setting of the part.
    argument: str | None = None
    wanted: object = None
    found: object = None
    #: The destination whose messages cannot be delivered because of it.
    destination: str | None = None
    #: A short name of this kind of finding that stays the same, such as ``destination-full``.
    code: str | None = None
    #: What happens because of it.
    why: str | None = None
    #: What a repair does to messages that are there already; None: there is no repair.
    repair: str | None = None
    #: What to do, with the command or the parameter.
    remedy: str | None = None
    #: The connection that delivers the messages that it keeps.
    deliver_conn_id: str | None = None
    #: Since when it is so.
    since: datetime | None = None

    @property
    def severity(self) -> str:
        """``error`` (messages cannot be delivered, or at a wrong time), ``warning``, ``unknown`` or ``ok``."""
        return _SEVERITIES.get(self.state, "ok")

    @property
    def where(self) -> str:
        """The part, and the setting of it."""
        return f"{self.resource} {self.argument}" if self.argument else self.resource

    @property
    def what(self) -> str:
        """The condition, and what happens because of it."""
        if self.state in (State.DIFFERS, State.WOULD_REPAIR, State.REPAIRED):
            done = "" if self.state is State.DIFFERS else f"{self.state.value}, "
            text = f"{done}wanted {self.wanted!r}, found {self.found!r}"
        elif self.state in (State.WARNING, State.BLOCKED):
            text = str(self.found)
        elif self.state is State.UNKNOWN:
            text = f"unknown: {self.found}"
        else:
            text = self.state.value
        if self.why:
            text += f" ({self.why})"
        if self.repair:
            text += f"; a repair {self.repair}"
        return text

    def __str__(self) -> str:
        remedy = f". What to do: {self.remedy}" if self.remedy else ""
        return f"{self.where}: {self.what}{remedy}"

    @property
    def is_plain(self) -> bool:
        """Whether it has no more to say than the state of a part that is as it should be, or will be."""
        return self.severity == "ok" and self.what == self.state.value and not self.remedy

    def to_json(self) -> dict[str, str | None]:
        """Return the five texts that the page and ``airflow delayed doctor`` show."""
        return {
            "code": self.code or self.state.value,
            "severity": self.severity,
            "where": self.where,
            "what": self.what,
            "remedy": self.remedy,
        }


@dataclass(frozen=True, slots=True)
class TopologyReport:
    """The findings of ``install`` or ``verify``."""

    findings: tuple[Finding, ...] = ()

    @property
    def problems(self) -> tuple[Finding, ...]:
        """Findings that keep messages from being delivered."""
        return tuple(found for found in self.findings if found.state in (*_UNREADY, State.BLOCKED))

    @property
    def unready(self) -> tuple[Finding, ...]:
        """Problems that do not pass by themselves: parts to create or change before sending."""
        return tuple(found for found in self.findings if found.state in _UNREADY)

    @property
    def ok(self) -> bool:
        """Whether everything is there and as wanted."""
        return not self.problems

    @property
    def missing_destinations(self) -> tuple[str, ...]:
        """Destinations that do not exist."""
        return tuple(
            sorted({found.destination for found in self.problems if found.destination and found.state is State.MISSING})
        )

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __str__(self) -> str:
        return "\n".join([self.headline, *map(str, self.notable)])

    @property
    def headline(self) -> str:
        """The number of findings in each state: with the parts, or if they are many the number of each kind."""
        plain: dict[str, list[Finding]] = {}
        for found in self.findings:
            if found.is_plain:
                plain.setdefault(found.state.value, []).append(found)
        counts = (f"{count:,} {state}{_parts(plain.get(state, ()))}" for state, count in self.counts().items())
        return ", ".join(counts) or "nothing"

    @property
    def notable(self) -> tuple[Finding, ...]:
        """Findings that say more than the state of a part that is as it should be."""
        return tuple(found for found in self.findings if not found.is_plain)

    def counts(self) -> dict[str, int]:
        """Count the findings by state."""
        counts: dict[str, int] = {}
        for found in self.findings:
            counts[found.state.value] = counts.get(found.state.value, 0) + 1
        return counts


def _parts(findings: Sequence[Finding]) -> str:
    if len(findings) <= MOST_PARTS:
        return in_brackets([found.where for found in findings])
    kinds = largest_first(Counter(found.resource.partition(" ")[0] for found in findings))
    destinations = sorted({found.destination for found in findings if found.destination})
    if destinations:
        kinds[-1] += f"; for {in_brackets(destinations)[2:-1]}"
    return in_brackets(kinds)


def in_brackets(names: Sequence[str]) -> str:
    """Return the first few names in brackets, with the number of the others; of no name an empty text."""
    if not names:
        return ""
    more = f", and {len(names) - MOST_PARTS:,} more" if len(names) > MOST_PARTS else ""
    return f" ({', '.join(names[:MOST_PARTS])}{more})"


def largest_first(counts: Mapping[str, int]) -> list[str]:
    """Return counts as texts, the largest first."""
    return [f"{name}: {count:,}" for name, count in by_size(counts).items()]


def by_size(counts: Mapping[str, int]) -> dict[str, int]:
    """Return counts, the largest first."""
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


def largest_destinations(counts: Mapping[str, int]) -> dict[str, Any]:
    """Return ``destinations``, the 100 with the most messages; and the number of ``other_destinations``, if any."""
    named = dict(islice(by_size(counts).items(), MOST_DESTINATIONS))
    others = len(counts) - len(named)
    return {"destinations": named, **({"other_destinations": others} if others else {})}


def due_span(first: datetime | None, last: datetime | None) -> str:
    """Return the due times of messages as the end of a line; of no message an empty text."""
    return f", due from {first.isoformat()} to {last.isoformat()}" if first and last else ""


def counts_text(counts: Mapping[str, int]) -> str:
    """Return the counts that are not 0 as the end of a line."""
    return "".join(f"; {count:,} {name}" for name, count in counts.items() if count)


#: Of two times or numbers in a field of Counts with this metadata, the sum has the lower; None counts as no time.
EARLIEST: Mapping[str, Any] = {"choose": min}
#: ... or the higher.
LATEST: Mapping[str, Any] = {"choose": max}
_Counts = TypeVar("_Counts", bound="Counts")


class Counts:
    """A base for dataclasses that count: two of them can be added, and each can be kept as JSON.

    Numbers are added; dictionaries are added by key, and counts within counts field by field.
    """

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def merge(self: _Counts, other: _Counts) -> None:
        """Add another's counts to these."""
        for each in fields(self):
            mine, others = getattr(self, each.name), getattr(other, each.name)
            if choose := each.metadata.get("choose"):
                setattr(self, each.name, choose((value for value in (mine, others) if value is not None), default=None))
            elif isinstance(mine, dict):
                for key, count in others.items():
                    mine[key] = mine.get(key, 0) + count
            elif isinstance(mine, Counts):
                mine.merge(others)
            else:
                setattr(self, each.name, mine + others)

    def __add__(self: _Counts, other: _Counts) -> _Counts:
        total = type(self)()
        total.merge(self)
        total.merge(other)
        return total

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON can hold them."""
        return {each.name: _plain(getattr(self, each.name)) for each in fields(self)}

    @classmethod
    def from_json(cls: type[_Counts], content: Mapping[str, Any]) -> _Counts:
        """Read the result of ``to_json``: a missing field has its default, and an unknown one is ignored."""
        return cls(**{each.name: _read(each, content[each.name]) for each in fields(cls) if each.name in content})


def _plain(value: Any) -> Any:
    if isinstance(value, Counts):
        return value.to_json()
    if isinstance(value, dict):
        return dict(value)
    return value.isoformat() if isinstance(value, datetime) else value


def _read(each: Field[Any], value: Any) -> Any:
    if "choose" in each.metadata:
        return datetime.fromisoformat(value) if isinstance(value, str) else value
    if isinstance(each.default_factory, type) and issubclass(each.default_factory, Counts):
        return each.default_factory.from_json(value)
    return dict(value) if isinstance(value, dict) else value


@dataclass(slots=True)
class SendReport(Counts):
    """Counts of the messages of one ``send``. ``duplicates`` were there already and are not in ``sent``.

    In a store, ``replaced`` took the place of what had the same id, and ``not_replaced`` came too late for that: it had
    been dispatched or cancelled, or was being dispatched. Neither is in ``sent``.
    """

    sent: int = 0
    duplicates: int = 0
    replaced: int = 0
    not_replaced: int = 0
    first_due: datetime | None = field(default=None, metadata=EARLIEST)
    last_due: datetime | None = field(default=None, metadata=LATEST)
    by_destination: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        others = {"duplicates": self.duplicates, "replaced": self.replaced, "not replaced": self.not_replaced}
        destinations = in_brackets(largest_first(self.by_destination))
        return f"{self.sent:,} sent{destinations}{due_span(self.first_due, self.last_due)}{counts_text(others)}"

    def add(self, message: Countable) -> None:
        """Count a message that was confirmed."""
        self.sent += 1
        self._note(message)

    def add_all(self, messages: Sequence[Countable]) -> None:
        """Count messages that were confirmed."""
        if messages:
            dues = list(map(attrgetter("due_at"), messages))
            counts = Counter(map(attrgetter("destination"), messages))
            self.merge(SendReport(len(messages), first_due=min(dues), last_due=max(dues), by_destination=counts))

    def add_replaced(self, message: Countable) -> None:
        """Count a message that took the place of another."""
        self.replaced += 1
        self._note(message)

    def _note(self, message: Countable) -> None:
        self.by_destination[message.destination] = self.by_destination.get(message.destination, 0) + 1
        if self.first_due is None or message.due_at < self.first_due:
            self.first_due = message.due_at
        if self.last_due is None or message.due_at > self.last_due:
            self.last_due = message.due_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(Counts):
    """How far a send has come, so that a retry sends only the rest.

    It is kept after every 2500 messages (:data:`airflow_delayed.sending.CHUNK`), so at most these are sent again. A
    retry whose source or arguments have changed sends all again: ``Sending._start`` compares the fingerprints.

    The first ``rows`` rows of a source are confirmed; some of the rows after them may be, too.

    :param fingerprint: of the source and of the way it is sent; the checkpoint holds for no other.
    :param sent: how many of the rows went to the transport at once; the other counts are those of the store's
        SendReport.
    """

    fingerprint: str = ""
    rows: int = 0
    sent: int = 0
    stored: int = 0
    replaced: int = 0
    not_replaced: int = 0
    duplicates: int = 0

    @property
    def messages(self) -> int:
        """How many messages of these rows were sent or stored."""
        return self.sent + self.stored + self.replaced

    def after(self, rows: int, sent: SendReport, stored: SendReport) -> Checkpoint:
        """Return the checkpoint of a later row."""
        return Checkpoint(
            fingerprint=self.fingerprint,
            rows=rows,
            sent=self.sent + sent.sent,
            stored=self.stored + stored.sent,
            replaced=self.replaced + stored.replaced,
            not_replaced=self.not_replaced + stored.not_replaced,
            duplicates=self.duplicates + sent.duplicates + stored.duplicates,
        )

    @classmethod
    def restored(cls, state: object) -> Checkpoint | None:
        """Return a checkpoint from the JSON of any release, or None if the state is no checkpoint."""
        if not isinstance(state, Mapping) or not isinstance(state.get("fingerprint"), str):
            return None
        found = cls.from_json(state)
        counts = (found.rows, found.sent, found.stored, found.replaced, found.not_replaced, found.duplicates)
        return found if all(isinstance(count, int) and count >= 0 for count in counts) else None
