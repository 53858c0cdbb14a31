"""The train step on the replicas of a tf.distribute strategy."""

from fastaccum.distribute.replicas import WorkerLostError as WorkerLostError
from fastaccum.distribute.replicas import WorkersDifferError as WorkersDifferError
