"""What a train step is held against: the work it cannot avoid, the rate of a matmul, the memory of
its process.
"""

import math
import pathlib
import re
import time

import keras
import tensorflow as tf

from fastaccum.kernels.layer_stack import LayerStack
from fastaccum.transformer import CausalSelfAttention

_MATMUL_SIZE = 1024


def matmul_rate(runs=5):
    """FLOP/s of the fastest of `runs` float32 matmuls of 1,024^3 through XLA."""
    square = tf.random.stateless_normal([_MATMUL_SIZE, _MATMUL_SIZE], seed=[0, 0])
    _matmul(square).numpy()  # compiles
    return 2 * _MATMUL_SIZE**3 / min(_seconds_of_matmul(square) for _ in range(runs))


@tf.function(jit_compile=True)
def _matmul(square):
    return tf.matmul(square, square)


def _seconds_of_matmul(square):
    started = time.perf_counter()
    # On the CPU this hands over the buffer as it is.
    _matmul(square).numpy()
    return time.perf_counter() - started


def train_flops(model, example):
    """Floating-point operations that training on one example needs: forward, and two products for
    each of its own.

    Matmuls, convolutions and causal attention only, a multiply-add as two; nothing for what is
    computed a second time, nor for gradients of the model's inputs.

    Args:
        model: a Keras model of Dense, Conv2D, `TransformerBlock` and `LayerStack` layers and what
            does no products.
        example: the shape of one example; that of token ids is `(time,)`.

    >>> dense = keras.layers.Dense
    >>> train_flops(keras.Sequential([keras.Input((5,)), dense(3), dense(2)]), (5,))
    96
    """
    positions = example[0] if model.inputs[0].dtype == "int32" else 1
    total = 0
    for layer in model.layers:
        forward = _forward_flops(layer, positions)
        is_first = layer.input is model.inputs[0]
        total += forward * (2 if is_first else 3)
    return total


def _forward_flops(layer, positions):
    if isinstance(layer, LayerStack):
        return layer.depth * _forward_flops(layer.template, positions)
    if isinstance(layer, keras.layers.Conv2D):
        positions = math.prod(layer.output.shape[1:3])
    if isinstance(layer, (keras.layers.Dense, keras.layers.Conv2D)):
        return 2 * positions * math.prod(layer.kernel.shape)
    forward = sum(_forward_flops(inner, positions) for inner in layer._layers)
    if isinstance(layer, CausalSelfAttention):
        # Scores and weighted values, over half of the pairs of positions.
        forward += 2 * positions**2 * layer.heads * layer.head_width
    return forward


def peak_resident_bytes():
    """The most memory that this process has held at once. Linux.

    Not `ru_maxrss`, which a new process takes over from the one that started it.
    """
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])
