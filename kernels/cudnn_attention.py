"""Attention as cuDNN computes it, through XLA's own custom calls.

Not run on a GPU yet: the calls are those that JAX makes for the same shapes, and XLA compiles them
for an H200, but without a device it leaves cuDNN's part undone. So "auto" tries each kind of call
on the device first (`is_usable`).

Shape suffixes are those of `attention`.
"""

from __future__ import annotations

import functools
import json
import math
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


class _Product(NamedTuple):
    """Axes of a product's operands: those that it sums over, and those of the batch."""

    left_summed: int
    right_summed: int
    left_batch: Axes
    right_batch: Axes


# The products of each pass, by their names in XLA's configuration. Their operands are of the shapes
# [B, T, H, K], [B, S, G, K] and, for scores, [B, H, T, S].
_FORWARD = {
    "bmm1": _Product(3, 3, (0, 2), (0, 2)),
    "bmm2": _Product(3, 1, (0, 1), (0, 2)),
}
_BACKWARD = {
    "bmm1_grad_gemm1": _Product(2, 1, (0, 1), (0, 2)),
    "bmm1_grad_gemm2": _Product(3, 1, (0, 1), (0, 2)),
    "bmm2_grad_gemm1": _Product(2, 1, (0, 1), (0, 2)),
    "bmm2_grad_gemm2": _Product(3, 3, (0, 2), (0, 2)),
}
_STABLEHLO = {tf.float16: "f16", tf.bfloat16: "bf16", tf.float32: "f32", tf.uint8: "ui8"}
# Added to the score of a key that is not to be seen, so that its weight, exp of the score, is 0.
# These are JAX's numbers, but for float16, which has its lowest.
_HIDDEN = {tf.float16: tf.float16.min, tf.bfloat16: -(2.0**41)}
# The difference that half precision explains, as a share of the largest value.
_ROUNDING = {tf.float16: 0.01, tf.bfloat16: 0.05}
# Bytes of the mask of packed sequences or of dropout, 1 GiB: all that is quadratic in time here.
_LARGEST_MASK = 2**30
# The log-sum-exp of a row without a kept key, so that its weights are exactly 0.
_LSE_OF_NO_KEY = 1e30
# Between that number and every other log-sum-exp: what is above it is such a row's.
_ABOVE_EVERY_LSE = 1e29


class Call(NamedTuple):
    """Call of attention, with all that decides whether cuDNN takes it."""

    query_shape: tuple[Any, ...]  # [B, T, H, K], None for sizes not known
    key_shape: tuple[Any, ...]  # [B, S, G, K]
    dtype: tf.DType
    causal: bool
    packed: bool  # a query sees keys of its own segment alone
    dropout: bool = False  # a mask of all heads says which weights are kept

    def example(self) -> Call:
        """Returns a small call of the same kind.

        Of T and S above 512 it keeps what a kernel's tiles leave over.
        """
        _, queries, heads, width = self.query_shape
        _, keys, groups, _ = self.key_shape
        few_queries = _shortened(queries)
        few_keys = _shortened(keys)
        few_groups = min(groups, 2)
        return self._replace(
            query_shape=(2, few_queries, few_groups * (heads // groups), width),
            key_shape=(2, few_keys, few_groups, width),
        )

    def reason_against(self) -> str | None:
        """Returns what cuDNN does not take of the call, or None."""
        batch, queries, heads, width = self.query_shape
        keys = self.key_shape[1]
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
        if masked:
            mask_shape = [batch, queries]
            if self.dropout:
                mask_shape = [batch, heads, queries]
            mask_bytes = 2 * math.prod(mask_shape) * keys  # in half precision
            if mask_bytes > _LARGEST_MASK:
                return (
                    f"packed sequences or dropout of {mask_shape}: their mask must take at most "
                    "1 GiB"
                )
        return None


def _shortened(time: int) -> int:
    """Returns a small number of tokens that leaves as many over, of tiles up to 256, as `time`."""
    if time <= 512:
        return time
    return 256 + time % 256


def is_usable(call: Call) -> bool:
    """Returns whether cuDNN takes the call on the device in use.

    Each kind of call is tried once, with a warning if it fails.
    """
    device = _device()
    if ":GPU:" not in device or call.reason_against() is not None:
        return False
    return _tried(call.example(), device) is None


def _device() -> str:
    """Returns the device of a function that is traced now.

    Under `tf.device("CPU:0")` it is not the GPU.
    """
    with tf.init_scope():
        return tf.zeros([]).device


@functools.cache
def _tried(call: Call, device: str) -> str | None:
    """Runs a call next to the unfused expression, and returns what went wrong, or None.

    Both run forward and backward.
    """
    rng = np.random.default_rng(0)
    shapes = [call.query_shape, call.key_shape, call.key_shape, call.query_shape]
    ids = np.sort(rng.integers(0, 3, call.query_shape[:2])).astype("int32")
    # Also while a step is traced: outside of its graph, of its tapes and of its names.
    with tf.init_scope(), collected_names():
        try:
            tensors = [tf.constant(rng.normal(size=shape), call.dtype) for shape in shapes]
            outcomes = _compute_both(call, tensors, tf.constant(ids))
            reason = _compare(outcomes, call.dtype)
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
        segments = None
        if call.packed:
            # Keys have fewer segments, so that some queries see nothing.
            segments = (ids, tf.minimum(ids, 1))
        dropout = None
        if call.dropout:
            dropout = (0.25, tf.constant([1, 2], tf.int64))
        form = Form(0.125, call.causal, segments, dropout)

        def output_and_gradients(attend, *inputs):
            output = attend(*inputs, form)
            # no tape records here
            gradients = tf.gradients(output, inputs, tf.cast(doutput, output.dtype))
            return (output, *gradients)

        fused = output_and_gradients(cudnn_attention, query, key, value)
        exact = output_and_gradients(
            reference_attention, *[tf.cast(t, tf.float32) for t in (query, key, value)]
        )
        return fused, exact

    fused, exact = run(*tensors, ids)
    return list(zip(fused, exact, strict=True))


def _compare(outcomes: Sequence[tuple[tf.Tensor, tf.Tensor]], dtype: tf.DType) -> str | None:
    """Describes a difference that is more than rounding; returns None if there is none."""
    for name, (fused, exact) in zip(("output", "dquery", "dkey", "dvalue"), outcomes, strict=True):
        # Of one key alone the gradient is 0: hence the bound from below.
        largest = max(np.abs(exact.numpy()).max(), 0.01)
        difference = np.abs(fused.numpy().astype("float32") - exact.numpy()).max()
        error = difference / largest
        if not error < _ROUNDING[dtype]:
            return f"Its {name} is off by {error:.2g} of the largest value."
    return None


def cudnn_attention(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, form: Form) -> tf.Tensor:
    """Computes `attention` as one fused kernel forward and one backward.

    The operands are taken as they lie in memory.

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
        """Returns the tensor with 0 for a query that sees nothing.

        All scores of such a query are as low, and cuDNN returns a mean.
        """
        if sees_BT11 is None:
            return t_BTHK
        return tf.where(sees_BT11, t_BTHK, tf.zeros([], t_BTHK.dtype))

    kept = _make_kept(form, query, key)
    masks = _masks(form, query.dtype)
    rate = 0.0 if form.dropout is None else form.dropout[0]

    @custom_gradient
    def run(query, key, value):
        inputs = [query, key, value]
        output_BTHK, lse_BHT = _forward(form, inputs, masks)
        output_BTHK = zeroed(output_BTHK)
        lse_of_kept_BHT = None
        if rate:
            masks_of_kept = _masks(form, query.dtype, kept(0))
            output_BTHK, lse_of_kept_BHT = _forward(form, inputs, masks_of_kept)
            # Of a row without a kept key: so that its weights are exactly 0 on the way back, too.
            lse_of_kept_BHT = tf.where(
                lse_of_kept_BHT < _HIDDEN[query.dtype] / 2, _LSE_OF_NO_KEY, lse_of_kept_BHT
            )
            output_BTHK = zeroed(_scaled(output_BTHK, rate, lse_BHT, lse_of_kept_BHT))

        # Kept for the backward pass is what the next layer takes, and no second tensor beside it.
        output_BTHK = checkpoint_name(output_BTHK, "attention")
        lse_BHT = checkpoint_name(lse_BHT, "attention")
        if lse_of_kept_BHT is not None:
            lse_of_kept_BHT = checkpoint_name(lse_of_kept_BHT, "attention")

        def gradient(doutput_BTHK):
            doutput_BTHK = zeroed(doutput_BTHK)
            if not rate:
                gradients = _backward(form, inputs, lse_BHT, doutput_BTHK, masks, output_BTHK)
                return first_order(gradients, "cuDNN's attention")

            # Without a barrier XLA would keep the mask.
            barred_BTHK, zero = private.xla.optimization_barrier(doutput_BTHK, tf.constant(0))
            masks_of_kept = _masks(form, query.dtype, kept(zero))
            scaled_BTHK = _scaled(barred_BTHK, rate, lse_BHT, lse_of_kept_BHT)
            no_output_BTHK = tf.zeros_like(output_BTHK)
            dquery_of_kept, dkey_of_kept, dvalue = _backward(
                form, inputs, lse_of_kept_BHT, scaled_BTHK, masks_of_kept, no_output_BTHK
            )
            without_values = [query, key, tf.zeros_like(value)]
            dquery_of_all, dkey_of_all, _ = _backward(
                form, without_values, lse_BHT, barred_BTHK, masks, output_BTHK
            )
            gradients = [dquery_of_kept + dquery_of_all, dkey_of_kept + dkey_of_all, dvalue]
            return first_order(gradients, "cuDNN's attention")

        return output_BTHK, gradient

    return run(query, key, value)


def _forward(
    form: Form, inputs: Sequence[tf.Tensor], masks: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Computes the output, and the log-sum-exp of each query's scores, [B, H, T]."""
    query, key, _ = inputs
    batch, queries, heads, _ = query.shape
    results = [query, tf.TensorSpec([batch, heads, queries], tf.float32)]
    config = _configure(query, key, form.scale, form.causal, _FORWARD)
    target = f"__cudnn$fmha{_name_mask(masks)}Softmax"
    return _call(target, [*inputs, *masks], results, config)


def _backward(
    form: Form,
    inputs: Sequence[tf.Tensor],
    lse_BHT: tf.Tensor,
    doutput_BTHK: tf.Tensor,
    masks: Sequence[tf.Tensor],
    output_BTHK: tf.Tensor,
) -> list[tf.Tensor]:
    """Computes the gradients of query, key and value."""
    query, key, _ = inputs
    operands = [*inputs, lse_BHT, doutput_BTHK, *masks, output_BTHK]
    config = _configure(query, key, form.scale, form.causal, _BACKWARD)
    target = f"__cudnn$fmha{_name_mask(masks)}SoftmaxBackward"
    return _call(target, operands, inputs, config)


def _name_mask(masks: Sequence[tf.Tensor]) -> str:
    """Returns what the name of a call has for a mask."""
    return "ScaleBias" if masks else ""


def _scaled(
    t_BTHK: tf.Tensor, rate: float, lse_BHT: tf.Tensor, lse_of_kept_BHT: tf.Tensor
) -> tf.Tensor:
    """Multiplies by the share that takes the softmax of kept keys to the weights after dropout."""
    share_BHT = tf.where(
        lse_of_kept_BHT > _ABOVE_EVERY_LSE,
        0.0,
        tf.exp(lse_of_kept_BHT - lse_BHT) / (1 - rate),
    )
    scaled_BTHK = tf.cast(t_BTHK, tf.float32) * tf.transpose(share_BHT, [0, 2, 1])[..., None]
    return tf.cast(scaled_BTHK, t_BTHK.dtype)


def _make_kept(
    form: Form, query: tf.Tensor, key: tf.Tensor
) -> Callable[[int | tf.Tensor], tf.Tensor]:
    """Returns a function that draws which weights dropout keeps, bool [B, H, T, S].

    It takes a 0, which ties what it draws to one of the passes.
    """
    batch, query_size, heads, _ = query.shape
    key_size = key.shape[1]
    queries = Blocks(query_size, 1, query_size)
    keys = Blocks(key_size, 1, key_size)
    factor = make_dropout(form, query, key.shape[2], queries, keys)

    def kept(zero):
        return tf.reshape(factor(0, zero) > 0, [batch, heads, query_size, key_size])

    return kept


def _sees(segments: tuple[tf.Tensor, tf.Tensor], causal: bool) -> tf.Tensor:
    """Returns whether a query sees any key, bool [B, T]."""
    seen_BTS = tf.squeeze(_same(segments), 1)
    at_or_before = True
    if causal:
        at_or_before = tf.linalg.band_part(tf.ones_like(seen_BTS), -1, 0)
    seen_BTS &= at_or_before
    return tf.reduce_any(seen_BTS, 2)


def _masks(form: Form, dtype: tf.DType, kept_BHTS: tf.Tensor | None = None) -> list[tf.Tensor]:
    """Returns the mask that is added to the scores, or no tensor if all of them are seen.

    It is [B, 1, T, S], for all heads, or [B, H, T, S].
    """
    conditions = []
    if form.segments is not None:
        conditions.append(_same(form.segments))
    if kept_BHTS is not None:
        conditions.append(kept_BHTS)
    if not conditions:
        return []
    seen = functools.reduce(tf.logical_and, conditions)
    return [tf.where(seen, tf.constant(0, dtype), tf.constant(_HIDDEN[dtype], dtype))]


def _same(segments: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
    """Returns whether a query and a key are of the same segment, bool [B, 1, T, S]."""
    ids_BT, ids_BS = segments
    return ids_BT[:, None, :, None] == ids_BS[:, None, None, :]


def _call(
    target: str, operands: Sequence[tf.Tensor], results: Sequence[Any], config: dict[str, Any]
) -> list[Any]:
    """Calls one of XLA's custom calls, with results of these shapes and dtypes.

    cuDNN reads a result's sizes as [B, H, T, K] and its strides from the layout: those of [B, T, H,
    K], so that nothing is copied. XlaCustomCallV2 has no word for a layout, StableHLO has.
    """
    orders = []
    result_shapes = []
    result_dtypes = []
    for result in results:
        order = tuple(range(result.shape.rank))
        if result.shape.rank == 4:
            order = (0, 2, 1, 3)
        orders.append(order)
        result_shapes.append([result.shape[axis] for axis in order])
        result_dtypes.append(result.dtype)
    # Last, the workspace: XLA asks cuDNN for its real size when it compiles.
    result_shapes.append([0])
    result_dtypes.append(tf.uint8)

    names = []
    parameters = []
    operand_types = []
    operand_layouts = []
    for i, operand in enumerate(operands):
        operand_type = _write_type(operand.shape, operand.dtype)
        names.append(f"%a{i}")
        parameters.append(f"%a{i}: {operand_type}")
        operand_types.append(operand_type)
        operand_layouts.append(_write_layout(range(operand.shape.rank)))
    result_layouts = [_write_layout(order) for order in (*orders, (0,))]
    returned = [f"%c#{i}" for i in range(len(result_shapes))]

    inputs = ", ".join(operand_types)
    outputs = ", ".join(map(_write_type, result_shapes, result_dtypes))
    module = f"""
        func.func public @main({", ".join(parameters)}) -> ({outputs}) {{
          %c:{len(result_shapes)} = stablehlo.custom_call @{target}({", ".join(names)}) {{
            api_version = 2 : i32,
            backend_config = {json.dumps(json.dumps(config))},
            operand_layouts = [{", ".join(operand_layouts)}],
            result_layouts = [{", ".join(result_layouts)}]
          }} : ({inputs}) -> ({outputs})
          return {", ".join(returned)} : {outputs}
        }}"""
    *called, _ = private.xla.call_module(
        operands,
        version=9,
        module=module,
        Sout=result_shapes,
        Tout=result_dtypes,
        platforms=["CUDA"],
        # a described GPU is none to TensorFlow
        disabled_checks=[private.xla.call_module_disable_check_platform()],
    )
    return [tf.transpose(t, order) for t, order in zip(called, orders, strict=True)]


def _write_type(shape: Sequence[int], dtype: tf.DType) -> str:
    """Writes StableHLO's type of a tensor."""
    sizes = "".join(f"{size}x" for size in shape)
    return f"tensor<{sizes}{_STABLEHLO[dtype]}>"


def _write_layout(order: Sequence[int]) -> str:
    """Writes the row-major layout of a tensor whose axes have been reordered."""
    return f"dense<{list(reversed(order))}> : tensor<{len(order)}xindex>"


def _configure(
    query: tf.Tensor,
    key: tf.Tensor,
    scale: float,
    causal: bool,
    products: dict[str, _Product],
) -> dict[str, Any]:
    """Builds the configuration that XLA reads beside the operands, a GpuBackendConfig for JSON."""
    batch, queries, heads, _ = query.shape
    keys = key.shape[1]
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
    for name, product in products.items():
        config[f"{name}_dot_dimension_numbers"] = {
            "lhs_contracting_dimensions": [str(product.left_summed)],
            "rhs_contracting_dimensions": [str(product.right_summed)],
            "lhs_batch_dimensions": [str(axis) for axis in product.left_batch],
            "rhs_batch_dimensions": [str(axis) for axis in product.right_batch],
        }
    return {"operation_queue_id": "0", "cudnn_fmha_backend_config": config}


def _require(query: tf.Tensor, key: tf.Tensor, form: Form) -> None:
    """Raises ValueError for a call that cuDNN does not take."""
    remedy = 'Pass implementation="blockwise".'
    if not (has_gpu() and in_xla()):
        raise ValueError(
            'implementation="cudnn" needs a GPU, and a program that XLA compiles '
            f"(jit_compile=True). {remedy}"
        )
    call = Call(
        tuple(query.shape),
        tuple(key.shape),
        query.dtype,
        causal=form.causal,
        packed=form.segments is not None,
        dropout=form.dropout is not None,
    )
    reason = call.reason_against()
    if reason:
        raise ValueError(
            f"cuDNN does not take {reason}. Query {query.shape}, key {key.shape}, "
            f"causal={form.causal}. {remedy}"
        )
