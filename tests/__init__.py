"""Tests of hf_zero_stream.

``make test-all`` runs all of them. ``make test`` is what a change must pass: of each capability it runs a real sample.
What it leaves out is marked ``slow``:

- by hand: long trials, and those that differ from another one in the same file only by a setting,
- by ``conftest.py``: all but one row of a test that starts ranks, or all but n rows if it is marked ``sample(n)``.

Rows that share a fixture, as trials in one start of ranks do, are taken out of it too: see :func:`sampling.chosen`.
Where one test goes over many cases itself, it goes over fewer while :data:`sampling.is_sample`.
"""
