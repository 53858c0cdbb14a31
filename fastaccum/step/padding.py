"""Shows by numbers if a model and its losses leave padding out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from fastaccum.basics.attributes import kinds, of_keras, raw, replaced, restored
from fastaccum.data.stacks import Batch
from fastaccum.step.model_objective import ModelObjective

# Attributes of Keras's layers that draw random numbers. A layer draws none if they are 0.
RATES = ("rate", "stddev", "dropout", "recurrent_dropout")
# The largest difference that padding may make, relative to the largest entry of the same array.
TOLERANCE = 1e-4
TOLERANCE_IN_HALF_PRECISION = 2e-2


class _Results(NamedTuple):
    """The results of a micro-batch, as lists of arrays."""

    outputs: list[np.ndarray]
    losses: list[np.ndarray]  # loss sums, then weight sums
    state: list[np.ndarray]  # the state of model, metrics and logs after the micro-batch
    gradients: list[np.ndarray]

    @property
    def is_finite(self) -> bool:
        """Tells if the losses and gradients are finite."""
        return all(np.isfinite(array).all() for array in (*self.losses, *self.gradients))


class _Trial(NamedTuple):
    """The way in which two micro-batches are computed and compared."""

    training: bool
    with_gradients: bool


class Padding:
    """Computes micro-batches as they are and padded, and compares all results.

    These are the model's outputs at the steps that are not padding, the losses, the state of model,
    metrics and logs, and the gradients of losses and outputs. They are computed op by op and
    without dropout.

    A thorough comparison is made three times: with the weights as they are, moved by 0.1 (and not
    in training), and moved at random. The weights of a new model may hide an influence of padding:
    a weight of 0 hides what it multiplies, and a maximum hides values below it. All state is
    restored afterwards.

    Args:
        objective: the model's.
        enter: returns the scope of the computation.

    Attributes:
        fills: the values that may pad a model's inputs: 0, and those of its Masking layers.
    """

    def __init__(
        self,
        objective: ModelObjective,
        enter: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        self._objective = objective
        self._enter = enter
        fills = [0.0]
        for layer in objective.model.layers:
            if "keras.Masking" in kinds(layer):
                fills.append(float(layer.mask_value))
        self.fills = list(dict.fromkeys(fills))

    def is_same(self, unpadded: Batch, padded: Batch, thoroughly: bool) -> bool | None:
        """Tells if a padded micro-batch has the results of the unpadded one.

        Returns None if the results cannot be computed or are not finite. If not `thoroughly`,
        compares once, with the weights as they are, and no gradients.
        """
        marks_targets = bool(tf.nest.flatten(padded.real))
        if marks_targets and self._objective.metrics.has_own_functions:
            # A user's metric may be 0 for an untrained model, as an accuracy is. That it stays 0
            # with padding would not show that it leaves padding out.
            return False
        trials: Iterable[_Trial] = [_Trial(training=True, with_gradients=False)]
        if thoroughly:
            trials = self._trials_with_moved_weights()
        is_same = None
        with self._enter(), restored([*self._state, *self._weights]), replaced(self._without_draws):
            for trial in trials:
                try:
                    expected = self._results(unpadded, trial)
                    actual = self._results(padded, trial)
                except Exception:
                    # The model may not take the micro-batch, as a sequence too short or too long.
                    return None
                if not expected.is_finite:
                    continue
                if not self._agree(expected, actual):
                    return False
                is_same = True
        return is_same

    def _trials_with_moved_weights(self) -> Iterator[_Trial]:
        """Yields the trials of a thorough comparison, and moves the weights from one to the next.

        The caller runs each trial before it takes the next, and restores the weights at the end.
        """
        weights = self._weights
        before = [weight.read_value() for weight in weights]
        yield _Trial(training=True, with_gradients=True)
        for weight, value in zip(weights, before, strict=True):
            weight.assign(value + tf.cast(0.1, weight.dtype))
        yield _Trial(training=False, with_gradients=False)
        for number, (weight, value) in enumerate(zip(weights, before, strict=True)):
            scale = 0.3
            if weight.shape.rank >= 2:
                scale = 1 / math.sqrt(weight.shape[0])  # keeps the range of a layer's outputs
            noise = tf.random.stateless_normal(weight.shape, seed=(1, number), stddev=scale)
            weight.assign(value + tf.cast(noise, weight.dtype))
        yield _Trial(training=True, with_gradients=False)

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
        """The replacements by which Keras's layers draw nothing."""
        replacements = []
        for layer in self._objective.model.called_layers:
            if not of_keras(type(layer)):
                continue
            for name in RATES:
                if isinstance(getattr(layer, name, None), float):
                    replacements.append((layer, name, 0.0))
        return replacements

    def _results(self, batch: Batch, trial: _Trial) -> _Results:
        objective = self._objective
        trained = [raw(v) for v in objective.model.trainable_variables]
        with restored(self._state), tf.GradientTape() as tape:
            forward = objective.forward(batch, training=trial.training, observe=False)
            terms = forward.terms
            outputs = [
                _steps_given(output, batch)
                for output in objective.outputs.predictions(forward.y_pred)
            ]
            objective.update_metrics(batch, forward, trial.training)
            total = tf.add_n([term.loss_sum for term in terms])
            # Random factors, so that the gradients of an output's entries do not cancel.
            for number, output in enumerate(outputs):
                factors = tf.random.stateless_normal(output.shape, seed=(2, number))
                total += tf.reduce_sum(tf.cast(output, tf.float32) * factors)
            state = [variable.numpy() for variable in self._state]
        gradients = []
        if trial.with_gradients:
            zero = tf.UnconnectedGradients.ZERO
            for gradient in tape.gradient(total, trained, unconnected_gradients=zero):
                gradients.append(tf.convert_to_tensor(gradient))
        losses = [term.loss_sum for term in terms] + [term.weight_sum for term in terms]
        return _Results(_as_arrays(outputs), _as_arrays(losses), state, _as_arrays(gradients))

    def _agree(self, expected: _Results, actual: _Results) -> bool:
        """Tells if all results agree, up to their rounding."""
        tolerance = TOLERANCE
        if self._objective.model.compute_dtype not in ("float32", "float64"):
            tolerance = TOLERANCE_IN_HALF_PRECISION
        for expected_arrays, actual_arrays in zip(expected, actual, strict=True):
            for expected_array, array in zip(expected_arrays, actual_arrays, strict=True):
                if not _are_close(expected_array, array, tolerance):
                    return False
        return True


def _steps_given(output: tf.Tensor, batch: Batch) -> tf.Tensor:
    """Returns an output without the steps that are padding by `batch.real`, if it has steps."""
    for real in tf.nest.flatten(batch.real):
        if real.shape.rank == 2 and output.shape.rank > 1 and output.shape[1] == real.shape[1]:
            return output[:, : int(tf.reduce_sum(tf.cast(real[0], tf.int32)))]
    return output


def _as_arrays(tensors: Sequence[tf.Tensor]) -> list[np.ndarray]:
    return [tf.cast(tensor, tf.float64).numpy() for tensor in tensors]


def _are_close(expected: np.ndarray, actual: np.ndarray, tolerance: float) -> bool:
    if expected.shape != actual.shape:
        return False
    if expected.dtype == bool or np.issubdtype(expected.dtype, np.integer):
        return np.array_equal(expected, actual)
    expected = expected.astype("float64")
    largest = np.abs(expected).max(initial=0.0)
    absolute = tolerance * largest + 1e-7
    return np.allclose(actual.astype("float64"), expected, rtol=tolerance, atol=absolute)
