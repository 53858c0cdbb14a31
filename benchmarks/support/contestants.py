"""Interfaces of a contestant, `TrainStep` and `Fit`, and fastaccum as one; the peers have others.

Every `make(workload)` builds its own model from the workload's initial weights.
"""

import dataclasses
from collections.abc import Callable

import keras
import tensorflow as tf

import fastaccum as fa


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """Train step of one contestant.

    Args:
        model: the Keras model that it trains, or a ForeignModel.
        feed: turns one stack `(x, y)` of NumPy arrays into what `update` takes: tensors, in the
            form that is best for it. Never timed.
        update: trains on what `feed` returned, once; returns the loss, which `float()` reads.
    """

    model: "keras.Model | ForeignModel"
    feed: Callable
    update: Callable

    def block(self, workload, updates):
        """Returns a function that runs `updates` updates on prepared data, to the last loss."""
        batches = [self.feed(stack) for stack in workload.stacks(updates)]

        def run():
            for batch in batches:
                loss = self.update(batch)
            return float(loss)

        return run


@dataclasses.dataclass(frozen=True)
class ForeignModel:
    """Model of another framework.

    Args:
        get_weights: returns the weights as NumPy arrays, in the order and layout of the Keras
            model.
    """

    get_weights: Callable


@dataclasses.dataclass(frozen=True)
class Fit:
    """Epoch of training of one contestant.

    Args:
        model: the Keras model that it trains.
        epoch: `epoch(x, y)` trains on all the examples once, in order; returns the epoch's loss as
            a float.
    """

    model: keras.Model
    epoch: Callable


def trainer(workload, micro_batches=None, **kwargs):
    """Makes the `fa.Trainer` that is timed, with all defaults that the workload leaves open."""
    return fa.Trainer(
        workload.model(),
        optimizer=workload.optimizer(),
        loss=workload.loss(),
        gradient_accumulation_steps=micro_batches or workload.micro_batches,
        scan_layers=workload.scan_layers,
        **kwargs,
    )


def make_train_step(workload):
    """Makes fastaccum's `TrainStep`."""
    return as_train_step(trainer(workload))


def as_train_step(trainer):
    """Returns the trainer's `TrainStep`."""
    return TrainStep(trainer.model, feed_stack, lambda stack: trainer.train_step(stack).loss)


def make_fit(workload, **kwargs):
    """Makes fastaccum's `Fit`; keyword arguments go to the trainer."""
    return as_fit(trainer(workload, **kwargs), workload)


def as_fit(trainer, workload):
    """Returns the trainer's `Fit`."""

    def epoch(x, y):
        history = trainer.fit(
            x, y, batch_size=workload.batch_size, epochs=1, shuffle=False, verbose=0
        )
        return history.history["loss"][-1]

    return Fit(trainer.model, epoch)


def feed_stack(stack):
    """Turns the NumPy arrays of a stack into tensors."""
    return tuple(tf.constant(array) for array in stack)
