"""A loss that takes over a model's output layer, so that logits exist a part at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from fastaccum import checks
from fastaccum.adapters.head_layers import (
    bias_of,
    find_head,
    is_masked_lm_head,
    is_reversible,
    kernel_of,
    require_linear,
)
from fastaccum.adapters.label_metrics import KERAS_LOSS, ScoredLabels
from fastaccum.adapters.models import Model
from fastaccum.adapters.outputs import to_whole
from fastaccum.basics.attributes import function_of, known_name, replaced
from fastaccum.kernels import private
from fastaccum.kernels.cross_entropy import (
    cross_entropy_from_logits,
    linear_cross_entropy_sum_and_scores,
    require_options,
)
from fastaccum.kernels.hoisted_casts import copy_of
from fastaccum.kernels.xla_ops import HALF
from fastaccum.layers.interceptors import Interceptor, Role, intercepting


@keras.saving.register_keras_serializable("fastaccum")
class LinearCrossEntropy(keras.losses.Loss):
    """Softmax cross-entropy with integer labels, for a linear last layer with many outputs.

    Equals `keras.losses.SparseCategoricalCrossentropy(from_logits=True)`, with the same divisor and
    gradients, but holds a part of the logits at a time. In train steps and `evaluate`, a `Trainer`
    leaves out the model's output layer (the head) and computes the losses from the head's input and
    weights:

        losses = fastaccum.kernels.linear_cross_entropy(hidden, head.kernel, labels, head.bias, ...)

    A train step computes their gradients at once, a slice of the tokens at a time, unless a
    `chunk_size` is given. Few logits are held whole, which is faster: if a micro-batch has up to 4
    million of them (16 million on a GPU), or no more than the head's input has elements. `predict`,
    `save` and calls of the model compute the logits as before.

    These metrics of the same output are computed from the same slices: SparseCategoricalAccuracy
    (or "accuracy"), SparseTopKCategoricalAccuracy,
    SparseCategoricalCrossentropy(from_logits=True) and KerasHub's Perplexity(from_logits=True).
    Tokens whose label is `ignore_index` count in none of them.

    Products are computed in the dtype of the head's input and summed in float32: under
    mixed_float16 that is float16 x float16 -> float32, even if the head's own dtype is float32. The
    kernel's gradient is float32.

    Args:
        head: the name of the layer that computes the logits, whose output is the model's. It has a
            `kernel` [D, V] and maybe a `bias` [V]; they may be properties, as in a head tied to an
            embedding. KerasHub's MaskedLMHead is taken too. None for the layer with the output's
            name, or else the last Dense layer.
        ignore_index: the label of tokens that count neither in the sum nor in its divisor: Keras's
            `ignore_class`.
        label_smoothing: as in `linear_cross_entropy`.
        z_loss: as in `linear_cross_entropy`.
        chunk_size: as in `linear_cross_entropy`.
        reduction: as in Keras's losses.
        name: as in Keras's losses.

    Raises:
        TypeError: raised if an argument is of another type.
        ValueError: raised if a number is out of its range; once the model is known, if the head is
            not a linear layer, or if there are metrics of the same output that need the logits.

    >>> import numpy as np, fastaccum as fa
    >>> ids = keras.Input((4,), dtype="int32")
    >>> model = keras.Sequential([ids, keras.layers.Embedding(9, 8), keras.layers.Dense(9)])
    >>> trainer = fa.Trainer(model, keras.optimizers.Adam(0.1), LinearCrossEntropy())
    >>> x = np.arange(36).reshape(9, 4) % 9
    >>> history = trainer.fit(x, (x + 1) % 9, batch_size=3, epochs=20, verbose=0)
    >>> history.history["loss"][-1] < 0.1
    True
    """

    def __init__(
        self,
        head: str | None = None,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        chunk_size: int | None = None,
        reduction: str = "sum_over_batch_size",
        name: str = "linear_cross_entropy",
    ):
        with checks.naming("reduction"):
            super().__init__(name=checks.object_name(name), reduction=reduction)
        if head is not None and not isinstance(head, str):
            raise TypeError(f"head={head!r} must be a layer's name: pass head.name.")
        self.head = head
        ignore_index, label_smoothing, z_loss = require_options(
            ignore_index, label_smoothing, z_loss
        )
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "z_loss": z_loss,
        }
        if chunk_size is not None:
            chunk_size = checks.whole_number("chunk_size", chunk_size)
        self.chunk_size = chunk_size

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Returns the losses from logits [..., V], where the head is not left out.

        This is the case in Keras's own `evaluate`.
        """
        labels = _labels(y_true, y_pred)
        if not y_pred.shape[-1] or not labels.shape.is_compatible_with(y_pred.shape[:-1]):
            raise ValueError(
                f"y_true of class indices {labels.shape} does not fit logits y_pred "
                f"{y_pred.shape}: they must be [...] and [..., classes]."
            )
        losses = cross_entropy_from_logits(y_pred, labels, **self.options)
        _attach_mask(losses, labels, self.options["ignore_index"])
        return losses

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "head": self.head,
            **self.options,
            "chunk_size": self.chunk_size,
        }


class FusedHeadLoss:
    """A `LinearCrossEntropy` with the linear layer that it takes over, for the train step.

    `ranks` says what the output's metrics need: None if there are none, True if one needs the
    rank of the label's score, as top-k accuracy does, and False otherwise.

    Raises ValueError if the model has no such layer.
    """

    def __init__(
        self,
        loss: LinearCrossEntropy,
        model: Model,
        output: str,
        classes: int | None,
        ranks: bool | None,
    ):
        self._loss = loss
        self._output = output
        self._ranks = ranks
        self.reduction = loss.reduction
        self.ignore_class = loss.options["ignore_index"]
        self.head = find_head(model, loss.head, output)
        require_linear(self.head, classes)
        self._reversible = is_reversible(self.head)

    @contextmanager
    def leave_head_out(self, observe: Callable[[tf.Tensor], None]) -> Iterator[None]:
        """Lets the head pass its input on, in the dtype in which it comes, and `observe` see it."""
        signature = inspect.signature(self.head.call)

        def pass_on(call: Callable[..., tf.Tensor], *args: Any, **kwargs: Any) -> tf.Tensor:
            arguments = signature.bind(*args, **kwargs).arguments
            if self._reversible and not arguments.get("reverse"):
                return call(*args, **kwargs)  # the layer embeds ids: it is no head in this call
            if is_masked_lm_head(self.head):
                sequence, mask_positions = arguments.values()
                inputs = self._before_projection(sequence, mask_positions)
            elif args:
                inputs = args[0]
            else:
                inputs = next(iter(arguments.values()))  # passed by name
            # A new tensor, whose consumers are only those of the logits: `require_hidden` asks.
            hidden = tf.identity(inputs)
            observe(hidden)
            return hidden

        # The attribute is public in Keras 3, and private in tf_keras.
        autocast = private.autocast.name
        if hasattr(self.head, "autocast"):
            autocast = "autocast"
        left_out = Interceptor(self.head, "call", pass_on, Role.BYPASS)
        with intercepting([left_out]), replaced([(self.head, autocast, False)]):
            yield

    def _before_projection(self, sequence: tf.Tensor, mask_positions: tf.Tensor) -> tf.Tensor:
        """Computes what KerasHub's MaskedLMHead projects to logits, from its arguments."""
        masked = keras.ops.take_along_axis(sequence, mask_positions[..., None], axis=1)
        hidden = private.intermediate_dense(self.head, masked)
        return private.intermediate_layer_norm(self.head, hidden)

    def require_hidden(self, y_pred: tf.Tensor, hidden: tf.Tensor | None) -> None:
        """Raises ValueError unless the model's output is what the head passed on, and that alone.

        Nothing else of the model may read what the head passed on.
        """
        if hidden is None or y_pred is not hidden:
            raise ValueError(
                f"The output {self._output!r} is not what layer {self.head.name!r} returns, so "
                "LinearCrossEntropy cannot take that layer's place. Pass head=..., the last "
                f"linear layer's name, or use {KERAS_LOSS}."
            )
        if tf.is_symbolic_tensor(y_pred) and y_pred.consumers():
            readers = [operation.name for operation in y_pred.consumers()]
            raise ValueError(
                f"The logits of layer {self.head.name!r} are also read by {readers}, and "
                f"LinearCrossEntropy never computes them. Use {KERAS_LOSS}."
            )

    def labels(self, y_true: tf.Tensor, hidden: tf.Tensor) -> tf.Tensor:
        """Returns class indices [...] with a mask of those that count, as Keras's losses have."""
        # A tensor of its own, since the mask is attached to it and must not be to `y_true`.
        labels = tf.identity(tf.cast(_labels(y_true, hidden), tf.int64))
        _attach_mask(labels, labels, self.ignore_class)
        return labels

    def sum(
        self, labels: tf.Tensor, hidden: tf.Tensor, counted: tf.Tensor, weights: tf.Tensor | None
    ) -> tuple[tf.Tensor, ScoredLabels | None]:
        """Returns the weighted sum of the losses that count, and the labels' scores for metrics.

        `counted`, bool [...], tells which labels count.
        """
        kernel = kernel_of(self.head)
        bias = bias_of(self.head)

        kernel_tensor = tf.convert_to_tensor(kernel.variable)
        counted_labels = tf.where(counted, labels, self.ignore_class)
        if weights is None:
            weights = tf.constant(1.0)
        bias_tensor = None
        if bias is not None:
            bias_tensor = tf.convert_to_tensor(bias)
        rounded_kernel = None
        if hidden.dtype in HALF:
            rounded_kernel = copy_of(kernel.variable, hidden.dtype)
        soft_cap = None
        if self._reversible:
            soft_cap = self.head.logit_soft_cap

        total, scores = linear_cross_entropy_sum_and_scores(
            hidden,
            kernel_tensor,
            counted_labels,
            weights,
            bias_tensor,
            rounded_kernel=rounded_kernel,
            transpose_kernel=kernel.is_transposed,
            chunk_size=self._loss.chunk_size,
            ranks=self._ranks,
            soft_cap=soft_cap,
            **self._loss.options,
        )
        counted_whole = tf.broadcast_to(counted, labels.shape)
        if scores is None:
            return total, None
        return total, ScoredLabels(labels, counted_whole, scores, self.ignore_class)


def replacement(loss: Any) -> str | None:
    """Writes the `loss` argument that takes the place of a sparse cross-entropy from logits.

    The result is None for other losses.
    """
    arguments: dict[str, Any] = private.fn_kwargs(loss, {})
    is_sparse = known_name(function_of(loss)) in (
        "keras.sparse_categorical_crossentropy",
        "tf_keras.sparse_categorical_crossentropy",
    )
    if not is_sparse or not arguments.get("from_logits"):
        return None
    ignored = arguments.get("ignore_class")
    argument = ""
    if ignored is not None:
        argument = f"ignore_index={ignored}"
    return f"loss=fastaccum.LinearCrossEntropy({argument})"


def _attach_mask(tensor: tf.Tensor, labels: tf.Tensor, ignore_index: int) -> None:
    """Attaches the Keras mask of labels that count to a tensor, as Keras's own losses do."""
    private.keras_mask.set(tensor, labels != ignore_index)


def _labels(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    """Returns class indices [...] for predictions [..., D], from targets [...] or [..., 1]."""
    y_true = checks.as_tensor("y_true", y_true)
    if y_pred.shape.rank == 0:
        raise ValueError("y_pred is a scalar: it must be logits [..., classes].")
    if y_true.shape.rank == y_pred.shape.rank:
        if y_true.shape[-1] != 1:
            raise ValueError(
                f"LinearCrossEntropy takes class indices, but y has shape {y_true.shape}: pass "
                "np.argmax(y, axis=-1)."
            )
        y_true = tf.squeeze(y_true, -1)
    return to_whole(y_true)
