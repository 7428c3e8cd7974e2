from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st
from support.memory import peak

from airflow_delayed.intake.duplicates import DuplicateIndex

ROWS = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from([b"1" * 16, b"2" * 16])), max_size=60)


@given(ROWS, st.sampled_from([40, 400, 1 << 20]))
def test_repeats_are_found_whether_in_memory_or_on_disk(rows, memory):
    seen = defaultdict(list)
    ledger = DuplicateIndex(memory=memory)
    for number, (message_id, digest) in enumerate(rows):
        ledger.add(message_id, digest, number)
        seen[message_id].append((number, digest))
    found = ledger.duplicates(shown=100)
    ledger.close()
    copies, conflicts = set(), set()
    for group in seen.values():
        if len({digest for _, digest in group}) == 1:
            copies |= {number for number, _ in group[1:]}
        else:
            other = next(number for number, digest in group if digest != group[0][1])
            conflicts.add((group[0][0], other))
    assert found.copies == copies
    assert len(found.copies) == len(copies)
    assert set(found.conflicts) == conflicts


def test_very_many_rows_of_one_id_take_little_memory():
    ledger = DuplicateIndex()
    for number in range(100_000):
        ledger.add("same", b"0" * 16, number)
    assert peak(ledger.duplicates) < 6_000_000
    copies = ledger.duplicates().copies
    ledger.close()
    assert len(copies) == 99_999
    assert 0 not in copies
    assert 99_999 in copies
