"""ConvNet in plain JAX: a jitted scan over micro-batches that carries BatchNorm's statistics."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.peers.jax_models import Dense, feed_stack, mean_gradients
from benchmarks.support.contestants import ForeignModel, TrainStep

# Keras's defaults for BatchNormalization.
EPSILON = 1e-3
MOMENTUM = 0.99


class Block(NamedTuple):
    """Weights of a convolution and of the BatchNorm after it."""

    kernel: Any
    gamma: Any
    beta: Any


class Statistics(NamedTuple):
    """Moving statistics of a BatchNorm."""

    mean: Any
    variance: Any


class State(NamedTuple):
    """Everything that a train step updates."""

    blocks: list[Block]
    head: Dense
    statistics: list[Statistics]
    optimizer: Any


def make_scan(workload):
    """Makes the peer's `TrainStep`."""
    jax.config.update("jax_platforms", "cpu")
    keras_optimizer = workload.optimizer()
    weights = [jnp.array(array) for array in workload.model().get_weights()]
    *of_blocks, head_kernel, head_bias = weights
    blocks = []
    statistics = []
    for i in range(0, len(of_blocks), 5):
        kernel, gamma, beta, mean, variance = of_blocks[i : i + 5]
        blocks.append(Block(kernel, gamma, beta))
        statistics.append(Statistics(mean, variance))
    head = Dense(head_kernel, head_bias)
    optimizer = optax.sgd(float(keras_optimizer.learning_rate), keras_optimizer.momentum)
    state = State(blocks, head, statistics, optimizer.init((blocks, head)))

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, x, y):
        params = (state.blocks, state.head)
        loss, grads, statistics = mean_gradients(_loss, params, state.statistics, x, y)
        updates, opt_state = optimizer.update(grads, state.optimizer, params)
        blocks, head = optax.apply_updates(params, updates)
        return State(blocks, head, statistics, opt_state), loss

    def update(stack):
        nonlocal state
        state, loss = train_step(state, *stack)
        return loss

    def get_weights():
        weights = []
        for block, moving in zip(state.blocks, state.statistics, strict=True):
            weights += [*block, *moving]
        weights += state.head
        # The arrays are copied, because the next step donates these buffers.
        return [jax.device_get(weight).copy() for weight in weights]

    return TrainStep(ForeignModel(get_weights), feed_stack, update)


def _loss(params, statistics, x, y):
    """Computes the mean loss of a micro-batch, and the moved statistics."""
    blocks, head = params
    moved = []
    for block, moving in zip(blocks, statistics, strict=True):
        x = jax.lax.conv_general_dilated(
            x, block.kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        mean = x.mean((0, 1, 2))
        variance = x.var((0, 1, 2))
        x = (x - mean) * (block.gamma * jax.lax.rsqrt(variance + EPSILON)) + block.beta
        x = jax.lax.reduce_window(
            jax.nn.relu(x), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
        )
        moved_mean = MOMENTUM * moving.mean + (1 - MOMENTUM) * mean
        moved_variance = MOMENTUM * moving.variance + (1 - MOMENTUM) * variance
        moved.append(Statistics(moved_mean, moved_variance))
    logits = x.mean((1, 2)) @ head.kernel + head.bias
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), moved
