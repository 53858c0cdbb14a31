"""The train step of `fa.gpt` as JAX users write it, lowered for a CUDA device that need not be there.

No value of a weight is ever made: parameters, optimizer state and tokens are shapes.
"""

import contextlib
import dataclasses
import functools
import io
from typing import Literal
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from jax._src.cudnn import fused_attention_stablehlo

from benchmarks.peers import jax_gpt
from benchmarks.peers.jax_models import scan_train_step

CUDNN_VERSION = 91000  # 9.10.0, and compute capability 9.0: what the description of the H200 says
FORMS = ("scan", "remat", "unrolled")


@dataclasses.dataclass(frozen=True)
class JaxProgram:
    """A GPT and how its step is written.

    Attributes:
        form: "scan" over the blocks; "remat", the same with each block under `jax.checkpoint`; or "unrolled".
        attention: the `implementation` of `jax.nn.dot_product_attention`.
        logits: the dtype that they are held in.
        layers, width, heads, vocabulary, context, micro_batches, batch: sizes, those of the standard program.
    """

    form: Literal["scan", "remat", "unrolled"] = "scan"
    attention: Literal["xla", "cudnn"] = "cudnn"
    logits: Literal["bfloat16", "float32"] = "bfloat16"
    layers: int = 4
    width: int = 2048
    heads: int = 16
    vocabulary: int = 50304
    context: int = 2048
    micro_batches: int = 8
    batch: int = 8


def export(program):
    """The step's StableHLO, serialized: as `tests/helpers/h200.py` compiles it."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, weight_decay=0.1))
    loss_fn = functools.partial(
        jax_gpt.loss_fn,
        heads=program.heads,
        attention=program.attention,
        remat=program.form == "remat",
        logits=jnp.dtype(program.logits),
    )
    params = jax_gpt.shapes(program.vocabulary, program.width, program.layers, program.form != "unrolled")
    opt_state = jax.eval_shape(optimizer.init, params)
    ids = jax.ShapeDtypeStruct((program.micro_batches, program.batch, program.context), jnp.int32)
    with _cudnn_of_the_described_gpu():
        traced = scan_train_step(loss_fn, optimizer).trace(params, opt_state, ids, ids)
        return _serialized(traced.lower(lowering_platforms=("cuda",)))


def _serialized(lowered):
    module, file = lowered.compiler_ir("stablehlo"), io.BytesIO()
    module.operation.write_bytecode(file)  # with locations, which name the scopes
    return file.getvalue()


@contextlib.contextmanager
def _cudnn_of_the_described_gpu():
    """Answers for the device that JAX asks, while it traces, whether its cuDNN has flash attention.

    JAX looks at the machine that it runs on, although the program may be for another: these three functions of
    jax._src.cudnn.fused_attention_stablehlo are all that it asks.
    """

    def capability(of):
        return tuple(int(part) for part in of.split("."))

    with mock.patch.multiple(
        fused_attention_stablehlo,
        check_cudnn_version=lambda: CUDNN_VERSION,
        check_compute_capability=lambda at_least: capability(at_least) <= (9, 0),
        is_cuda_compute_capability_equal=lambda to: capability(to) == (9, 0),
    ):
        yield
