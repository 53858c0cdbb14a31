"""Shows by numbers if a model and its losses leave padding out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from fastaccum.basics.attributes import kinds, of_keras, raw, replaced, restored
from fastaccum.data.stacks import Batch
from fastaccum.step.model_objective import ModelObjective

_RATES = "rate", "stddev", "dropout", "recurrent_dropout"  # of Keras's layers that draw


class _Results(NamedTuple):
    """Holds what comes out of a micro-batch, as lists of arrays."""

    outputs: list[np.ndarray]
    losses: list[np.ndarray]  # loss sums, then weight sums
    state: list[np.ndarray]  # of the model, the metrics and the logs, after it
    gradients: list[np.ndarray]

    @property
    def is_telling(self) -> bool:
        """Tells if the losses and gradients are finite."""
        return all(np.isfinite(each).all() for each in (*self.losses, *self.gradients))


class Padding:
    """Computes micro-batches as they are and padded, and compares all that comes out.

    That is the model's outputs for the steps given, the losses, metrics and what they leave in the
    state, and the gradients of losses and outputs. They are computed op by op, in training and not,
    without dropout, with the weights as they are, moved by 0.1, and moved at random: a weight that
    is 0 before the training would hide what it lets in, and a maximum what is below it. All is as
    it was afterwards.

    Args:
        objective: the model's.
        enter: returns the scope of the computation.

    Attributes:
        fills: values that may stand for padding in a model's inputs: 0, and those of its Masking
            layers.
    """

    def __init__(
        self,
        objective: ModelObjective,
        enter: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        self._objective = objective
        self._enter = enter
        masking = [each for each in objective.model.layers if "keras.Masking" in kinds(each)]
        self.fills = list(dict.fromkeys([0.0, *(float(each.mask_value) for each in masking)]))

    def is_same(self, given: Batch, padded: Batch, thoroughly: bool) -> bool | None:
        """Tells if the padded micro-batch has the results of the one given; None where that cannot
        be computed.

        If not `thoroughly`, without gradients, and with the weights as they are alone.
        """
        marks_targets = bool(tf.nest.flatten(padded.real))
        if marks_targets and self._objective.metrics.has_own_functions:
            # a value that is 0 before the training, as an accuracy may be, would show nothing
            return False
        known = None
        with self._enter(), restored([*self._state, *self._weights]), replaced(self._without_draws):
            for training, with_gradients in self._moved() if thoroughly else [(True, False)]:
                try:
                    expected = self._results(given, training, with_gradients)
                    found = self._results(padded, training, with_gradients)
                except Exception:
                    # of whatever the model cannot take, such as a sequence too short or too long
                    return None
                if not expected.is_telling:
                    continue
                if not self._agree(expected, found):
                    return False
                known = True
        return known

    def _moved(self) -> Iterator[tuple[bool, bool]]:
        """Moves the weights, and yields for each: compute in training, compute gradients."""
        weights = self._weights
        before = [weight.read_value() for weight in weights]
        yield True, True
        for weight, value in zip(weights, before, strict=True):
            weight.assign(value + tf.cast(0.1, weight.dtype))
        yield False, False
        for number, (weight, value) in enumerate(zip(weights, before, strict=True)):
            scale = 0.3 if weight.shape.rank < 2 else 1 / math.sqrt(weight.shape[0])
            noise = tf.random.stateless_normal(weight.shape, seed=(1, number), stddev=scale)
            weight.assign(value + tf.cast(noise, weight.dtype))
        yield True, False

    @property
    def _weights(self) -> list[tf.Variable]:
        """The floats among the model's weights, but for statistics, which may not be negative."""
        statistics = {id(v) for v in self._objective.state}
        weights = [raw(v) for v in self._objective.model.variables]
        return [v for v in weights if v.dtype.is_floating and id(v) not in statistics]

    @property
    def _state(self) -> list[tf.Variable]:
        objective = self._objective
        return [*objective.state, *objective.model.metric_variables, *objective.running.variables]

    @property
    def _without_draws(self) -> Sequence[tuple[keras.layers.Layer, str, object]]:
        layers = [each for each in self._objective.model.called_layers if of_keras(type(each))]
        return [
            (each, name, 0.0)
            for each in layers
            for name in _RATES
            if isinstance(getattr(each, name, None), float)
        ]

    def _results(self, batch: Batch, training: bool, with_gradients: bool) -> _Results:
        objective = self._objective
        trained = [raw(v) for v in objective.model.trainable_variables]
        with restored(self._state), tf.GradientTape() as tape:
            forward = objective.forward(batch, training=training, observe=False)
            terms = forward.terms
            outputs = [
                _steps_given(output, batch)
                for output in objective.outputs.predictions(forward.y_pred)
            ]
            objective.update_metrics(batch, forward, training)
            total = tf.add_n([term.loss_sum for term in terms])
            for number, output in enumerate(outputs):
                factors = tf.random.stateless_normal(output.shape, seed=(2, number))
                total += tf.reduce_sum(tf.cast(output, tf.float32) * factors)
            state = [variable.numpy() for variable in self._state]
        gradients = []
        if with_gradients:
            found = tape.gradient(
                total, trained, unconnected_gradients=tf.UnconnectedGradients.ZERO
            )
            gradients = [tf.convert_to_tensor(gradient) for gradient in found]
        losses = [term.loss_sum for term in terms] + [term.weight_sum for term in terms]
        return _Results(_as_arrays(outputs), _as_arrays(losses), state, _as_arrays(gradients))

    def _agree(self, expected: _Results, found: _Results) -> bool:
        tolerance = 1e-4 if self._objective.model.compute_dtype in ("float32", "float64") else 2e-2
        for kind, other in zip(expected, found, strict=True):
            if not all(_are_close(a, b, tolerance) for a, b in zip(kind, other, strict=True)):
                return False
        return True


def _steps_given(output: tf.Tensor, batch: Batch) -> tf.Tensor:
    """Returns an output without what `batch` says to be padding, if the output has steps."""
    for real in tf.nest.flatten(batch.real):
        if real.shape.rank == 2 and output.shape.rank > 1 and output.shape[1] == real.shape[1]:
            return output[:, : int(tf.reduce_sum(tf.cast(real[0], tf.int32)))]
    return output


def _as_arrays(tensors: Sequence[tf.Tensor]) -> list[np.ndarray]:
    return [tf.cast(tensor, tf.float64).numpy() for tensor in tensors]


def _are_close(expected: np.ndarray, found: np.ndarray, tolerance: float) -> bool:
    if expected.shape != found.shape:
        return False
    if expected.dtype == bool or np.issubdtype(expected.dtype, np.integer):
        return np.array_equal(expected, found)
    expected = expected.astype("float64")
    largest = np.abs(expected).max(initial=0.0)
    return np.allclose(
        found.astype("float64"), expected, rtol=tolerance, atol=tolerance * largest + 1e-7
    )
