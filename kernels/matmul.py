"""Linear maps whose weight gradient is accumulated and returned in float32, whatever the inputs'
dtype.

Shape suffixes: T rows (tokens) of the input, I and O its width and the output's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from fastaccum.kernels.checks import as_tensor
from fastaccum.kernels.custom_gradients import custom_gradient
from fastaccum.kernels.devices import has_gpu
from fastaccum.kernels.rounded import rounded
from fastaccum.kernels.xla_ops import HALF, barred, dot, in_xla, product, sizes, unfused

_ELEMENTWISE = ("AddV2", "Erfc", "Mul", "Neg", "Pow", "Sigmoid", "Square", "Tanh")
# an IdentityN holds a custom gradient, such as that of SiLU
_TRANSPARENT = ("Cast", "Identity", "IdentityN")


def matmul_fp32_wgrad(x: tf.Tensor, kernel: tf.Tensor, copy: tf.Tensor | None = None) -> tf.Tensor:
    """Computes `x @ tf.cast(kernel, x.dtype)`, with the kernel's gradient as one dot with a float32
    result.

    Plain autodiff under mixed precision (Micikevicius et al., 2018,
    https://arxiv.org/abs/1710.03740) gives `cast(x^T @ dy, float32)`: rounded to x's dtype, and in
    float16 infinite past 65504. Here, with x's dtype being
    float16 or bfloat16:

        dx = dy @ cast(kernel, x.dtype)^T                # in x.dtype, as autodiff gives it
        dkernel = x^T @ dy                               # half x half -> float32, rounded nowhere

    Nothing stands between that dot and a float32 accumulator, so a GPU can add in the matmul's own
    epilogue. For float32 and float64, this is the plain matmul.

    Args: x: [..., in], float16, bfloat16, float32 or float64; the result, [..., out], has its
        dtype. kernel: [in, out], float32 (float64 for x in float64): the variable itself, before
        any autocast. copy: `tf.cast(kernel, x.dtype)`, where it is at hand; by default, it is made
        here.

    >>> x, kernel = tf.fill([300, 1], tf.constant(300.0, tf.float16)), tf.ones([1, 1])
    >>> with tf.GradientTape() as tape:
    ...     tape.watch(kernel)
    ...     y = matmul_fp32_wgrad(x, kernel)
    >>> y.dtype.name, tape.gradient(y, kernel).numpy().item()  # float16 ends at 65504
    ('float16', 90000.0)
    """
    x, kernel = as_tensor("x", x), as_tensor("kernel", kernel)
    _require_dtypes(x, kernel)
    fits = x.shape.rank and kernel.shape.rank == 2 and kernel.shape.is_fully_defined()
    if not fits or not x.shape[-1:].is_compatible_with(kernel.shape[:1]):
        raise ValueError(
            f"x of shape {x.shape} does not fit kernel of shape {kernel.shape}: they must be "
            "[..., in] and [in, out], the kernel's sizes and the rank of x known when this is "
            "traced."
        )
    return tf.reshape(
        _product(tf.reshape(x, [-1, kernel.shape[0]]), kernel, copy),
        [*sizes(x)[:-1], kernel.shape[1]],
    )


def einsum_fp32_wgrad(
    equation: str, x: tf.Tensor, kernel: tf.Tensor, copy: tf.Tensor | None = None
) -> tf.Tensor:
    """Computes `tf.einsum(equation, x, tf.cast(kernel, x.dtype))`, with gradients as in
    `matmul_fp32_wgrad`.

    Both operands are turned and flattened to one matmul, batched over the axes that all three terms
    share; "..." may stand for axes of x and the output.
    """
    x, kernel = tf.convert_to_tensor(x), tf.convert_to_tensor(kernel)
    _require_dtypes(x, kernel)
    axes = matmul_axes(equation, x, kernel)
    if axes is None:
        raise ValueError(
            f"x {x.shape} and kernel {kernel.shape} do not fit equation={equation!r}, which must "
            "have two operands and an output, such as 'abc,cd->abd', each axis at most once in "
            "a term and in at least two of them."
        )
    of_x, of_kernel, of_y = axes
    batch = [a for a in of_kernel if a in of_x and a in of_y]
    inner = [a for a in of_kernel if a in of_x and a not in of_y]
    outer = [a for a in of_kernel if a not in of_x]
    rows = [a for a in of_x if a not in of_kernel]
    size = {
        **dict(zip(of_x, sizes(x), strict=True)),
        **dict(zip(of_kernel, kernel.shape, strict=True)),
    }
    lead = [size[a] for a in batch]
    width, width_out = (math.prod(size[a] for a in axes) for axes in (inner, outer))

    x_TI = tf.reshape(_transpose(x, of_x, batch + rows + inner), [*lead, -1, width])
    kernel_IO, copy_IO = (
        None
        if t is None
        else tf.reshape(_transpose(t, of_kernel, batch + inner + outer), [*lead, width, width_out])
        for t in (kernel, copy)
    )
    y = tf.reshape(_product(x_TI, kernel_IO, copy_IO), [size[a] for a in batch + rows + outer])
    return _transpose(y, batch + rows + outer, of_y)


def convolution_fp32_wgrad(
    convolution: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    x: tf.Tensor,
    kernel: tf.Tensor,
    copy: tf.Tensor | None = None,
    pixels: tuple[slice, ...] | None = None,
) -> tf.Tensor:
    """Computes `convolution(x, tf.cast(kernel, x.dtype))`, with the kernel's gradient in float32.

    `dx` is that of autodiff; `dkernel` is that of `convolution`, which is linear in each argument,
    on float32 copies
    of x and dy. A kernel of one pixel, [1, ..., in, out], multiplies `x[pixels]`, the pixels that
        its strides meet: its
    `dkernel` is one dot as in `matmul_fp32_wgrad`, without copies. For other kernels `pixels` is
    None.
    """
    x, kernel = tf.convert_to_tensor(x), tf.convert_to_tensor(kernel)
    _require_dtypes(x, kernel)

    def gradients(x, kernel, dy):
        # A linear map's gradient uses nothing of the way forward: XLA drops it.
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch((x, kernel))
            y = convolution(x, kernel)
        return tape.gradient(y, (x, kernel), dy)

    @custom_gradient
    def convolve(x, kernel):
        half = rounded(kernel, x.dtype, copy)

        def gradient(dy):
            dx, _ = gradients(x, half, dy)
            if pixels is not None:
                x_TI, dy_TO = (
                    tf.reshape(t, [-1, n])
                    for t, n in zip((x[pixels], dy), kernel.shape[-2:], strict=True)
                )
                return dx, tf.reshape(product(tf.transpose(x_TI), dy_TO), kernel.shape)
            # Else XLA would write x's copy where it computes x, and keep it from there on.
            _, dkernel = gradients(tf.cast(unfused(x), tf.float32), kernel, tf.cast(dy, tf.float32))
            return dx, dkernel

        return convolution(x, half), gradient

    return convolve(x, kernel) if x.dtype in HALF else convolution(x, kernel)


def _product(x_TI: tf.Tensor, kernel_IO: tf.Tensor, copy_IO: tf.Tensor | None) -> tf.Tensor:
    """Multiplies two matrices, with any number of leading axes that both share."""
    if x_TI.dtype not in HALF:
        return tf.matmul(x_TI, kernel_IO)

    @custom_gradient
    def multiply(x_TI, kernel_IO):
        rounded_IO = rounded(kernel_IO, x_TI.dtype, copy_IO)

        def gradient(dy_TO):
            again_TI, dy_TO = _recompute_product(x_TI, dy_TO)
            return tf.matmul(dy_TO, rounded_IO, transpose_b=True), dot(
                again_TI, dy_TO, transpose_a=True
            )

        return tf.matmul(x_TI, rounded_IO), gradient

    return multiply(x_TI, kernel_IO)


def _recompute_product(x: tf.Tensor, dy: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns x and dy; a product of two tensors, as a gated unit's, is computed again on a GPU
    once dy is there.
    """
    gated = x if has_gpu() and in_xla() else None
    while gated is not None and gated.op.type in ("Identity", "Reshape"):
        gated = gated.op.inputs[0]
    if (
        gated is None
        or gated.op.type != "Mul"
        or gated.op.inputs[0].shape != gated.op.inputs[1].shape
    ):
        return x, dy
    values = {t.name: t for each in gated.op.inputs for t in _preactivations(each)}
    *again, dy = barred(*values.values(), dy)
    values = dict(zip(values, again, strict=True))

    def rebuild(t: tf.Tensor) -> tf.Tensor:
        if t.name in values or t.op.type == "Const":
            return values.get(t.name, t)
        if t.op.type in _TRANSPARENT:
            return tf.cast(rebuild(t.op.inputs[t.value_index]), t.dtype)
        names = (argument.name for argument in t.op.op_def.input_arg)
        operands = dict(zip(names, map(rebuild, t.op.inputs), strict=True))
        return values.setdefault(t.name, getattr(tf.raw_ops, t.op.type)(**operands))

    return tf.reshape(rebuild(gated), sizes(x)), dy


def _preactivations(
    t: tf.Tensor, depth: int = 16, known: dict[Any, list[tf.Tensor]] | None = None
) -> list[tf.Tensor]:
    """Returns the one tensor that an activation of at most so many operations computes t from; t if
    there is none.
    """
    known = {} if known is None else known
    if (t.name, depth) in known:
        return known[t.name, depth]
    operation = t.op
    inputs = (
        [operation.inputs[t.value_index]] if operation.type in _TRANSPARENT else operation.inputs
    )
    inputs = inputs if depth and operation.type in (*_TRANSPARENT, *_ELEMENTWISE) else []
    found = {
        each.name: each for source in inputs for each in _preactivations(source, depth - 1, known)
    }
    constant = operation.type == "Const" or (inputs and not found)
    known[t.name, depth] = list(found.values()) if constant or len(found) == 1 else [t]
    return known[t.name, depth]


def _require_dtypes(x: tf.Tensor, kernel: tf.Tensor) -> None:
    if x.dtype not in (*HALF, tf.float32, tf.float64):
        raise TypeError(
            f"x has dtype {x.dtype.name}: it must be float16, bfloat16, float32 or float64."
        )
    wanted = tf.float64 if x.dtype == tf.float64 else tf.float32
    if kernel.dtype != wanted:
        raise TypeError(
            f"kernel has dtype {kernel.dtype.name}, with x in {x.dtype.name}: pass the "
            f"{wanted.name} variable itself. Inside a Keras layer, read it in a scope without "
            "autocast."
        )


def matmul_axes(equation: str, x: tf.Tensor, kernel: tf.Tensor) -> tuple[str, str, str] | None:
    """Returns the letters of x's axes, the kernel's and the output's, digits for "..."; None where
    it is no matmul.
    """
    operands, _, of_y = equation.replace(" ", "").partition("->")
    of_x, _, of_kernel = operands.partition(",")
    elided = "".join(chr(ord("0") + i) for i in range(x.shape.rank - len(of_x.replace("...", ""))))
    of_x, of_y = (axes.replace("...", elided) for axes in (of_x, of_y))
    terms = (of_x, of_kernel, of_y)
    size = dict(zip(of_x, x.shape, strict=False))
    fits = (len(of_x), len(of_kernel)) == (x.shape.rank, kernel.shape.rank)
    fits = fits and all(
        size.get(a) in (None, n) for a, n in zip(of_kernel, kernel.shape, strict=True)
    )
    fits = fits and all(
        axes.count(a) < 2 and sum(a in t for t in terms) > 1 for axes in terms for a in axes
    )
    return terms if fits else None


def _transpose(x: tf.Tensor, axes: str | list[str], to: str | list[str]) -> tf.Tensor:
    order = [axes.index(axis) for axis in to]
    return x if order == sorted(order) else tf.transpose(x, order)
