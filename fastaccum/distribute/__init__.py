"""The train step on the replicas of a tf.distribute strategy."""

from fastaccum.checkpoint.state import WorkerLostError as WorkerLostError
from fastaccum.distribute.workers import WorkersDifferError as WorkersDifferError
