"""Models in plain JAX, and the step that trains them; parameters are in the Keras model's order.

Shape suffixes are those of `fastaccum.transformer`: B batch, T time, D width, H heads, K width per
head. The module imports JAX and optax alone, so that a machine without TensorFlow can use it.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class Dense(NamedTuple):
    """Weights of a dense layer."""

    kernel: Any
    bias: Any


class Block(NamedTuple):
    """Weights of a transformer block."""

    attention_norm: Any
    qkv: Any
    out: Any
    mlp_norm: Any
    mlp_in: Any
    mlp_out: Any


class GPT(NamedTuple):
    """Weights of `fa.gpt` with a head of its own."""

    embedding: Any
    blocks: list[Block]
    final_norm: Any
    head: Any


def mlp_params(weights):
    """Makes the `Dense` layers of a multilayer perceptron from arrays in Keras's order."""
    kernels = weights[::2]
    biases = weights[1::2]
    return [Dense(kernel, bias) for kernel, bias in zip(kernels, biases, strict=True)]


def gpt_params(weights):
    """Makes the parameters of `fa.gpt` with a head of its own from arrays in Keras's order."""
    embedding, *of_blocks, final_norm, head = weights
    size = len(Block._fields)
    blocks = [Block(*of_blocks[i : i + size]) for i in range(0, len(of_blocks), size)]
    return GPT(embedding, blocks, final_norm, head)


def mlp(params, x):
    """Computes the logits of a multilayer perceptron with ReLU between its layers."""
    *hidden, last = params
    for layer in hidden:
        x = jax.nn.relu(x @ layer.kernel + layer.bias)
    return x @ last.kernel + last.bias


def gpt(params, ids_BT, heads):
    """Computes the logits `[B, T, V]` of the decoder-only transformer `fa.gpt`."""
    x_BTD = params.embedding[ids_BT]
    for block in params.blocks:
        x_BTD += _attention(block, layer_norm(x_BTD, block.attention_norm), heads)
        h_BTF = jax.nn.gelu(layer_norm(x_BTD, block.mlp_norm) @ block.mlp_in, approximate=True)
        x_BTD += h_BTF @ block.mlp_out
    return layer_norm(x_BTD, params.final_norm) @ params.head


def _attention(block, x_BTD, heads):
    batch, time, _ = x_BTD.shape
    q_BTHK, k_BTHK, v_BTHK = jnp.split(
        (x_BTD @ block.qkv).reshape(batch, time, 3 * heads, -1), 3, axis=2
    )
    mixed_BTHK = jax.nn.dot_product_attention(
        rotate(q_BTHK), rotate(k_BTHK), v_BTHK, is_causal=True
    )
    return mixed_BTHK.reshape(x_BTD.shape) @ block.out


def rotate(t_BTHK):
    """Applies rotary positions, halves of K paired."""
    _, time, _, width = t_BTHK.shape
    inverse = 10000.0 ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angles_T1K = jnp.tile(jnp.arange(time, dtype=jnp.float32)[:, None, None] * inverse, 2)
    cos_T1K = jnp.cos(angles_T1K).astype(t_BTHK.dtype)
    sin_T1K = jnp.sin(angles_T1K).astype(t_BTHK.dtype)
    first, second = jnp.split(t_BTHK, 2, axis=-1)
    turned_BTHK = jnp.concatenate([-second, first], axis=-1)
    return t_BTHK * cos_T1K + turned_BTHK * sin_T1K


def layer_norm(x, scale):
    """Computes Keras's layer norm without an offset, in float32 and back."""
    keras_epsilon = 1e-3
    normal = jax.nn.standardize(x.astype(jnp.float32), axis=-1, epsilon=keras_epsilon)
    return (normal * scale).astype(x.dtype)


def feed_stack(stack):
    """Turns the arrays of one update into JAX's."""
    return tuple(jnp.array(array) for array in stack)


def mean_gradients(loss_fn, params, state, x, y):
    """Computes the means of loss and gradients over stacked micro-batches, and the last state.

    Args:
        loss_fn: `loss_fn(params, state, x, y) -> (loss, state)`, the mean loss of one micro-batch.
        params: the parameters to differentiate by.
        state: carried from each micro-batch to the next, such as BatchNorm's statistics.
        x: the inputs, stacked over micro-batches.
        y: the targets, stacked too.
    """
    value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)

    def accumulate(carry, micro_batch):
        total, state = carry
        (loss, state), grads = value_and_grad(params, state, *micro_batch)
        with jax.named_scope("accumulate"):
            return (jax.tree.map(jnp.add, total, (loss, grads)), state), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    (total, state), _ = jax.lax.scan(accumulate, (zeros, state), (x, y))
    with jax.named_scope("optimizer"):
        loss, grads = jax.tree.map(lambda sum_: sum_ / len(x), total)
    return loss, grads, state


def scan_train_step(loss_fn, optimizer):
    """Makes a jitted step on stacks: one scan over the micro-batches, one update.

    Args:
        loss_fn: `loss_fn(params, x, y)`, the mean loss of one micro-batch.
        optimizer: of optax.

    Returns:
        `train_step(params, opt_state, x, y) -> (params, opt_state, loss)`.
    """

    def stateless_loss(params, state, x, y):
        return loss_fn(params, x, y), state

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, opt_state, x, y):
        loss, grads, _ = mean_gradients(stateless_loss, params, (), x, y)
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

    return train_step
