from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from airflow_delayed.intake.duplicates import DuplicateFilter


@given(
    st.lists(st.lists(st.sampled_from("abcdefghijklmnop"), max_size=20), max_size=4), st.sampled_from([8, 80, 1 << 20])
)
def test_ids_that_come_again_are_found_whether_in_memory_or_on_disk(parts, memory):
    sieve = DuplicateFilter(memory=memory)
    for part in parts:
        sieve.add(part)
    found = sieve.repeated()
    sieve.close()
    counts = Counter(one for part in parts for one in part)
    assert found == {hash(one) for one, count in counts.items() if count > 1}
