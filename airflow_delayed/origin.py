"""Who stored a message: one run of a task. No Airflow, no database."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from airflow_delayed.identity import scope_of

#: Longest name, in characters: what Airflow allows.
MAX_NAME = 250
_PERSON = b"delayed origin 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The run of a task that a message comes from; all tries of it are one.

    :param map_index: -1 for a task that is not mapped.
    :param iteration: of a task loop, counted from 1; None outside of loops.
    :raises ValueError: a name is empty or has over 250 characters.
    """

    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1
    iteration: int | None = None

    def __post_init__(self) -> None:
        for name in ("dag_id", "run_id", "task_id"):
            value = getattr(self, name)
            if not 0 < len(value) <= MAX_NAME or "\0" in value:
                raise ValueError(f"{name} must have 1 to {MAX_NAME} characters, none of them null")

    @property
    def parts(self) -> tuple[str | int, ...]:
        """What sets its messages apart from those of other tasks. The iteration counts only inside a loop."""
        parts: tuple[str | int, ...] = (self.dag_id, self.run_id, self.task_id, self.map_index)
        return parts if self.iteration is None else (*parts, f"iteration {self.iteration}")

    @property
    def digest(self) -> bytes:
        """16 bytes that stand for it."""
        return blake2b(scope_of(*self.parts), digest_size=16, person=_PERSON).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class SentBy:
    """Runs of tasks, of which messages are wanted: those of a DAG, or of what of it is named.

    :param map_index: -1 for a task that is not mapped.
    """

    dag_id: str
    run_id: str | None = None
    task_id: str | None = None
    map_index: int | None = None
