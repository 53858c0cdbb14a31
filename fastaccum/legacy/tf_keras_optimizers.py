"""The optimizers of tf_keras (new and legacy) and of tensorflow-addons."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping

import keras
import tensorflow as tf

from fastaccum.adapters.optimizers import Optimizer, Pairs
from fastaccum.basics.attributes import Variable, kinds, raw, replaced
from fastaccum.kernels import private
from fastaccum.legacy import untouched_rows


class TFKerasOptimizer(Optimizer):
    """The optimizers of tf_keras since 2.11."""

    def _knows(self, variable: Variable) -> bool:
        if not private.built(self.optimizer, False):
            return True
        key = private.var_key(self.optimizer, variable)
        return key in private.index_dict(self.optimizer)

    def _update(self, pairs: Pairs) -> None:
        native = []
        for gradient, variable in pairs:
            # Under mixed precision the dtype of a tf_keras model's variable is the compute dtype.
            dtype = getattr(raw(variable), "true_dtype", variable.dtype)
            native.append((tf.cast(gradient, dtype), raw(variable)))
        self.optimizer.apply_gradients(native, experimental_aggregate_gradients=False)
        for _, variable in pairs:
            # It applies constraints itself, but that of a keras.Variable is not on its tf.Variable.
            if isinstance(variable, keras.Variable) and variable.constraint is not None:
                variable.assign(variable.constraint(variable))


class LegacyOptimizer(TFKerasOptimizer):
    """The optimizers of tf_keras.optimizers.legacy, on which all of tensorflow-addons is built."""

    def __init__(self, optimizer: keras.optimizers.Optimizer):
        super().__init__(optimizer)
        for part in self.parts:
            # A wrapper's `apply_gradients` does this, for the next level only, and while it is
            # traced.
            private.iterations.set(part, optimizer.iterations)
        hyperparameters = private.hyper(self.parts[-1])
        self._called = {name: value for name, value in hyperparameters.items() if callable(value)}
        for name, value in hyperparameters.items():
            if isinstance(value, keras.optimizers.schedules.LearningRateSchedule):
                # It knows tf_keras's schedules only, and calls this one as a function of no
                # arguments.
                hyperparameters[name] = lambda schedule=value: schedule(optimizer.iterations)
            elif type(value) is int:
                # It would become an int32 variable, which lives on the host.
                hyperparameters[name] = float(value)

    @property
    def parts(self) -> list[keras.optimizers.Optimizer]:
        # Lookahead, MovingAverage and SWA leave the state of the optimizer inside out of their
        # `variables()`.
        parts = [self.optimizer]
        while private.wrapped_optimizer.exists(parts[-1]):
            parts.append(private.wrapped_optimizer(parts[-1]))
        return parts

    @property
    def described(self) -> list[object]:
        # `get_config` tells the value of these functions alone.
        return [*super().described, self._called]

    @property
    def settings(self) -> dict[str, list[tf.Variable]]:
        hyperparameters = private.hyper(self.parts[-1])
        return {
            name: [value]
            for name, value in hyperparameters.items()
            if isinstance(value, tf.Variable)
        }

    @property
    def needs_lookups(self) -> bool:
        return untouched_rows.treats_apart(self.parts[-1])

    def _with_lookups(
        self, looked_up: Mapping[Hashable, tf.Tensor]
    ) -> contextlib.AbstractContextManager[None]:
        return replaced(untouched_rows.replace_dense_form(self.parts[-1], looked_up))

    def _knows(self, variable: Variable) -> bool:
        slots = private.slots(self.optimizer)
        if not slots:
            return True
        return private.unique_id(variable) in slots

    def _create(self, variables: list[Variable]) -> None:
        # as in its `apply_gradients`, for the names of the slots
        with tf.name_scope(private.optimizer_name(self.optimizer)):
            private.create_all_weights(self.optimizer, variables)
        if "tensorflow_addons.AveragedOptimizerWrapper" in kinds(self.optimizer):
            # What keras.callbacks.SwapEMAWeights swaps, by the names of Keras 3.
            private.trainable_variables.set(self.optimizer, variables)
            averages = [self.optimizer.get_slot(v, "average") for v in variables]
            private.moving_averages.set(self.optimizer, averages)
            if private.optimizer_strategy(self.optimizer) is None:
                private.optimizer_strategy.set(self.optimizer, tf.distribute.get_strategy())
