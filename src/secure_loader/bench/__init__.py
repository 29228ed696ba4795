"""Measuring loads: what ``secure-loader bench`` and the project's own benchmarks have in common.

:mod:`.measure` runs callables in processes of their own and compares them; :mod:`.machine` prepares page cache and
memory, and says what machine it was.
"""
