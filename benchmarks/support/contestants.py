"""What the suites ask of a contestant, and fastaccum as one of them. The others live in `peers/`.

Every `make(workload)` builds its own model from the workload's initial weights.
"""

import dataclasses
from collections.abc import Callable

import keras
import tensorflow as tf

import fastaccum as fa


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """One way to do one update.

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
        """A function that runs `updates` updates on data that is fed already, and ends when the
        last loss is read.
        """
        batches = [self.feed(stack) for stack in workload.stacks(updates)]

        def run():
            for batch in batches:
                loss = self.update(batch)
            return float(loss)

        return run


@dataclasses.dataclass(frozen=True)
class ForeignModel:
    """A model of another framework, as far as the suites ask for it.

    Args:
        get_weights: returns the weights as NumPy arrays, in the order and layout of the Keras
            model.
    """

    get_weights: Callable


@dataclasses.dataclass(frozen=True)
class Fit:
    """One way to train for an epoch.

    Args:
        model: the Keras model that it trains.
        epoch: `epoch(x, y)` trains on all the examples once, in order; returns the epoch's loss as
            a float.
    """

    model: keras.Model
    epoch: Callable


def trainer(workload, micro_batches=None, **kwargs):
    """The `fa.Trainer` that is timed: its defaults, but for what the workload fixes."""
    return fa.Trainer(
        workload.model(),
        optimizer=workload.optimizer(),
        loss=workload.loss(),
        gradient_accumulation_steps=micro_batches or workload.micro_batches,
        **kwargs,
    )


def make_train_step(workload):
    ours = trainer(workload)
    return as_train_step(ours)


def as_train_step(ours):
    return TrainStep(ours.model, feed_stack, lambda stack: ours.train_step(stack).loss)


def make_fit(workload, **kwargs):
    return as_fit(trainer(workload, **kwargs), workload)


def as_fit(ours, workload):
    def epoch(x, y):
        history = ours.fit(x, y, batch_size=workload.batch_size, epochs=1, shuffle=False, verbose=0)
        return history.history["loss"][-1]

    return Fit(ours.model, epoch)


def feed_stack(stack):
    return tuple(tf.constant(array) for array in stack)
