"""Layers of Keras 3 and tf_keras in another form: one that XLA compiles in a loop, or that saves memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from fastaccum.adapters.interceptors import Interceptor, Role
from fastaccum.adapters.packages import of_keras
from fastaccum.kernels import fp32_layers
from fastaccum.kernels.gradients import accumulator_dtype
from fastaccum.kernels.norms import layer_norm, rms_norm
from fastaccum.kernels.xla_ops import HALF

Call = Callable[..., tf.Tensor]  # a layer's method


def make_forms(layers: Iterable[keras.layers.Layer]) -> list[Interceptor]:
    """Returns interceptors for layers that have another form."""
    found: list[tuple[keras.layers.Layer, str, Callable[..., tf.Tensor]]] = []
    for layer in layers:
        if type(layer) is keras.layers.LayerNormalization and not layer.rms_scaling:
            found.append((layer, "call", _normalize_layer))
        elif type(layer) is keras.layers.RMSNormalization:
            found.append((layer, "call", _normalize_rms))
        elif _is_dilated(layer):
            found.append((layer, "convolution_op", _convolve))
    return [Interceptor(layer, name, functools.partial(form, layer), Role.FORM) for layer, name, form in found]


# The forms take the arguments of the layer's method by its names: Keras passes on what it is called with.


def _is_dilated(layer: keras.layers.Layer) -> bool:
    conv2d = type(layer) is fp32_layers.Fp32Conv2D or (of_keras(type(layer)) and type(layer).__name__ == "Conv2D")
    return conv2d and layer.dilation_rate != (1, 1) and layer.data_format == "channels_last"


def _convolve(layer: keras.layers.Layer, call: Call, inputs: tf.Tensor, kernel: Any) -> tf.Tensor:
    if len(inputs.shape) != 4:  # tf_keras takes several dimensions of rows
        return call(inputs, kernel)
    # Keras dilates by way of a space-to-batch op whose gradient XLA cannot compile in a loop.
    kernel = tf.convert_to_tensor(kernel)
    return tf.nn.conv2d(inputs, kernel, layer.strides, layer.padding.upper(), dilations=layer.dilation_rate)


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
