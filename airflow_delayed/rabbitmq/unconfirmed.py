"""What was published on one channel and is not confirmed yet. No network."""

from __future__ import annotations

from collections.abc import Iterator

from airflow_delayed.rabbitmq.backlog import Entry


class Unconfirmed:
    """Entries by delivery tag: with publisher confirms the broker counts a channel's messages from 1, and so do we."""

    def __init__(self) -> None:
        #: The tag of the last message that was published.
        self.last = 0
        self._entries: dict[int, Entry] = {}
        self._returned: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def add(self, entry: Entry) -> None:
        """Note that an entry was published."""
        self.last += 1
        self._entries[self.last] = entry

    def returned(self, message_id: str, reason: str) -> None:
        """Note that the broker returned a message of this id, which it does before it confirms it like any other."""
        self._returned[message_id] = reason

    def settle(self, tag: int, multiple: bool) -> list[tuple[Entry, str | None]]:
        """Take out what a confirm or a refusal is about; each with the reason why it was returned, if it was.

        A reason stands for all of that id, since which of several was returned the broker does not say.

        :param multiple: all up to the tag.
        """
        tags = self._up_to(tag) if multiple else [tag] if tag in self._entries else []
        entries = map(self._entries.pop, tags)
        if not self._returned:
            return [(entry, None) for entry in entries]
        return [(entry, self._returned.get(entry.message.message_id)) for entry in entries]

    def clear(self) -> list[Entry]:
        """Take out all, in their order."""
        entries = list(self._entries.values())
        self._entries.clear()
        return entries

    def _up_to(self, last: int) -> list[int]:
        tags = []
        for tag in self._entries:
            if tag > last:
                break
            tags.append(tag)
        return tags
