"""Benchmarks of fastaccum against what people use today.

`python -m benchmarks` runs them and writes the run up; `pytest -n 0 benchmarks` runs them in one
process.
"""

import fastaccum  # noqa: F401  # before TensorFlow, so that all sides have oneDNN, Keras too
