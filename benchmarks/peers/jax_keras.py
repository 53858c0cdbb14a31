"""Exports train steps of Keras's own JAX backend as StableHLO for CUDA, without TensorFlow.

`KERAS_BACKEND=jax python -m benchmarks.peers.jax_keras MODEL SIZE BATCH MICRO_BATCHES FILE` writes
one into a file.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import keras

from benchmarks.h200 import vision
from benchmarks.h200.jax_cudnn import cudnn_of_the_described_gpu
from benchmarks.peers.jax_models import mean_gradients


def make_train_step(model, optimizer, loss):
    """Makes a jitted step on stacks: one scan over the micro-batches, one update.

    Args:
        model: a built Keras model.
        optimizer: a built Keras optimizer.
        loss: a Keras loss, the mean over a micro-batch.

    Returns:
        `train_step(trainable, state, slots, x, y) -> (trainable, state, slots, loss)`.
    """

    def loss_of(trainable, state, x, y):
        outputs, state = model.stateless_call(trainable, state, x, training=True)
        return loss(y, outputs), state

    def train_step(trainable, state, slots, x, y):
        loss, grads, state = mean_gradients(loss_of, trainable, state, x, y)
        with jax.named_scope("optimizer"):
            trainable, slots = optimizer.stateless_apply(slots, grads, trainable)
        return trainable, state, slots, loss

    return jax.jit(train_step, donate_argnums=(0, 1, 2))


def export(name, size, batch, micro_batches):
    """Exports the mixed_bfloat16 train step of a model of `vision.MODELS` as an MLIR module."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = vision.MODELS[name](size)
    optimizer = vision.optimizer(global_clipnorm=1.0)
    optimizer.build(model.trainable_variables)
    trainable = _shapes(model.trainable_variables)
    state = _shapes(model.non_trainable_variables)
    slots = _shapes(optimizer.variables)
    x = jax.ShapeDtypeStruct((micro_batches, batch, size, size, 3), jnp.float32)
    y = jax.ShapeDtypeStruct((micro_batches, batch), jnp.int32)
    with cudnn_of_the_described_gpu():
        train_step = make_train_step(model, optimizer, vision.loss())
        traced = train_step.trace(trainable, state, slots, x, y)
        return traced.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")


def _shapes(variables):
    return [jax.ShapeDtypeStruct(variable.shape, variable.dtype) for variable in variables]


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # JAX would try its CUDA plugin, and find no driver
    name, *sizes, path = sys.argv[1:]
    with Path(path).open("wb") as file:
        export(name, *map(int, sizes)).operation.write_bytecode(file)
