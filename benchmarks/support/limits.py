"""Measures the limits of a train step: its necessary FLOPs, a matmul's rate, memory."""

import math
import pathlib
import re
import time

import keras
import tensorflow as tf

from fastaccum.kernels.layer_stack import LayerStack
from fastaccum.transformer import CausalSelfAttention

# Rows and columns of the matrices whose matmul sets the rate: large enough to use every core.
_MATMUL_SIZE = 1024


def matmul_rate(runs=5):
    """Returns the FLOP/s of the fastest of `runs` float32 matmuls of 1,024^3 through XLA."""
    square = tf.random.stateless_normal([_MATMUL_SIZE, _MATMUL_SIZE], seed=[0, 0])
    _matmul(square).numpy()  # compiles
    fastest = min(_seconds_of_matmul(square) for _ in range(runs))
    return 2 * _MATMUL_SIZE**3 / fastest


@tf.function(jit_compile=True)
def _matmul(square):
    return tf.matmul(square, square)


def _seconds_of_matmul(square):
    started = time.perf_counter()
    # Waits for the result. On a CPU, `numpy` copies nothing.
    _matmul(square).numpy()
    return time.perf_counter() - started


def train_flops(model, example):
    """Counts the floating-point operations that training on one example needs.

    A product of the forward pass has two products in the backward pass, for the gradients of both
    factors. Counted are matmuls, convolutions and causal attention, a multiply-add as two; not
    counted are recomputation and gradients of the model's inputs.

    Args:
        model: a Keras model whose products are in Dense, Conv2D, `TransformerBlock` and
            `LayerStack` layers.
        example: the shape of one example; that of token ids is `(time,)`.

    >>> dense = keras.layers.Dense
    >>> train_flops(keras.Sequential([keras.Input((5,)), dense(3), dense(2)]), (5,))
    96
    """
    positions = example[0] if model.inputs[0].dtype == "int32" else 1
    total = 0
    for layer in model.layers:
        # Products: one forward, and two backward, for the gradients of weights and of inputs. The
        # first layer's inputs need no gradient.
        products = 3
        if layer.input is model.inputs[0]:
            products = 2
        total += products * _forward_flops(layer, positions)
    return total


def _forward_flops(layer, positions):
    """Counts the operations of a forward pass on an example of so many tokens or pixels."""
    if isinstance(layer, LayerStack):
        return layer.depth * _forward_flops(layer.template, positions)
    if isinstance(layer, keras.layers.Conv2D):
        positions = math.prod(layer.output.shape[1:3])
    if isinstance(layer, (keras.layers.Dense, keras.layers.Conv2D)):
        return 2 * positions * math.prod(layer.kernel.shape)
    forward = sum(_forward_flops(inner, positions) for inner in layer._layers)
    if isinstance(layer, CausalSelfAttention):
        # Two products, for scores and for weighted sums of values, each over half of the pairs of
        # positions, as a token does not attend to later ones: 2 * 2 / 2 operations a pair.
        forward += 2 * positions**2 * layer.heads * layer.head_width
    return forward


def peak_resident_bytes():
    """Returns the most memory that this process has held at once, on Linux.

    `ru_maxrss` would not do: a new process takes it over from the one that started it.
    """
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])
