"""Compiles the train step of `fa.gpt` as JAX users write it, by the same XLA for the same device.

No value of a weight is ever made: parameters, optimizer state and tokens are shapes.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax

from benchmarks.h200 import parts, programs
from benchmarks.h200.jax_cudnn import cudnn_of_the_described_gpu
from benchmarks.h200.programs import JaxGpt
from benchmarks.peers import jax_gpt
from benchmarks.peers.jax_models import scan_train_step
from benchmarks.support import stablehlo


def gpt(options: JaxGpt) -> programs.Compiled:
    """Compiles JAX's program for these options."""
    sizes = options.sizes
    text, memory = programs.compiled(export(options))
    matrices = tuple(sizes.layers * parts.matrices(sizes))
    return programs.Compiled(text, memory, sizes.micro_batches, sizes.flops, matrices)


def export(options: JaxGpt) -> bytes:
    """Lowers the step for CUDA and returns its serialized StableHLO."""
    jax.config.update("jax_platforms", "cpu")  # JAX would try its CUDA plugin, and find no driver
    sizes = options.sizes
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, weight_decay=0.1))
    loss_fn = functools.partial(
        jax_gpt.loss_fn,
        heads=sizes.width // 128,
        attention=options.attention,
        remat=options.form == "remat",
        logits=jnp.dtype(options.logits),
        compute=jnp.dtype(sizes.dtype),
    )
    params = jax_gpt.shapes(sizes.vocabulary, sizes.width, sizes.layers, options.form != "unrolled")
    opt_state = jax.eval_shape(optimizer.init, params)
    ids = jax.ShapeDtypeStruct((sizes.micro_batches, sizes.batch, sizes.context), jnp.int32)
    with cudnn_of_the_described_gpu():
        traced = scan_train_step(loss_fn, optimizer).trace(params, opt_state, ids, ids)
        lowered = traced.lower(lowering_platforms=("cuda",))
        return stablehlo.serialized(lowered.compiler_ir("stablehlo"))
