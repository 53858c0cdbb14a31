"""The train step on the replicas of a tf.distribute strategy."""

from fastaccum.basics.processes import WorkerLostError as WorkerLostError
from fastaccum.basics.processes import WorkersDifferError as WorkersDifferError
