"""Layers of Keras 3 and tf_keras in the form that XLA compiles in a loop, and runs fast there."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from fastaccum.adapters.interceptors import Interceptor, Role
from fastaccum.adapters.packages import of_keras
from fastaccum.kernels import cpu_layers, fp32_layers
from fastaccum.kernels.gradients import accumulator_dtype
from fastaccum.kernels.norms import layer_norm, rms_norm
from fastaccum.kernels.xla_ops import HALF

# In elements. Each takes a slice and more of its own: larger ones compile longer, and larger windows run no faster.
_LARGEST_WINDOW = 4
_LARGEST_DEPTHWISE_KERNEL = 64

Call = Callable[..., tf.Tensor]  # a layer's method

# Those whose `call` holds their convolution.
_TRANSPOSED = "Conv1DTranspose", "Conv2DTranspose"
_CONVOLUTIONS = "Conv1D", *_TRANSPOSED, "DepthwiseConv1D", "DepthwiseConv2D", "SeparableConv1D", "SeparableConv2D"


def make_forms(layers: Iterable[keras.layers.Layer], fast_gradients: bool) -> list[Interceptor]:
    """Returns interceptors for layers that have another form, with `fast_gradients` also for speed on a CPU."""
    found: list[tuple[keras.layers.Layer, str, Callable[..., tf.Tensor]]] = []
    for layer in layers:
        if fast_gradients and type(layer) is keras.layers.BatchNormalization:
            found.append((layer, "call", _normalize_batch))
        elif type(layer) is keras.layers.LayerNormalization and not layer.rms_scaling:
            found.append((layer, "call", _normalize_layer))
        elif type(layer) is keras.layers.RMSNormalization:
            found.append((layer, "call", _normalize_rms))
        if getattr(layer, "data_format", None) != "channels_last":
            continue
        kind = type(layer).__name__ if of_keras(type(layer)) else ""
        if kind == "Conv2D" or type(layer) is fp32_layers.Fp32Conv2D:
            if layer.dilation_rate != (1, 1) or (fast_gradients and layer.groups == 1):
                found.append((layer, "convolution_op", _convolve))
        elif fast_gradients and kind == "MaxPooling2D" and _is_small(layer):
            found.append((layer, "call", _pool))
        elif fast_gradients and kind in _CONVOLUTIONS and _is_plain(layer, kind):
            found.append((layer, "call", _call_convolution))
    return [Interceptor(layer, name, functools.partial(form, layer), Role.FORM) for layer, name, form in found]


# The forms take the arguments of the layer's method by its names: Keras passes on what it is called with.


def _convolve(layer: keras.layers.Layer, call: Call, inputs: tf.Tensor, kernel: Any) -> tf.Tensor:
    if len(inputs.shape) != 4:  # tf_keras takes several dimensions of rows
        return call(inputs, kernel)
    kernel = tf.convert_to_tensor(kernel)
    if layer.dilation_rate == (1, 1):
        return cpu_layers.conv2d(inputs, kernel, layer.strides, layer.padding)
    # Keras dilates by way of a space-to-batch op whose gradient XLA cannot compile in a loop.
    return tf.nn.conv2d(inputs, kernel, layer.strides, layer.padding.upper(), dilations=layer.dilation_rate)


def _is_plain(layer: keras.layers.Layer, kind: str) -> bool:
    small = kind in ("Conv1D", *_TRANSPOSED) or math.prod(layer.kernel_size) <= _LARGEST_DEPTHWISE_KERNEL
    return small and getattr(layer, "groups", 1) == 1 and set(layer.dilation_rate) == {1}


def _call_convolution(layer: keras.layers.Layer, call: Call, inputs: tf.Tensor) -> tf.Tensor:
    """Computes Keras's `call` with another form of its convolution; a sequence is an image of one row."""
    if len(inputs.shape) != layer.rank + 2 or None in inputs.shape[1:]:
        return call(inputs)
    row = [1] * (2 - layer.rank)
    names = "kernel", "depthwise_kernel", "pointwise_kernel"  # tf_keras has other names than Keras 3
    variables = [getattr(layer, name) for name in names if getattr(layer, name, None) is not None]
    kernel, *pointwise = (tf.reshape(v, [*row, *v.shape]) for v in variables)
    if not inputs.dtype == kernel.dtype == layer.compute_dtype:
        return call(inputs)
    x, strides = tf.reshape(inputs, [-1, *row, *inputs.shape[1:]]), (*row, *layer.strides)
    kind = type(layer).__name__
    if kind in _TRANSPOSED:
        size = layer.compute_output_shape(inputs.shape)[1:-1]
        y = cpu_layers.conv2d_transpose(x, kernel, [*row, *size], strides, layer.padding)
    elif kind == "Conv1D":
        causal = layer.padding == "causal"
        x = tf.pad(x, [[0, 0], [0, 0], [layer.kernel_size[0] - 1, 0], [0, 0]]) if causal else x
        y = cpu_layers.conv2d(x, kernel, strides, "valid" if causal else layer.padding)
    else:
        y = cpu_layers.depthwise_conv2d(x, kernel, strides, layer.padding)
        y = cpu_layers.conv2d(y, *pointwise) if pointwise else y
    y = tf.squeeze(y, [1]) if row else y
    y = y + tf.convert_to_tensor(layer.bias) if layer.use_bias else y
    return y if layer.activation is None else layer.activation(y)


def _is_small(layer: keras.layers.Layer) -> bool:
    return layer.strides == layer.pool_size and math.prod(layer.pool_size) <= _LARGEST_WINDOW


def _pool(layer: keras.layers.Layer, call: Call, inputs: tf.Tensor) -> tf.Tensor:
    sizes = inputs.shape[1:3]
    whole = None not in sizes and all(size % window == 0 for size, window in zip(sizes, layer.pool_size, strict=True))
    if whole or (layer.padding == "valid" and None not in sizes):
        return cpu_layers.max_pool2d(inputs, layer.pool_size)
    return call(inputs)


def _normalize_batch(
    layer: keras.layers.Layer, call: Call, inputs: tf.Tensor, training: bool | None = None, mask: Any = None
) -> tf.Tensor:
    special = layer.synchronized or getattr(layer, "renorm", False) or layer.axis not in (-1, len(inputs.shape) - 1)
    if special or mask is not None or not (training and layer.trainable) or inputs.dtype == tf.float64:
        return call(inputs, training=training, mask=mask)
    x = tf.cast(inputs, tf.float32)
    channels = [x.shape[-1]]
    scale = tf.cast(layer.gamma, x.dtype) if layer.scale else tf.ones(channels)
    offset = tf.cast(layer.beta, x.dtype) if layer.center else tf.zeros(channels)
    y, *moments = cpu_layers.batch_norm(x, scale, offset, layer.epsilon)
    for moving, value in zip((layer.moving_mean, layer.moving_variance), moments, strict=True):
        moving.assign(tf.cast(moving, x.dtype) * layer.momentum + value * (1.0 - layer.momentum))
    return tf.cast(y, layer.compute_dtype)


def _normalize_layer(layer: keras.layers.Layer, call: Call, inputs: tf.Tensor) -> tf.Tensor:
    if not _over_last_axis(layer, inputs):
        return call(inputs)
    weights = (None if w is None else tf.cast(w, accumulator_dtype(inputs.dtype)) for w in (layer.gamma, layer.beta))
    return tf.cast(layer_norm(inputs, *weights, epsilon=layer.epsilon), layer.compute_dtype)


def _normalize_rms(layer: keras.layers.Layer, call: Call, x: tf.Tensor) -> tf.Tensor:
    if not _over_last_axis(layer, x):
        return call(x)
    return rms_norm(x, tf.cast(layer.scale, accumulator_dtype(x.dtype)), epsilon=layer.epsilon)


def _over_last_axis(layer: keras.layers.Layer, inputs: tf.Tensor) -> bool:
    floating = isinstance(inputs, tf.Tensor) and inputs.dtype in (*HALF, tf.float32, tf.float64)
    last = floating and bool(inputs.shape[-1]) and list(layer.axis) in ([-1], [inputs.shape.rank - 1])
    return last and layer.epsilon is not None  # for None Keras has a number of its own
