"""How far a send has come: which rows a retry need not send again. No Airflow here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from typing import Any, Protocol

from airflow_delayed.delivery import SendReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The first ``rows`` rows of a source are confirmed: no more of them than that, and maybe some that follow.

    :param fingerprint: of the source and of how it is sent, see :func:`fingerprint`; a mark says nothing of another.
    :param sent: how many of the rows went to the transport at once; the others are as in a SendReport of the store.
    """

    fingerprint: str = ""
    rows: int = 0
    sent: int = 0
    held: int = 0
    replaced: int = 0
    refused: int = 0
    duplicates: int = 0

    @property
    def messages(self) -> int:
        """How many messages these rows have brought on their way, or into the store."""
        return self.sent + self.held + self.replaced

    def after(self, rows: int, sent: SendReport, held: SendReport) -> Mark:
        """Return the mark of a later row.

        :param rows: how many rows are confirmed now.
        :param sent: what went to the transport since this mark, and
        :param held: what went into the store since.
        """
        return Mark(
            fingerprint=self.fingerprint,
            rows=rows,
            sent=self.sent + sent.sent,
            held=self.held + held.sent,
            replaced=self.replaced + held.replaced,
            refused=self.refused + held.refused,
            duplicates=self.duplicates + sent.duplicates + held.duplicates,
        )

    def state(self) -> dict[str, Any]:
        """Return it as JSON can hold it, of the same size however many rows there are."""
        return asdict(self)

    @classmethod
    def restored(cls, state: object) -> Mark | None:
        """Return a mark from its state; None from anything else. What a later version has added is passed over."""
        if not isinstance(state, Mapping) or not isinstance(state.get("fingerprint"), str):
            return None
        known = {field.name: state[field.name] for field in fields(cls) if field.name in state}
        counts = (value for name, value in known.items() if name != "fingerprint")
        return cls(**known) if all(isinstance(count, int) and count >= 0 for count in counts) else None


class Marks(Protocol):
    """Keeps the mark of a send from one try to the next."""

    def get(self) -> Mark | None:
        """Return the last mark that was kept."""
        ...

    def keep(self, mark: Mark) -> None:
        """Keep a mark in place of the last one. Raises nothing: what is sent is sent."""
        ...


def fingerprint(*parts: bytes) -> str:
    """Return what stands for a source, for what its rows mean, and for the way that its messages go."""
    whole = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return blake2b(whole, digest_size=16, person=b"delayed source 1").hexdigest()
