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
    """Returns interceptors with other forms of layers' computations.

    XLA compiles these in a loop or in less memory; without XLA they make fewer passes over memory.
    """
    interceptors = []
    for layer in layers:
        choice = _choose_form(layer, uses_xla)
        if choice is not None:
            method, form = choice
            replacement = functools.partial(form, layer)
            interceptors.append(Interceptor(layer, method, replacement, Role.FORM))
    return interceptors


def _choose_form(
    layer: keras.layers.Layer, uses_xla: bool
) -> tuple[str, Callable[..., tf.Tensor]] | None:
    """Returns a layer's method and another form of it; None for a layer that has none."""
    if not uses_xla:
        if _is_plain_batch_norm(layer) and not has_gpu():
            return "call", _normalize_batch
        return None
    if type(layer) is keras.layers.LayerNormalization and not layer.rms_scaling:
        return "call", _normalize_layer
    if type(layer) is keras.layers.RMSNormalization:
        return "call", _normalize_rms
    if _is_dilated(layer):
        return "convolution_op", _convolve
    return None


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
    gamma = layer.gamma
    if gamma is not None:
        gamma = tf.cast(gamma, accumulator_dtype(inputs.dtype))
    beta = layer.beta
    if beta is not None:
        beta = tf.cast(beta, accumulator_dtype(inputs.dtype))
    return tf.cast(layer_norm(inputs, gamma, beta, epsilon=layer.epsilon), layer.compute_dtype)


def _normalize_rms(layer: keras.layers.Layer, call: Call, x: tf.Tensor) -> tf.Tensor:
    if not _over_last_axis(layer, x):
        return call(x)
    return rms_norm(x, tf.cast(layer.scale, accumulator_dtype(x.dtype)), epsilon=layer.epsilon)


def _is_plain_batch_norm(layer: keras.layers.Layer) -> bool:
    if type(layer) is not keras.layers.BatchNormalization or layer.variable_dtype != "float32":
        return False
    renormalizes = getattr(layer, "renorm", False)  # older versions have no renorm
    return not (layer.synchronized or renormalizes)


def _normalize_batch(
    layer: keras.layers.Layer,
    call: Call,
    inputs: tf.Tensor,
    training: bool | None = None,
    mask: Any = None,
) -> tf.Tensor:
    can_fuse = _over_last_axis(layer, inputs) and inputs.dtype != tf.float64 and mask is None
    if not (can_fuse and training and layer.trainable):
        return call(inputs, training=training, mask=mask)
    size = layer.moving_mean.shape
    scale = tf.convert_to_tensor(layer.gamma) if layer.scale else tf.ones(size)
    offset = tf.convert_to_tensor(layer.beta) if layer.center else tf.zeros(size)
    y, mean, variance = batch_norm(
        tf.cast(inputs, tf.float32), scale, offset, epsilon=layer.epsilon
    )
    for moving, of_batch in [(layer.moving_mean, mean), (layer.moving_variance, variance)]:
        moving.assign(moving * layer.momentum + of_batch * (1.0 - layer.momentum))
    return tf.cast(y, layer.compute_dtype)


def _over_last_axis(layer: keras.layers.Layer, inputs: tf.Tensor) -> bool:
    """Tells if a layer normalizes floating-point inputs over their last axis."""
    if not isinstance(inputs, tf.Tensor) or not inputs.shape[-1]:
        return False
    if inputs.dtype not in (*HALF, tf.float32, tf.float64):
        return False
    if layer.epsilon is None:  # for which Keras has a number of its own
        return False
    return tf.nest.flatten(layer.axis) in ([-1], [inputs.shape.rank - 1])
