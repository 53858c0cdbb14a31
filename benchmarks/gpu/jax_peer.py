"""Runs the GPT of a program in JAX: `python -m benchmarks.gpu.jax_peer FOLDER PROGRAM`.

It starts from the program's initial weights and trains as hand-written JAX does: one jitted step
that scans over the micro-batches, float32 weights, bfloat16 compute, a scan over the blocks,
cuDNN's attention, optax. The module needs JAX and optax.
"""

import argparse
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from benchmarks.gpu import manifest, measure
from benchmarks.gpu.run import matmul_rate, peak_bytes
from benchmarks.peers import jax_gpt
from benchmarks.peers.jax_models import scan_train_step


def make_step(program):
    """Makes `step()`, which trains on the program's tokens once and returns the loss."""
    options = program["optimizer"]
    optimizer = optax.chain(
        optax.clip_by_global_norm(options["clip_norm"]),
        optax.adamw(
            options["learning_rate"],
            b1=options["beta_1"],
            b2=options["beta_2"],
            eps=options["epsilon"],
            weight_decay=options["weight_decay"],
        ),
    )
    attention = "cudnn" if jax.devices()[0].platform == "gpu" else "xla"
    loss_fn = functools.partial(
        jax_gpt.loss_fn, heads=program["sizes"]["heads"], attention=attention
    )
    train_step = scan_train_step(loss_fn, optimizer)
    params = jax.tree.map(jnp.array, jax_gpt.from_stacked(manifest.weights(program)))
    opt_state = optimizer.init(params)
    stack = jax.tree.map(jnp.array, manifest.tokens(program))

    def step():
        nonlocal params, opt_state
        params, opt_state, loss = train_step(params, opt_state, *stack)
        return loss

    return step


def main(argv=None):
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.jax_peer", description=__doc__.splitlines()[0]
    )
    parser.add_argument("folder", type=Path, help="from benchmarks.gpu.export")
    parser.add_argument("program", help="the stacked bfloat16 program whose model this trains")
    arguments = parser.parse_args(argv)
    program = manifest.chosen(parser, arguments)
    if program["dtype"] != "bfloat16" or not program["stacked"]:
        parser.error(
            f"{program['name']}: JAX trains in bfloat16, from the weights of a stacked program."
        )
    losses, seconds = measure.timed(make_step(program), jax.block_until_ready)
    measure.require_losses(program, losses)
    peak = peak_bytes()  # before the matmul's operands
    measure.report(
        "JAX scan",
        program,
        losses,
        seconds,
        matmul_rate=matmul_rate(program["dtype"]),
        peak_bytes=peak,
        device=jax.devices()[0].device_kind,
        versions={"jax": jax.__version__, "optax": optax.__version__},
    )


if __name__ == "__main__":
    main()
