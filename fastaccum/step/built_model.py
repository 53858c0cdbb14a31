"""A model and what trains it, built: what the step of every kind of device is made from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fastaccum.adapters.losses import BoundLosses
from fastaccum.adapters.metrics import Metrics
from fastaccum.adapters.models import Model
from fastaccum.adapters.optimizers import Optimizer
from fastaccum.adapters.outputs import Outputs
from fastaccum.step.options import Options


@dataclasses.dataclass(frozen=True)
class BuiltModel:
    """A model that was called, with losses and metrics that were built for its outputs."""

    model: Model
    outputs: Outputs
    losses: BoundLosses
    metrics: Metrics
    optimizer: Optimizer
    options: Options  # in which `jit_compile="auto"` has become a choice
    calling_python: Sequence[str]  # names of what calls Python, which XLA cannot compile
