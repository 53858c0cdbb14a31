"""The parts of a fit that its checkpoints save and compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import keras
import tensorflow as tf

from fastaccum.adapters.callbacks import Callbacks
from fastaccum.basics.attributes import Variable
from fastaccum.basics.processes import Workers
from fastaccum.data.source import Stacks
from fastaccum.fingerprint.values import Json


@dataclasses.dataclass(frozen=True)
class Training:
    """The parts of a fit that a checkpoint needs."""

    model: keras.Model  # the user's, for its `history` and `stop_training`
    # All that training changes, by the groups "model", "optimizer", "loss_scale" and "step".
    variables: Mapping[str, Sequence[Variable]]
    description: Json  # what must be the same for a checkpoint to fit
    # Of a step's rows, which may be otherwise when a checkpoint is taken up: "batch_size" (or the
    # "batches" of a dataset), "gradient_accumulation_steps" and "replicas".
    cut: Mapping[str, int]
    # by name: they compute other numbers if the cut is another
    split_sensitive_layers: Sequence[str]
    unsaved_draws: Sequence[str]  # operations whose random numbers no checkpoint can bring back
    stacks: Stacks
    callbacks: Callbacks
    # Returns False while steps are skipped until an error that is still to be read, and raises
    # ValueError if indices out of range were seen: neither leaves a state to go on from.
    require_savable: Callable[[], bool]
    # as the fit ends, to tell what training changed from what is changed after it
    note_changes: Callable[[], None]
    workers: Workers | None
    holders: Mapping[int, int]  # the worker of each variable that one worker alone has, by its id
    settings: Mapping[str, Sequence[tf.Variable]]  # the optimizer's that variables hold, by name
    scales: Mapping[int, tf.Variable]  # of slots in int8 codes, by the id of the codes
