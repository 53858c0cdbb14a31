"""The ConvNet in plain JAX: one jitted step that scans over the micro-batches, and carries
BatchNorm's statistics.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.peers.jax_models import Dense, feed_stack, mean_gradients
from benchmarks.support.contestants import ForeignModel, TrainStep

EPSILON, MOMENTUM = 1e-3, 0.99  # Keras's


class Block(NamedTuple):
    kernel: Any
    gamma: Any
    beta: Any


class Statistics(NamedTuple):
    mean: Any
    variance: Any


def make_scan(workload):
    jax.config.update("jax_platforms", "cpu")
    theirs = workload.optimizer()
    *convolutional, kernel, bias = map(jnp.array, workload.model().get_weights())
    blocks = [convolutional[i : i + 5] for i in range(0, len(convolutional), 5)]
    params = [*(Block(*block[:3]) for block in blocks), Dense(kernel, bias)]
    statistics = [Statistics(*block[3:]) for block in blocks]
    optimizer = optax.sgd(float(theirs.learning_rate), theirs.momentum)
    state = params, statistics, optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, x, y):
        params, statistics, opt_state = state
        loss, grads, statistics = mean_gradients(_loss, params, statistics, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), statistics, opt_state), loss

    def update(stack):
        nonlocal state
        state, loss = train_step(state, *stack)
        return loss

    def weights():
        (*blocks, head), statistics, _ = state
        found = [
            weight
            for pair in zip(blocks, statistics, strict=True)
            for weight in jax.tree.leaves(pair)
        ]
        return [jax.device_get(weight).copy() for weight in (*found, *head)]

    return TrainStep(ForeignModel(weights), feed_stack, update)


def _loss(params, statistics, x, y):
    *blocks, head = params
    moved = []
    for block, moving in zip(blocks, statistics, strict=True):
        x = jax.lax.conv_general_dilated(
            x, block.kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        batch = Statistics(x.mean((0, 1, 2)), x.var((0, 1, 2)))
        x = (x - batch.mean) * (block.gamma * jax.lax.rsqrt(batch.variance + EPSILON)) + block.beta
        x = jax.lax.reduce_window(
            jax.nn.relu(x), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
        )
        moved.append(
            Statistics(
                *(
                    MOMENTUM * old + (1 - MOMENTUM) * new
                    for old, new in zip(moving, batch, strict=True)
                )
            )
        )
    logits = x.mean((1, 2)) @ head.kernel + head.bias
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), moved
