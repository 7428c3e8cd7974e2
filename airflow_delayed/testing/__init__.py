"""For tests of what others write: behaviour tests of a store, and the pytest fixture ``delayed`` for DAGs."""

from __future__ import annotations
