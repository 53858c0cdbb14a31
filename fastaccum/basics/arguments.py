"""Types of the arguments of Trainer and TrainStep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

if TYPE_CHECKING:
    import tf_keras

    KerasModel: TypeAlias = keras.Model | tf_keras.Model
    KerasOptimizer: TypeAlias = (
        keras.optimizers.Optimizer
        | tf_keras.optimizers.Optimizer
        | tf_keras.optimizers.legacy.Optimizer
    )
    Loss: TypeAlias = keras.losses.Loss | tf_keras.losses.Loss | Callable[..., tf.Tensor] | str
    LossArgument: TypeAlias = Loss | Sequence[Loss | None] | Mapping[str, Loss | None] | None
    Metric: TypeAlias = (
        keras.metrics.Metric | tf_keras.metrics.Metric | Callable[..., tf.Tensor] | str
    )
    MetricsArgument: TypeAlias = (
        Sequence[Metric | Sequence[Metric]] | Mapping[str, Metric | Sequence[Metric]] | None
    )
    WeightsArgument: TypeAlias = Sequence[float] | Mapping[str, float] | None
    Arrays: TypeAlias = (
        np.ndarray | tf.Tensor | tf.RaggedTensor | tf.SparseTensor | Iterable[object]
    )
    Data: TypeAlias = Arrays | tf.data.Dataset[Any] | keras.utils.PyDataset
    Variables: TypeAlias = Sequence[tf.Variable | keras.Variable]
    Callback: TypeAlias = keras.callbacks.Callback | tf_keras.callbacks.Callback
    CallbacksArgument: TypeAlias = (
        Sequence[Callback] | keras.callbacks.Callback | keras.callbacks.CallbackList | None
    )
else:  # tf_keras is imported by those who use it
    KerasModel = KerasOptimizer = Loss = LossArgument = Metric = MetricsArgument = (
        WeightsArgument
    ) = Any
    CallbacksArgument = Variables = Arrays = Data = Any
