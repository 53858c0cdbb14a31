"""The types of what Trainer and TrainStep take from Keras 3, tf_keras and tensorflow-addons."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import keras
import tensorflow as tf

if TYPE_CHECKING:
    import tf_keras

    KerasModel: TypeAlias = keras.Model | tf_keras.Model
    KerasOptimizer: TypeAlias = (
        keras.optimizers.Optimizer | tf_keras.optimizers.Optimizer | tf_keras.optimizers.legacy.Optimizer
    )
    Loss: TypeAlias = keras.losses.Loss | tf_keras.losses.Loss | Callable[..., Any] | str
    LossArgument: TypeAlias = Loss | Sequence[Loss | None] | Mapping[str, Loss | None] | None
    Metric: TypeAlias = keras.metrics.Metric | tf_keras.metrics.Metric | Callable[..., Any] | str
    MetricsArgument: TypeAlias = Sequence[Metric | Sequence[Metric]] | Mapping[str, Metric | Sequence[Metric]] | None
    WeightsArgument: TypeAlias = Sequence[float] | Mapping[str, float] | None
    Variables: TypeAlias = Sequence[tf.Variable | keras.Variable]
    CallbacksArgument: TypeAlias = (
        Sequence[keras.callbacks.Callback | tf_keras.callbacks.Callback]
        | keras.callbacks.Callback
        | keras.callbacks.CallbackList
        | None
    )
else:  # tf_keras is imported by those who use it
    KerasModel = KerasOptimizer = LossArgument = MetricsArgument = WeightsArgument = CallbacksArgument = Any
    Variables = Any
