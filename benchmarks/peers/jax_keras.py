"""Keras's models on Keras's own JAX backend, in a process without TensorFlow: their train step as
StableHLO for CUDA.

`KERAS_BACKEND=jax python -m benchmarks.peers.jax_keras MODEL SIZE BATCH MICRO_BATCHES FILE` writes
it into a file.
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
    """`train_step(trainable, state, slots, x, y) -> (trainable, state, slots, loss)` on stacks: one
    scan, one update.

    Args:
        model: of Keras, built.
        optimizer: of Keras, built.
        loss: of Keras, the mean over a micro-batch.
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
    """The train step of a model of `vision.MODELS`, in mixed_bfloat16: an MLIR module."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    model, optimizer = vision.MODELS[name](size), vision.optimizer(global_clipnorm=1.0)
    optimizer.build(model.trainable_variables)
    kept = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    shapes = [[jax.ShapeDtypeStruct(v.shape, v.dtype) for v in variables] for variables in kept]
    x = jax.ShapeDtypeStruct((micro_batches, batch, size, size, 3), jnp.float32)
    y = jax.ShapeDtypeStruct((micro_batches, batch), jnp.int32)
    with cudnn_of_the_described_gpu():
        traced = make_train_step(model, optimizer, vision.loss()).trace(*shapes, x, y)
        return traced.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # JAX would try its CUDA plugin, and find no driver
    name, *sizes, path = sys.argv[1:]
    with Path(path).open("wb") as file:
        export(name, *map(int, sizes)).operation.write_bytecode(file)
