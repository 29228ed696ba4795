"""The project's benchmarks: ``python -m benchmarks``, or ``make bench``, which makes the environment first.

Each suite is a file of ``suites/`` and answers one row or more of the goals. Data is made once and kept outside this
folder (``cache``, ``data``); loaders are called in forks of a worker that has only imported them (``worker``); results go
to ``results/*.json``, from which charts and tables are made (``charts``, ``report``).
"""
