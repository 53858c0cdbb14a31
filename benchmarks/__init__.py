"""Benchmarks against what people use today.

`pytest benchmarks` runs them, `python -m benchmarks.report` writes a run up.
"""
