"""Attention as cuDNN computes it, through XLA's own custom calls; shape suffixes are those of
`attention`.

Not run on a GPU yet: the calls are those that JAX makes for the same shapes, and XLA compiles them
    for an H200, but
without a device it leaves cuDNN's part undone. So "auto" tries each kind of call on the device
first (`is_usable`).
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from fastaccum.kernels import private
from fastaccum.kernels.blockwise_attention import Blocks, Form, make_dropout, reference_attention
from fastaccum.kernels.checkpoint_name import checkpoint_name, collected_names
from fastaccum.kernels.custom_gradients import custom_gradient
from fastaccum.kernels.devices import compute_capability, has_gpu
from fastaccum.kernels.xla_ops import HALF, first_order, in_xla

Axes = tuple[int, int]
# Contracted and batch axes of both operands of each product, of [B, T, H, K], [B, S, G, K] and
# scores [B, H, T, S].
_FORWARD = {"bmm1": ((3, 3), (0, 2), (0, 2)), "bmm2": ((3, 1), (0, 1), (0, 2))}
_BACKWARD = {
    "bmm1_grad_gemm1": ((2, 1), (0, 1), (0, 2)),
    "bmm1_grad_gemm2": ((3, 1), (0, 1), (0, 2)),
    "bmm2_grad_gemm1": ((2, 1), (0, 1), (0, 2)),
    "bmm2_grad_gemm2": ((3, 3), (0, 2), (0, 2)),
}
_STABLEHLO = {tf.float16: "f16", tf.bfloat16: "bf16", tf.float32: "f32", tf.uint8: "ui8"}
# Added to the score of a key that is not to be seen: its weight is exp of it, 0. JAX's, but in
# float16 the lowest.
_HIDDEN = {tf.float16: tf.float16.min, tf.bfloat16: -(2.0**41)}
# Of the largest value: what half precision explains.
_ROUNDING = {tf.float16: 0.01, tf.bfloat16: 0.05}
# Of the mask of packed sequences or of dropout, all that is quadratic in time here.
_LARGEST_MASK = 2**30


class Call(NamedTuple):
    """Call of attention, with all that decides whether cuDNN takes it."""

    query_shape: tuple[Any, ...]  # [B, T, H, K], None for sizes not known
    key_shape: tuple[Any, ...]  # [B, S, G, K]
    dtype: tf.DType
    causal: bool
    packed: bool  # a query sees keys of its own segment alone
    dropout: bool = False  # a mask of all heads says which weights are kept

    def example(self) -> Call:
        """Returns a small call of the same kind; of T and S above 512 what a kernel's tiles leave
        over.
        """
        queries, keys = (
            size if size <= 512 else 256 + size % 256
            for size in (self.query_shape[1], self.key_shape[1])
        )
        (_, _, heads, width), groups = self.query_shape, min(self.key_shape[2], 2)
        query_shape = (2, queries, groups * (heads // self.key_shape[2]), width)
        return self._replace(query_shape=query_shape, key_shape=(2, keys, groups, width))

    def reason_against(self) -> str | None:
        """Returns what cuDNN does not take of the call, or None."""
        (batch, queries, heads, width), keys = self.query_shape, self.key_shape[1]
        capability = compute_capability()
        widest = 256 if capability >= (9, 0) else 128
        if capability < (8, 0):
            return "what is no GPU of compute capability 8.0 or more"
        if self.dtype not in HALF:
            return f"{self.dtype.name}: it must be float16 or bfloat16"
        if not all((*self.query_shape, *self.key_shape)):
            return "sizes that are not known when this is traced"
        if width % 8 or width > widest:
            return (
                f"heads {width} wide: they must be a multiple of 8, up to {widest} on this device"
            )
        masked = self.packed or self.dropout
        if (self.causal or masked) and queries != keys:
            return (
                f"{queries} queries and {keys} keys: there must be as many if causal or packed, "
                "or with dropout"
            )
        if masked and queries % 2:
            return f"packed sequences or dropout over {queries} tokens: their number must be even"
        if masked and 2 * batch * (heads if self.dropout else 1) * queries * keys > _LARGEST_MASK:
            shape = [batch, heads, queries] if self.dropout else [batch, queries]
            return f"packed sequences or dropout of {shape}: their mask must take at most 1 GiB"
        return None


def is_usable(call: Call) -> bool:
    """Returns whether cuDNN takes the call on the device in use: tries each kind once, with a
    warning if it fails.
    """
    device = _device()
    return (
        ":GPU:" in device
        and call.reason_against() is None
        and _tried(call.example(), device) is None
    )


def _device() -> str:
    """Returns the device of a function that is traced now, which under `tf.device("CPU:0")` is not
    the GPU.
    """
    with tf.init_scope():
        return tf.zeros([]).device


@functools.cache
def _tried(call: Call, device: str) -> str | None:
    """Runs a call forward and backward, next to the unfused expression, and returns what went
    wrong, or None.
    """
    rng = np.random.default_rng(0)
    shapes = [call.query_shape, call.key_shape, call.key_shape, call.query_shape]
    ids = np.sort(rng.integers(0, 3, call.query_shape[:2])).astype("int32")
    # Also while a step is traced: outside of its graph, of its tapes and of its names.
    with tf.init_scope(), collected_names():
        try:
            tensors = [tf.constant(rng.normal(size=shape), call.dtype) for shape in shapes]
            reason = _compare(_compute_both(call, tensors, tf.constant(ids)), call.dtype)
        except Exception as error:  # whatever it is, the next best form does not need cuDNN
            reason = f"{type(error).__name__}: {error}"
    if reason:
        warnings.warn(
            f"cuDNN's attention is not used for calls like {call}: tried on {device}, it failed. "
            f"{reason}",
            RuntimeWarning,
            stacklevel=2,
        )
    return reason


def _compute_both(
    call: Call, tensors: Sequence[tf.Tensor], ids: tf.Tensor
) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Computes output and gradients of the call, each beside the unfused expression's."""

    @tf.function(jit_compile=True, autograph=False)
    def run(query, key, value, doutput, ids):
        # Keys have fewer segments, so that some queries see nothing.
        segments, scale = (ids, tf.minimum(ids, 1)) if call.packed else None, 0.125
        dropout = (0.25, tf.constant([1, 2], tf.int64)) if call.dropout else None

        def outcome(attend, *inputs):
            output = attend(*inputs)
            # no tape records here
            return output, *tf.gradients(output, inputs, tf.cast(doutput, output.dtype))

        fused = outcome(
            lambda *t: cudnn_attention(*t, Form(scale, call.causal, segments, dropout)),
            query,
            key,
            value,
        )
        exact = outcome(
            lambda *t: reference_attention(*t, Form(scale, call.causal, segments, dropout)),
            *(tf.cast(t, tf.float32) for t in (query, key, value)),
        )
        return fused, exact

    return list(zip(*run(*tensors, ids), strict=True))


def _compare(outcomes: Sequence[tuple[tf.Tensor, tf.Tensor]], dtype: tf.DType) -> str | None:
    """Describes a difference that is more than rounding."""
    for name, (fused, exact) in zip(("output", "dquery", "dkey", "dvalue"), outcomes, strict=True):
        # Of one key alone the gradient is 0.
        largest = max(np.abs(exact.numpy()).max(), 0.01)
        error = np.abs(fused.numpy().astype("float32") - exact.numpy()).max() / largest
        if not error < _ROUNDING[dtype]:
            return f"Its {name} is off by {error:.2g} of the largest value."
    return None


def cudnn_attention(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, form: Form) -> tf.Tensor:
    """Computes `attention` as one fused kernel forward and one backward, on operands as they lie in
    memory.

    With dropout each pass makes two calls, since cuDNN's own dropout draws other numbers in a
    training that is resumed. The first attends to the kept keys, the second to all. With `P1 =
    softmax(scores of kept)` and its log-sum-exp `l1`, P and l of all, and `share = exp(l1 - l) / (1
    - rate)`, the weights after dropout are `share * P1`, so that

        output = share * P1 @ value
        dscores = P1 * (share * doutput @ value^T) - P * sum(doutput * output)

    A call on the way back computes `P * (doutput @ value^T - sum(doutput * output))` of what it is
    given: the first term is that of an output of 0, the second that of values of 0.
    """
    _require(query, key, form)
    sees_BT11 = None
    if form.segments is not None and form.segments[0] is not form.segments[1]:
        sees_BT11 = _sees(form.segments, form.causal)[..., None, None]

    def zeroed(t_BTHK):
        """Returns 0 for a query that sees nothing: all its scores are as low, and cuDNN returns a
        mean.
        """
        return (
            t_BTHK if sees_BT11 is None else tf.where(sees_BT11, t_BTHK, tf.zeros([], t_BTHK.dtype))
        )

    kept, masks = _make_kept(form, query, key), _masks(form, query.dtype)
    rate = 0.0 if form.dropout is None else form.dropout[0]

    @custom_gradient
    def run(*inputs_BTHK):
        output_BTHK, lse_BHT = _forward(form, inputs_BTHK, masks)
        output_BTHK, lses = zeroed(output_BTHK), [lse_BHT]
        if rate:
            output_BTHK, lse_of_kept_BHT = _forward(
                form, inputs_BTHK, _masks(form, query.dtype, kept(0))
            )
            # Of a row without a kept key: so that its weights are exactly 0 on the way back, too.
            lse_of_kept_BHT = tf.where(
                lse_of_kept_BHT < _HIDDEN[query.dtype] / 2, 1e30, lse_of_kept_BHT
            )
            lses.append(lse_of_kept_BHT)
            output_BTHK = zeroed(_scaled(output_BTHK, rate, *lses))
        # Kept for the backward pass is what the next layer takes, and no second tensor beside it.
        output_BTHK, *lses = (checkpoint_name(t, "attention") for t in (output_BTHK, *lses))

        def gradient(doutput_BTHK):
            doutput_BTHK = zeroed(doutput_BTHK)
            if not rate:
                gradients = _backward(form, inputs_BTHK, lses[0], doutput_BTHK, masks, output_BTHK)
                return first_order(gradients, "cuDNN's attention")
            # Without a barrier XLA would keep the mask.
            barred_BTHK, zero = private.xla.optimization_barrier(doutput_BTHK, tf.constant(0))
            of_kept = _masks(form, query.dtype, kept(zero))
            scaled_BTHK = _scaled(barred_BTHK, rate, *lses)
            one = _backward(
                form, inputs_BTHK, lses[1], scaled_BTHK, of_kept, tf.zeros_like(output_BTHK)
            )
            without_value = *inputs_BTHK[:2], tf.zeros_like(inputs_BTHK[2])
            other = _backward(form, without_value, lses[0], barred_BTHK, masks, output_BTHK)
            return first_order([one[0] + other[0], one[1] + other[1], one[2]], "cuDNN's attention")

        return output_BTHK, gradient

    return run(query, key, value)


def _forward(
    form: Form, inputs: Sequence[tf.Tensor], masks: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    batch, queries, heads, _ = inputs[0].shape
    results = [inputs[0], tf.TensorSpec([batch, heads, queries], tf.float32)]
    config = _configure(inputs[0], inputs[1], form.scale, form.causal, _FORWARD)
    return _call(
        f"__cudnn$fmha{'ScaleBias' * len(masks)}Softmax", [*inputs, *masks], results, config
    )


def _backward(form, inputs, lse_BHT, doutput_BTHK, masks, output_BTHK) -> list[tf.Tensor]:
    operands = [*inputs, lse_BHT, doutput_BTHK, *masks, output_BTHK]
    config = _configure(inputs[0], inputs[1], form.scale, form.causal, _BACKWARD)
    return _call(f"__cudnn$fmha{'ScaleBias' * len(masks)}SoftmaxBackward", operands, inputs, config)


def _scaled(
    t_BTHK: tf.Tensor, rate: float, lse_BHT: tf.Tensor, lse_of_kept_BHT: tf.Tensor
) -> tf.Tensor:
    share_BHT = tf.where(
        lse_of_kept_BHT > 1e29, 0.0, tf.exp(lse_of_kept_BHT - lse_BHT) / (1 - rate)
    )
    return tf.cast(
        tf.cast(t_BTHK, tf.float32) * tf.transpose(share_BHT, [0, 2, 1])[..., None], t_BTHK.dtype
    )


def _make_kept(
    form: Form, query: tf.Tensor, key: tf.Tensor
) -> Callable[[int | tf.Tensor], tf.Tensor]:
    """Returns a function that draws which weights dropout keeps, bool [B, H, T, S]; of a 0 that
    ties it to a pass.
    """
    queries, keys = Blocks(query.shape[1], 1, query.shape[1]), Blocks(key.shape[1], 1, key.shape[1])
    factor = make_dropout(form, query, key.shape[2], queries, keys)
    (batch, _, heads, _) = query.shape
    return lambda zero: tf.reshape(factor(0, zero) > 0, [batch, heads, queries.size, keys.size])


def _sees(segments: tuple[tf.Tensor, tf.Tensor], causal: bool) -> tf.Tensor:
    """Returns whether a query sees any key, bool [B, T]."""
    seen_BTS = tf.squeeze(_same(segments), 1)
    seen_BTS &= tf.linalg.band_part(tf.ones_like(seen_BTS), -1, 0) if causal else True
    return tf.reduce_any(seen_BTS, 2)


def _masks(form: Form, dtype: tf.DType, kept_BHTS: tf.Tensor | None = None) -> list[tf.Tensor]:
    """Returns the mask that is added to the scores, [B, 1, T, S] for all heads or [B, H, T, S];
    nothing without one.
    """
    seen = [] if form.segments is None else [_same(form.segments)]
    seen += [] if kept_BHTS is None else [kept_BHTS]
    if not seen:
        return []
    return [
        tf.where(
            functools.reduce(tf.logical_and, seen),
            tf.constant(0, dtype),
            tf.constant(_HIDDEN[dtype], dtype),
        )
    ]


def _same(segments: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
    return segments[0][:, None, :, None] == segments[1][:, None, None, :]


def _call(
    target: str, operands: Sequence[tf.Tensor], results: Sequence[Any], config: dict[str, Any]
) -> list[Any]:
    """Calls one of XLA's custom calls, with results of these shapes and dtypes.

    cuDNN reads a result's sizes as [B, H, T, K] and its strides from the layout: those of [B, T, H,
        K], so that nothing
    is copied. XlaCustomCallV2 has no word for a layout, StableHLO has.
    """
    orders = [(0, 2, 1, 3) if t.shape.rank == 4 else tuple(range(t.shape.rank)) for t in results]
    shapes = [[t.shape[i] for i in order] for t, order in zip(results, orders, strict=True)]
    dtypes = [t.dtype for t in results]
    inputs = ", ".join(_write_type(t.shape, t.dtype) for t in operands)
    # Last, the workspace: XLA asks cuDNN for its real size when it compiles.
    shapes, dtypes = [*shapes, [0]], [*dtypes, tf.uint8]
    outputs = ", ".join(map(_write_type, shapes, dtypes))
    names = ", ".join(f"%a{i}" for i in range(len(operands)))
    typed = ", ".join(f"%a{i}: {_write_type(t.shape, t.dtype)}" for i, t in enumerate(operands))
    module = f"""
        func.func public @main({typed}) -> ({outputs}) {{
          %c:{len(shapes)} = stablehlo.custom_call @{target}({names}) {{
            api_version = 2 : i32,
            backend_config = {json.dumps(json.dumps(config))},
            operand_layouts = [{", ".join(_write_layout(range(t.shape.rank)) for t in operands)}],
            result_layouts = [{", ".join(map(_write_layout, [*orders, (0,)]))}]
          }} : ({inputs}) -> ({outputs})
          return {", ".join(f"%c#{i}" for i in range(len(shapes)))} : {outputs}
        }}"""
    *called, _ = private.xla.call_module(
        operands,
        version=9,
        module=module,
        Sout=shapes,
        Tout=dtypes,
        platforms=["CUDA"],
        # a described GPU is none to TensorFlow
        disabled_checks=[private.xla.call_module_disable_check_platform()],
    )
    return [tf.transpose(t, order) for t, order in zip(called, orders, strict=True)]


def _write_type(shape: Sequence[int], dtype: tf.DType) -> str:
    return f"tensor<{''.join(f'{size}x' for size in shape)}{_STABLEHLO[dtype]}>"


def _write_layout(order: Sequence[int]) -> str:
    """Writes the row-major layout of a tensor whose axes have been reordered."""
    return f"dense<{list(reversed(order))}> : tensor<{len(order)}xindex>"


def _configure(
    query: tf.Tensor,
    key: tf.Tensor,
    scale: float,
    causal: bool,
    products: dict[str, tuple[Axes, Axes, Axes]],
) -> dict[str, Any]:
    """Builds the configuration that XLA reads beside the operands: its GpuBackendConfig, as
    JSON.
    """
    (batch, queries, heads, _), keys = query.shape, key.shape[1]
    config: dict[str, Any] = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": scale,
        "dropout_rate": 0.0,
        "intermediate_tensor_shape": {
            "element_type": {tf.float16: "F16", tf.bfloat16: "BF16"}[query.dtype],
            "dimensions": [str(size) for size in (batch, heads, queries, keys)],
            "layout": {"minor_to_major": ["3", "2", "1", "0"]},
            "is_dynamic_dimension": [False] * 4,
        },
        "seed": 42,  # for dropout, which is off
        "is_flash_attention": True,
        "mask_type": "CAUSAL" if causal else "NO_MASK",
        "sliding_window_length": 0,
        "max_seg_per_batch": 1,
        "is_paged_attention": False,
    }
    for name, ((left, right), left_batch, right_batch) in products.items():
        config[f"{name}_dot_dimension_numbers"] = {
            "lhs_contracting_dimensions": [str(left)],
            "rhs_contracting_dimensions": [str(right)],
            "lhs_batch_dimensions": [str(axis) for axis in left_batch],
            "rhs_batch_dimensions": [str(axis) for axis in right_batch],
        }
    return {"operation_queue_id": "0", "cudnn_fmha_backend_config": config}


def _require(query: tf.Tensor, key: tf.Tensor, form: Form) -> None:
    remedy = 'Pass implementation="blockwise".'
    if not (has_gpu() and in_xla()):
        raise ValueError(
            'implementation="cudnn" needs a GPU, and a program that XLA compiles '
            f"(jit_compile=True). {remedy}"
        )
    terms = form.causal, form.segments is not None, form.dropout is not None
    reason = Call(tuple(query.shape), tuple(key.shape), query.dtype, *terms).reason_against()
    if reason:
        raise ValueError(
            f"cuDNN does not take {reason}. Query {query.shape}, key {key.shape}, "
            f"causal={form.causal}. {remedy}"
        )
