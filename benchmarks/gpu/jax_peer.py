"""JAX: one jitted step that scans over the micro-batches: `python -m benchmarks.gpu.jax_peer FOLDER PROGRAM`.

The GPT of a program, its sizes and its initial weights, as hand-written JAX trains it: float32 weights, bfloat16
compute, a scan over the blocks, cuDNN's attention, optax. Needs JAX and optax.
"""

import argparse
import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from benchmarks.gpu import manifest, measure
from benchmarks.gpu.run import matmul_rate, peak_bytes
from benchmarks.peers.jax_models import layer_norm, rotate, scan_train_step

COMPUTE = jnp.bfloat16


def loss_fn(params, ids_BT, labels_BT, heads):
    """The mean cross-entropy of one micro-batch. Shape suffixes as in `fastaccum.transformer`."""
    table_VD = params["embedding/embeddings"].astype(COMPUTE)
    x_BTD = table_VD[ids_BT] * (2 * math.sqrt(table_VD.shape[1]))
    blocks = {name: value for name, value in params.items() if name.startswith("blocks/")}
    x_BTD, _ = jax.lax.scan(functools.partial(_block, heads=heads), x_BTD, blocks)
    x_BTD = layer_norm(x_BTD, params["final_norm/gamma"])
    logits_BTV = jnp.einsum("btd,vd->btv", x_BTD, table_VD, preferred_element_type=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, labels_BT).mean()


def _block(x_BTD, block, heads):
    block = {name.removeprefix("blocks/"): value for name, value in block.items()}
    kernels = {name: value.astype(COMPUTE) for name, value in block.items() if name.endswith("kernel")}
    qkv = layer_norm(x_BTD, block["attention_norm.gamma"]) @ kernels["attention.qkv.kernel"]
    q_BTHK, k_BTHK, v_BTHK = jnp.split(qkv.reshape(*x_BTD.shape[:2], 3 * heads, -1), 3, axis=2)
    implementation = "cudnn" if jax.devices()[0].platform == "gpu" else "xla"
    mixed_BTHK = jax.nn.dot_product_attention(
        rotate(q_BTHK), rotate(k_BTHK), v_BTHK, is_causal=True, implementation=implementation
    )
    x_BTD += mixed_BTHK.reshape(x_BTD.shape) @ kernels["attention.out.kernel"]
    h_BTF = jax.nn.gelu(layer_norm(x_BTD, block["mlp_norm.gamma"]) @ kernels["mlp_in.kernel"], approximate=True)
    return x_BTD + h_BTF @ kernels["mlp_out.kernel"], None


def make_step(program):
    """`step()`, which trains on the program's tokens once and returns the loss."""
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
    train_step = scan_train_step(functools.partial(loss_fn, heads=program["sizes"]["heads"]), optimizer)
    params = jax.tree.map(jnp.array, manifest.weights(program))
    opt_state = optimizer.init(params)
    stack = jax.tree.map(jnp.array, manifest.tokens(program))

    def step():
        nonlocal params, opt_state
        params, opt_state, loss = train_step(params, opt_state, *stack)
        return loss

    return step


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.jax_peer", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="from benchmarks.gpu.export")
    parser.add_argument("program", help="the stacked bfloat16 program whose model this trains")
    arguments = parser.parse_args(argv)
    program = manifest.find(arguments.folder, arguments.program)
    if program["dtype"] != "bfloat16" or not program["stacked"]:
        parser.error(f"{program['name']}: JAX trains in bfloat16, from the weights of a stacked program.")
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
