"""What fits and what it costs, in figures: each a module here that `python -m benchmarks.memory
NAME` runs.
"""
