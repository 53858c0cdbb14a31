"""Keras layers with float32 weight gradients, and with products in float8."""

from __future__ import annotations

import functools
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from fastaccum.kernels import private, trace_context
from fastaccum.kernels.checks import shown
from fastaccum.kernels.custom_gradients import custom_gradient
from fastaccum.kernels.float8 import E4M3
from fastaccum.kernels.hoisted_casts import copy_of
from fastaccum.kernels.layer_stack import LayerStack
from fastaccum.kernels.matmul import (
    convolution_fp32_wgrad,
    einsum_float8,
    einsum_fp32_wgrad,
    matmul_axes,
    matmul_float8,
    matmul_fp32_wgrad,
)
from fastaccum.kernels.norms import activated
from fastaccum.kernels.xla_ops import HALF

Shape = Sequence[int | None]
Call = Callable[..., tf.Tensor]  # a layer's `call`
Inputs: TypeAlias = "tf.Tensor | tf.SparseTensor"
_SWITCHED: dict[type, type] = {}  # what each class of Keras is switched to
_KERAS: dict[type, type] = {}  # the class of Keras that each of these stands for


def fp32_weight_gradients(model: keras.layers.Layer) -> list[keras.layers.Layer]:
    """Switches a Keras 3 model, in place, to weight gradients computed in float32.

    The outputs stay those of Keras. Under a mixed policy (float16 or bfloat16 compute, float32
    variables) the gradients of kernels and biases become those of `matmul_fp32_wgrad`: rounded
    nowhere, and finite past 65504. Under the policy "bfloat16" a train step of fastaccum sums them
    so, too; elsewhere they are rounded to the variables' dtype. Switched is every `Dense`,
    `EinsumDense`, `Conv1D`, `Conv2D`, `ReversibleEmbedding`, `MultiHeadAttention` and
    `GroupQueryAttention`, however deep in the model, in a `LayerStack` too. Left alone are layers
    that compute in float32, `Embedding` (Keras sums its gradient in float32), subclasses, layers
    with LoRA or quantization, and an `EinsumDense` that sums over an axis of its input alone.

    Only a layer's class changes, to a subclass of Keras's. So a switched model saves, loads (where
    `fastaccum` is imported) and clones as a switched one, but for a layer of your own that makes
    such layers inside: once loaded, it has made plain ones, so switch again. Keras quantizes only
    its own classes, so switch back first. `fastaccum.Trainer` does this by itself, for as long as
    it traces a step.

    Returns:
        The layers switched by this call: what `plain_weight_gradients` takes to undo it.

    >>> head = keras.layers.Dense(2, dtype="mixed_float16", name="head")
    >>> model = keras.Sequential([keras.Input((4,)), head])
    >>> [layer.name for layer in fp32_weight_gradients(model)]
    ['head']
    >>> [layer.name for layer in plain_weight_gradients(model)]
    ['head']
    >>> type(model.layers[0]) is keras.layers.Dense
    True
    """
    layers = []
    for layer in all_layers(model):
        if type(layer) in _SWITCHED and _in_scope(layer):
            layers.append(layer)
    return _change_class(layers, _SWITCHED)


def fp32_calls(layers: Iterable[keras.layers.Layer]) -> list[tuple[keras.layers.Layer, Call]]:
    """Returns the layers that `fp32_weight_gradients` switches, with the `call_fp32` of each."""
    calls: list[tuple[keras.layers.Layer, Call]] = []
    for layer in layers:
        call_fp32 = getattr(_SWITCHED.get(type(layer)), "call_fp32", None)
        if call_fp32 is not None and _in_scope(layer):
            calls.append((layer, functools.partial(call_fp32, layer)))
    return calls


def float8_call(layer: keras.layers.Layer) -> Callable[[tf.Tensor], tf.Tensor] | None:
    """Returns what computes a layer by a product in float8, of inputs for which `autocasts` holds.

    None for a layer that cannot: of another class, quantized, not mixed precision, or not built.
    """
    call = _FLOAT8_CALLS.get(_KERAS.get(type(layer), type(layer)))
    if call is None or not layer.built or not _is_mixed(layer):
        return None
    return functools.partial(call, layer)


def plain_weight_gradients(
    layers: keras.layers.Layer | Iterable[keras.layers.Layer],
) -> list[keras.layers.Layer]:
    """Undoes `fp32_weight_gradients` for the layers that it returned, or for all of a model.

    Returns:
        The layers that were switched back.
    """
    try:
        if isinstance(layers, keras.layers.Layer):
            layers = list(all_layers(layers))
        else:
            layers = list(layers)
    except Exception:  # of whatever was passed
        layers = [layers]
    if not all(isinstance(layer, keras.layers.Layer) for layer in layers):
        raise TypeError(f"layers={shown(layers)} must be a Keras 3 model or a list of its layers.")
    return _change_class(layers, _KERAS)


def _change_class(
    layers: Iterable[keras.layers.Layer], to: dict[type, type]
) -> list[keras.layers.Layer]:
    """Changes the class of each layer that `to` has one for, and returns these layers."""
    changed = {id(layer): layer for layer in layers if type(layer) in to}
    for layer in changed.values():
        # Past Keras's own __setattr__, which tracks what is assigned.
        object.__setattr__(layer, "__class__", to[type(layer)])
    return list(changed.values())


def all_layers(model: keras.layers.Layer) -> Iterator[keras.layers.Layer]:
    """Yields each layer of a Keras 3 model, and those that a LayerStack calls untracked."""
    if not isinstance(model, keras.layers.Layer):
        raise TypeError(f"model={shown(model)} is not a Keras 3 model or layer.")
    for layer in private.flatten_layers(model):
        yield layer
        if isinstance(layer, LayerStack):
            yield from all_layers(layer.template)


def _in_scope(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer computes in half precision from weights of its own alone."""
    return _is_mixed(layer) and not getattr(layer, "lora_enabled", False)


def _is_mixed(layer: keras.layers.Layer) -> bool:
    half_dtypes = [dtype.name for dtype in HALF]
    return (
        layer.compute_dtype in half_dtypes
        and layer.variable_dtype in ("float32", "bfloat16")
        and layer.quantization_mode is None
    )


def _switches(layer: keras.layers.Layer, inputs: Inputs, weight: keras.Variable) -> bool:
    """Returns whether a layer may leave Keras's call.

    It may not with LoRA, sparse inputs, or a `weight` without autocast.
    """
    return autocasts(layer, inputs, weight) and _in_scope(layer)


def autocasts(layer: keras.layers.Layer, inputs: Inputs, weight: keras.Variable) -> bool:
    """Tells if a layer casts its weight to the dtype of dense inputs."""
    if not isinstance(inputs, tf.Tensor):
        return False
    return inputs.dtype == layer.compute_dtype == weight.dtype


def _float32(variable: keras.Variable) -> tf.Tensor:
    """Returns a variable's value, which Keras would cast to the layer's compute dtype."""
    with private.AutocastScope(None):
        value = tf.convert_to_tensor(variable)
        if value.dtype == tf.bfloat16:
            return _widened(value, variable.value)
        return value


def _widened(value: tf.Tensor, variable: tf.Variable) -> tf.Tensor:
    """Returns a bfloat16 variable's value in float32, whose gradient a train step adds in float32.

    Elsewhere the gradient is rounded to the variable's dtype, as a cast's is.
    """
    accumulator = trace_context.accumulator_of(variable)

    @custom_gradient
    def widen(value):
        def gradient(upstream):
            rounded = tf.cast(upstream, value.dtype)
            if accumulator is not None:
                accumulator.note(rounded, accumulator.total + upstream)
            return rounded

        return tf.cast(value, tf.float32), gradient

    return widen(value)


def _finish(layer: keras.layers.Layer, y: tf.Tensor) -> tf.Tensor:
    """Adds a layer's bias and applies its activation."""
    if layer.bias is not None:
        bias = _float32(layer.bias)
        if getattr(layer, "data_format", None) == "channels_first":
            bias = tf.reshape(bias, [-1, *[1] * layer.rank])
        # Broadcast before the cast, so that autodiff sums after its own cast, in float32.
        y += tf.cast(tf.broadcast_to(bias, tf.shape(y)), y.dtype)
    if layer.activation is None:
        return y
    return activated(layer.activation, y)


def _weight(variable: keras.Variable, inputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Returns a variable's value, and its copy in the inputs' dtype where that is at hand."""
    return _float32(variable), copy_of(variable, inputs.dtype)


def _lora_matrices(layer: keras.layers.Layer) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns A, and B times alpha / rank: LoRA adds their product to the kernel."""
    scale = layer.lora_alpha / layer.lora_rank
    return _float32(layer.lora_kernel_a), scale * _float32(layer.lora_kernel_b)


def low_rank_equations(equation: str, x: tf.Tensor, kernel: tf.Tensor) -> tuple[str, str] | None:
    """Returns the equations of two einsums, by LoRA's A and then B, that give `x @ (A @ B)`.

    None where x has the kernel's last axis, along which LoRA's product is taken apart.
    """
    axes = matmul_axes(equation, x, kernel)
    if axes is None:
        return None
    of_x, of_kernel, of_y = axes
    last = of_kernel[-1]
    if last in of_x:
        return None
    rank = next(axis for axis in string.ascii_letters if axis not in of_x + of_kernel)
    of_low = of_y.replace(last, rank)
    return f"{of_x},{of_kernel[:-1]}{rank}->{of_low}", f"{of_low},{rank}{last}->{of_y}"


def _convolve(
    layer: keras.layers.Layer, call: Call, convolution: Call, inputs: Inputs
) -> tf.Tensor:
    if not _switches(layer, inputs, private.kernel(layer)):
        return call(inputs)
    pixels = None
    is_pointwise = set(layer.kernel_size) == {1} and layer.groups == 1
    if is_pointwise and layer.data_format == "channels_last":
        strided = [slice(None, None, stride) for stride in layer.strides]
        pixels = (slice(None), *strided)
    kernel, copy = _weight(private.kernel(layer), inputs)
    return _finish(layer, convolution_fp32_wgrad(convolution, inputs, kernel, copy, pixels))


def _switched_from_base(layer: Any) -> Any:
    """Registers a subclass of a class of Keras's as what that is switched to.

    Its `call_fp32`, if it has one, is called with Keras's `call` as its first argument.
    """
    base = layer.__base__
    _SWITCHED[base] = layer
    _KERAS[layer] = base
    if hasattr(layer, "call_fp32"):

        @functools.wraps(base.call)  # whose signature Keras reads
        def call(self, *args, **kwargs):
            return self.call_fp32(functools.partial(base.call, self), *args, **kwargs)

        layer.call = call
    return keras.saving.register_keras_serializable("fastaccum")(layer)


@_switched_from_base
class Fp32Dense(keras.layers.Dense):
    """`keras.layers.Dense` with float32 weight gradients."""

    def call_fp32(self, call: Call, inputs: Inputs, training: bool | None = None) -> tf.Tensor:
        if not _switches(self, inputs, private.kernel(self)):
            return call(inputs, training=training)
        kernel, copy = _weight(private.kernel(self), inputs)
        return _finish(self, matmul_fp32_wgrad(inputs, kernel, copy))


@_switched_from_base
class Fp32EinsumDense(keras.layers.EinsumDense):
    """`keras.layers.EinsumDense` with float32 weight gradients."""

    def call_fp32(self, call: Call, inputs: Inputs, training: bool | None = None) -> tf.Tensor:
        if not (
            _switches(self, inputs, private.kernel(self))
            and matmul_axes(self.equation, inputs, private.kernel(self))
        ):
            return call(inputs, training=training)
        kernel, copy = _weight(private.kernel(self), inputs)
        return _finish(self, einsum_fp32_wgrad(self.equation, inputs, kernel, copy))


@_switched_from_base
class Fp32Conv1D(keras.layers.Conv1D):
    """`keras.layers.Conv1D` with float32 weight gradients."""

    def call_fp32(self, call: Call, inputs: Inputs) -> tf.Tensor:
        def causal(x, kernel):
            x = keras.ops.pad(x, private.compute_causal_padding(self))
            return keras.ops.conv(
                x, kernel, self.strides, "valid", self.data_format, self.dilation_rate
            )

        convolution = causal if self.padding == "causal" else self.convolution_op
        return _convolve(self, call, convolution, inputs)


@_switched_from_base
class Fp32Conv2D(keras.layers.Conv2D):
    """`keras.layers.Conv2D` with float32 weight gradients."""

    def call_fp32(self, call: Call, inputs: Inputs) -> tf.Tensor:
        return _convolve(self, call, self.convolution_op, inputs)


@_switched_from_base
class Fp32ReversibleEmbedding(keras.layers.ReversibleEmbedding):
    """`keras.layers.ReversibleEmbedding` with float32 weight gradients of its projection."""

    def call_fp32(self, call: Call, inputs: Inputs, reverse: bool = False) -> tf.Tensor:
        is_projection = reverse and self.reverse_dtype is None
        if not (is_projection and _switches(self, inputs, private.embeddings(self))):
            return call(inputs, reverse=reverse)
        if self.tie_weights:
            kernel, copy = _weight(private.embeddings(self), inputs)
            kernel = tf.transpose(kernel)
            if copy is not None:
                copy = tf.transpose(copy)
        else:
            kernel, copy = _weight(self.reverse_embeddings, inputs)
        logits = matmul_fp32_wgrad(inputs, kernel, copy)
        soft_cap = self.logit_soft_cap
        if soft_cap is None:
            return logits
        return soft_cap * tf.tanh(logits / soft_cap)


@_switched_from_base
class Fp32MultiHeadAttention(keras.layers.MultiHeadAttention):
    """`keras.layers.MultiHeadAttention` whose projections have float32 weight gradients."""

    def build(self, query_shape: Shape, value_shape: Shape, key_shape: Shape | None = None) -> None:
        super().build(query_shape, value_shape, key_shape)
        fp32_weight_gradients(self)


@_switched_from_base
class Fp32GroupQueryAttention(keras.layers.GroupQueryAttention):
    """`keras.layers.GroupQueryAttention` whose projections have float32 weight gradients."""

    def build(self, query_shape: Shape, value_shape: Shape, key_shape: Shape | None = None) -> None:
        super().build(query_shape, value_shape, key_shape)
        fp32_weight_gradients(self)


def _dense_float8(layer: keras.layers.Dense, x: tf.Tensor) -> tf.Tensor:
    kernel = private.kernel(layer)
    y = matmul_float8(x, _float32(kernel), copy_of(kernel, E4M3))
    if layer.lora_enabled:
        a, b = _lora_matrices(layer)
        y += matmul_fp32_wgrad(matmul_fp32_wgrad(x, a), b)
    return _finish(layer, y)


def _einsum_dense_float8(layer: keras.layers.EinsumDense, x: tf.Tensor) -> tf.Tensor:
    kernel = private.kernel(layer)
    y = einsum_float8(layer.equation, x, _float32(kernel), copy_of(kernel, E4M3))
    if layer.lora_enabled:
        equations = low_rank_equations(layer.equation, x, kernel)
        assert equations is not None, "the caller has asked for them"
        low_rank = x
        for equation, factor in zip(equations, _lora_matrices(layer), strict=True):
            low_rank = einsum_fp32_wgrad(equation, low_rank, factor)
        y += low_rank
    return _finish(layer, y)


_FLOAT8_CALLS: dict[type, Callable[[Any, tf.Tensor], tf.Tensor]] = {
    keras.layers.Dense: _dense_float8,
    keras.layers.EinsumDense: _einsum_dense_float8,
}
