"""Help for users' own tests: the contract of a store as tests, and the pytest fixture ``delayed`` for DAGs."""

from __future__ import annotations
