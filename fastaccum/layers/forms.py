"""Layers of Keras 3 and tf_keras in another form, for speed or precision."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from fastaccum.basics.attributes import kinds, of_keras
from fastaccum.kernels import fp32_layers
from fastaccum.kernels.devices import has_gpu
from fastaccum.kernels.gradients import accumulator_dtype
from fastaccum.kernels.norms import batch_norm, layer_norm, rms_norm
from fastaccum.kernels.xla_ops import HALF
from fastaccum.layers.interceptors import Interceptor, Role

Call = Callable[..., tf.Tensor]  # a layer's method


def make_forms(layers: Iterable[keras.layers.Layer], uses_xla: bool) -> list[Interceptor]:
    """Returns interceptors with forms that XLA compiles in a loop or in less memory, or that pass
    less over memory.
    """
    found: list[tuple[keras.layers.Layer, str, Callable[..., tf.Tensor]]] = []
    for layer in layers:
        if not uses_xla:
            if _is_plain_batch_norm(layer) and not has_gpu():
                found.append((layer, "call", _normalize_batch))
        elif type(layer) is keras.layers.LayerNormalization and not layer.rms_scaling:
            found.append((layer, "call", _normalize_layer))
        elif type(layer) is keras.layers.RMSNormalization:
            found.append((layer, "call", _normalize_rms))
        elif _is_dilated(layer):
            found.append((layer, "convolution_op", _convolve))
    return [
        Interceptor(layer, name, functools.partial(form, layer), Role.FORM)
        for layer, name, form in found
    ]


def make_fp32(layers: Iterable[keras.layers.Layer]) -> list[Interceptor]:
    """Returns interceptors that compute weight gradients in float32 under mixed precision."""
    return [
        Interceptor(layer, "call", call, Role.PRECISION)
        for layer, call in fp32_layers.fp32_calls(layers)
    ]


# The forms take the arguments of the layer's method by its names: Keras passes on what it is called
# with.


def _is_dilated(layer: keras.layers.Layer) -> bool:
    if {"keras.Conv2D", "tf_keras.Conv2D"}.isdisjoint(kinds(layer)):
        return False
    conv2d = of_keras(type(layer).convolution_op)
    return conv2d and layer.dilation_rate != (1, 1) and layer.data_format == "channels_last"


def _convolve(layer: keras.layers.Layer, call: Call, inputs: tf.Tensor, kernel: Any) -> tf.Tensor:
    if len(inputs.shape) != 4:  # tf_keras takes several dimensions of rows
        return call(inputs, kernel)
    # Keras dilates by way of a space-to-batch op whose gradient XLA cannot compile in a loop.
    kernel = tf.convert_to_tensor(kernel)
    return tf.nn.conv2d(
        inputs, kernel, layer.strides, layer.padding.upper(), dilations=layer.dilation_rate
    )


def _normalize_layer(layer: keras.layers.Layer, call: Call, inputs: tf.Tensor) -> tf.Tensor:
    if not _over_last_axis(layer, inputs):
        return call(inputs)
    weights = (
        None if w is None else tf.cast(w, accumulator_dtype(inputs.dtype))
        for w in (layer.gamma, layer.beta)
    )
    return tf.cast(layer_norm(inputs, *weights, epsilon=layer.epsilon), layer.compute_dtype)


def _normalize_rms(layer: keras.layers.Layer, call: Call, x: tf.Tensor) -> tf.Tensor:
    if not _over_last_axis(layer, x):
        return call(x)
    return rms_norm(x, tf.cast(layer.scale, accumulator_dtype(x.dtype)), epsilon=layer.epsilon)


def _is_plain_batch_norm(layer: keras.layers.Layer) -> bool:
    plain = type(layer) is keras.layers.BatchNormalization and layer.variable_dtype == "float32"
    # older versions have no renorm
    return plain and not (layer.synchronized or getattr(layer, "renorm", False))


def _normalize_batch(
    layer: keras.layers.Layer,
    call: Call,
    inputs: tf.Tensor,
    training: bool | None = None,
    mask: Any = None,
) -> tf.Tensor:
    fused = _over_last_axis(layer, inputs) and inputs.dtype != tf.float64 and mask is None
    if not (fused and training and layer.trainable):
        return call(inputs, training=training, mask=mask)
    size = layer.moving_mean.shape
    scale = tf.convert_to_tensor(layer.gamma) if layer.scale else tf.ones(size)
    offset = tf.convert_to_tensor(layer.beta) if layer.center else tf.zeros(size)
    y, mean, variance = batch_norm(
        tf.cast(inputs, tf.float32), scale, offset, epsilon=layer.epsilon
    )
    for moving, of_batch in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
        moving.assign(moving * layer.momentum + of_batch * (1.0 - layer.momentum))
    return tf.cast(y, layer.compute_dtype)


def _over_last_axis(layer: keras.layers.Layer, inputs: tf.Tensor) -> bool:
    floating = isinstance(inputs, tf.Tensor) and inputs.dtype in (*HALF, tf.float32, tf.float64)
    last = (
        floating
        and bool(inputs.shape[-1])
        and tf.nest.flatten(layer.axis) in ([-1], [inputs.shape.rank - 1])
    )
    return last and layer.epsilon is not None  # for None Keras has a number of its own
