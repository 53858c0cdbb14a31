"""The models in plain JAX, and the step that trains them: parameters are tuples in the Keras
model's order.

Shape suffixes as in `fastaccum.transformer`: B batch, T time, D width, H heads, K width per head.
Imports JAX and optax alone, so that a machine without TensorFlow can use it.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class Dense(NamedTuple):
    kernel: Any
    bias: Any


class Block(NamedTuple):
    attention_norm: Any
    qkv: Any
    out: Any
    mlp_norm: Any
    mlp_in: Any
    mlp_out: Any


class GPT(NamedTuple):
    embedding: Any
    blocks: list[Block]
    final_norm: Any
    head: Any


def mlp_params(weights):
    """The parameters of a multilayer perceptron: `Dense` layers, from arrays in Keras's order."""
    return [Dense(*pair) for pair in zip(weights[::2], weights[1::2], strict=True)]


def gpt_params(weights):
    """The parameters of `fa.gpt` with rotary positions and a head of its own, from arrays in
    Keras's order.
    """
    embedding, *inner, final_norm, head = weights
    size = len(Block._fields)
    return GPT(
        embedding,
        [Block(*inner[i : i + size]) for i in range(0, len(inner), size)],
        final_norm,
        head,
    )


def mlp(params, x):
    """Logits of a multilayer perceptron with ReLU between its layers."""
    *hidden, last = params
    for layer in hidden:
        x = jax.nn.relu(x @ layer.kernel + layer.bias)
    return x @ last.kernel + last.bias


def gpt(params, ids_BT, heads):
    """Logits `[B, T, V]` of the decoder-only transformer `fa.gpt`."""
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
    """Rotary positions, halves of K paired."""
    time, width = t_BTHK.shape[1], t_BTHK.shape[3]
    inverse = 10000.0 ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angles_T1K = jnp.tile(jnp.arange(time, dtype=jnp.float32)[:, None, None] * inverse, 2)
    first, second = jnp.split(t_BTHK, 2, axis=-1)
    turned_BTHK = jnp.concatenate([-second, first], axis=-1)
    return t_BTHK * jnp.cos(angles_T1K).astype(t_BTHK.dtype) + turned_BTHK * jnp.sin(
        angles_T1K
    ).astype(t_BTHK.dtype)


def layer_norm(x, scale):
    """Keras's layer norm without an offset, in float32 and back; 1e-3 is Keras's epsilon."""
    return (jax.nn.standardize(x.astype(jnp.float32), axis=-1, epsilon=1e-3) * scale).astype(
        x.dtype
    )


def feed_stack(stack):
    """The arrays of one update, as the steps below take them."""
    return tuple(jnp.array(array) for array in stack)


def mean_gradients(loss_fn, params, state, x, y):
    """The means of loss and gradients over stacked micro-batches, by one scan, and the last state.

    Args:
        loss_fn: `loss_fn(params, state, x, y) -> (loss, state)`, the mean loss of one micro-batch.
        params: what is differentiated.
        state: what each micro-batch takes from the one before, such as BatchNorm's statistics.
        x: stacked over micro-batches, as y.
        y: the targets.
    """

    def accumulate(carried, micro_batch):
        total, state = carried
        (loss, state), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            params, state, *micro_batch
        )
        with jax.named_scope("accumulate"):
            return (jax.tree.map(jnp.add, total, (loss, grads)), state), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    (total, state), _ = jax.lax.scan(accumulate, (zeros, state), (x, y))
    with jax.named_scope("optimizer"):
        return *jax.tree.map(lambda sum_: sum_ / len(x), total), state


def scan_train_step(loss_fn, optimizer):
    """`train_step(params, opt_state, x, y) -> (params, opt_state, loss)` on stacks: one jitted
    scan, one update.

    Args:
        loss_fn: `loss_fn(params, x, y)`, the mean loss of one micro-batch.
        optimizer: of optax.
    """

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, opt_state, x, y):
        loss, grads, _ = mean_gradients(
            lambda params, _, x, y: (loss_fn(params, x, y), ()), params, (), x, y
        )
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

    return train_step
