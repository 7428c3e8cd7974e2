"""Reading messages from rows.

``sources`` and ``parquet`` yield batches of rows from the files that ``files`` lists and opens. Rows that cannot be
read twice go through a ``spool``.
``columns`` has the rules and the batch; ``rows`` makes messages of it row by row, ``columnar`` of the whole batch at
once, with the help of ``arrow``. ``duplicates`` finds ids that occur twice.
"""

from __future__ import annotations
