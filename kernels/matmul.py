"""Multiplies by weights whose gradients are summed and returned in float32, in any precision.

Shape suffixes: T rows (tokens) of the input, I and O its width and the output's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from fastaccum.kernels.checks import as_tensor
from fastaccum.kernels.custom_gradients import custom_gradient
from fastaccum.kernels.devices import has_gpu
from fastaccum.kernels.float8 import (
    E4M3,
    Float8,
    product_float8,
    product_of_dequantized,
    quantize,
)
from fastaccum.kernels.hoisted_casts import rounded
from fastaccum.kernels.xla_ops import HALF, barred, dot, in_xla, product, sizes, unfused

# Operations that activations are made of, which cost little to compute again.
_ELEMENTWISE = ("AddV2", "Erfc", "Mul", "Neg", "Pow", "Sigmoid", "Square", "Tanh")
# Operations that pass a value on, as it is or in another dtype. An IdentityN holds a custom
# gradient, such as that of SiLU.
_TRANSPARENT = ("Cast", "Identity", "IdentityN")

# Multiplies two matrices, with any number of leading axes that both share.
Product = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
# Turns and flattens a kernel, or a copy of it.
Flatten = Callable[[tf.Tensor], tf.Tensor]


def matmul_fp32_wgrad(x: tf.Tensor, kernel: tf.Tensor, copy: tf.Tensor | None = None) -> tf.Tensor:
    """Computes `x @ tf.cast(kernel, x.dtype)`, with the kernel's gradient as one dot in float32.

    Plain autodiff under mixed precision (Micikevicius et al., 2018,
    https://arxiv.org/abs/1710.03740) gives `cast(x^T @ dy, float32)`: rounded to x's dtype, and in
    float16 infinite past 65504. Here, with x's dtype being float16 or bfloat16:

        dx = dy @ cast(kernel, x.dtype)^T                # in x.dtype, as autodiff gives it
        dkernel = x^T @ dy                               # half x half -> float32, rounded nowhere

    Nothing stands between that dot and a float32 accumulator, so a GPU can add in the matmul's own
    epilogue. For float32 and float64, this is the plain matmul.

    Args:
        x: [..., in], float16, bfloat16, float32 or float64; the result, [..., out], has its dtype.
        kernel: [in, out], float32 (float64 for x in float64): the variable itself, before any
            autocast.
        copy: `tf.cast(kernel, x.dtype)`, where it is at hand; by default, it is made here.

    >>> x, kernel = tf.fill([300, 1], tf.constant(300.0, tf.float16)), tf.ones([1, 1])
    >>> with tf.GradientTape() as tape:
    ...     tape.watch(kernel)
    ...     y = matmul_fp32_wgrad(x, kernel)
    >>> y.dtype.name, tape.gradient(y, kernel).numpy().item()  # float16 ends at 65504
    ('float16', 90000.0)
    """
    x = as_tensor("x", x)
    kernel = as_tensor("kernel", kernel)
    _require_dtypes(x, kernel)
    return _matmul(x, kernel, lambda x_TI, kernel_IO: _product(x_TI, kernel_IO, copy))


def matmul_float8(
    x: tf.Tensor,
    kernel: tf.Tensor,
    copy: Float8 | None = None,
    *,
    implementation: str = "float8",
) -> tf.Tensor:
    """Computes `x @ kernel` and both gradients as products of float8 numbers.

    Each tensor is rounded by a scale of its own, found anew in each call, so that nothing is kept
    from one call to the next (dynamic tensorwise scaling; formats as in Micikevicius et al., 2022,
    https://arxiv.org/abs/2209.05433):

        scale(t) = 2 ** ceil(log2(max(|t|) / largest))    # largest: 448 in e4m3, 57344 in e5m2
        e4m3(t) = cast(t / scale(t), float8_e4m3fn) * scale(t)
        e5m2(t) = cast(t / scale(t), float8_e5m2) * scale(t)

        y = e4m3(x) @ e4m3(kernel)                        # summed in float32, then in bfloat16
        dx = e5m2(dy) @ e4m3(kernel)^T                    # likewise
        dkernel = e4m3(x)^T @ e5m2(dy)                    # in float32, rounded nowhere

    cuBLAS multiplies float8 numbers in one layout alone, with the summed axis last in both. So on
    a GPU e4m3(kernel), e4m3(x) and e5m2(dy) exist in both layouts. The kernel that rounds a tensor
    writes both.

    Args:
        x: [..., in], float16 or bfloat16; the result, [..., out], has its dtype.
        kernel: [in, out], float32: the variable itself, before any autocast.
        copy: `quantize(kernel, E4M3)` of `fastaccum.kernels.float8`, where it is at hand; by
            default, it is made here.
        implementation: "float8", or "reference" for the same formula with products in float32.

    Raises:
        TypeError: for other dtypes.
        ValueError: for shapes that do not fit.

    >>> x, kernel = tf.ones([2, 16], tf.bfloat16), tf.fill([16, 1], 0.1)
    >>> matmul_float8(x, kernel)[0, 0].numpy().item()  # 0.1 is 0.1015625 in e4m3 with this scale
    1.625
    """
    x = as_tensor("x", x)
    kernel = as_tensor("kernel", kernel)
    _require_half(x, kernel)
    product = _float8_product(implementation)
    rounded = quantize(kernel, E4M3) if copy is None else copy
    return _matmul(x, kernel, lambda x_TI, kernel_IO: product(x_TI, kernel_IO, rounded))


def _matmul(x: tf.Tensor, kernel: tf.Tensor, product: Product) -> tf.Tensor:
    has_axes = x.shape.rank and kernel.shape.rank == 2 and kernel.shape.is_fully_defined()
    if not has_axes or not x.shape[-1:].is_compatible_with(kernel.shape[:1]):
        raise ValueError(
            f"x of shape {x.shape} does not fit kernel of shape {kernel.shape}: they must be "
            "[..., in] and [in, out], the kernel's sizes and the rank of x known when this is "
            "traced."
        )
    width, width_out = kernel.shape
    x_TI = tf.reshape(x, [-1, width])
    return tf.reshape(product(x_TI, kernel), [*sizes(x)[:-1], width_out])


def einsum_fp32_wgrad(
    equation: str, x: tf.Tensor, kernel: tf.Tensor, copy: tf.Tensor | None = None
) -> tf.Tensor:
    """Computes `tf.einsum(equation, x, tf.cast(kernel, x.dtype))`, as `matmul_fp32_wgrad` does.

    Both operands are turned and flattened to one matmul, batched over the axes that all three terms
    share; "..." may stand for axes of x and the output.
    """
    x = tf.convert_to_tensor(x)
    kernel = tf.convert_to_tensor(kernel)
    _require_dtypes(x, kernel)

    def product(x_TI, kernel_IO, flatten):
        copy_IO = None if copy is None else flatten(copy)
        return _product(x_TI, kernel_IO, copy_IO)

    return _einsum(equation, x, kernel, product)


def einsum_float8(
    equation: str,
    x: tf.Tensor,
    kernel: tf.Tensor,
    copy: Float8 | None = None,
    *,
    implementation: str = "float8",
) -> tf.Tensor:
    """Computes `tf.einsum(equation, x, kernel)`, as `matmul_float8` does.

    All of a kernel has one scale.

    Args:
        equation: of two operands and an output, such as "abc,cd->abd", each axis at most once in a
            term and in at least two of them; "..." may stand for axes of x and the output.
        x, kernel, copy, implementation: as of `matmul_float8`, in the equation's shapes.

    Raises:
        TypeError: for other dtypes.
        ValueError: for shapes that do not fit the equation.

    >>> x, kernel = tf.ones([2, 5, 16], tf.bfloat16), tf.ones([16, 4, 8])
    >>> einsum_float8("btd,dnh->btnh", x, kernel).shape
    TensorShape([2, 5, 4, 8])
    """
    x = tf.convert_to_tensor(x)
    kernel = tf.convert_to_tensor(kernel)
    _require_half(x, kernel)
    multiply = _float8_product(implementation)
    rounded = quantize(kernel, E4M3) if copy is None else copy

    def product(x_TI, kernel_IO, flatten):
        return multiply(x_TI, kernel_IO, rounded._replace(values=flatten(rounded.values)))

    return _einsum(equation, x, kernel, product)


def _einsum(
    equation: str,
    x: tf.Tensor,
    kernel: tf.Tensor,
    product: Callable[[tf.Tensor, tf.Tensor, Flatten], tf.Tensor],
) -> tf.Tensor:
    """Turns and flattens both operands to matrices, and multiplies them."""
    axes = matmul_axes(equation, x, kernel)
    if axes is None:
        raise ValueError(
            f"x {x.shape} and kernel {kernel.shape} do not fit equation={equation!r}, which must "
            "have two operands and an output, such as 'abc,cd->abd', each axis at most once in "
            "a term and in at least two of them."
        )
    of_x, of_kernel, of_y = axes
    batch, inner, outer = _kernel_axes(*axes)
    rows = [axis for axis in of_x if axis not in of_kernel]

    size = dict(zip(of_x, sizes(x), strict=True))
    size.update(zip(of_kernel, kernel.shape, strict=True))  # these are known
    batch_sizes = [size[axis] for axis in batch]
    width = math.prod(size[axis] for axis in inner)
    width_out = math.prod(size[axis] for axis in outer)

    def flattened(t: tf.Tensor) -> tf.Tensor:
        in_order = _transpose(t, of_kernel, batch + inner + outer)
        return tf.reshape(in_order, [*batch_sizes, width, width_out])

    x_in_order = _transpose(x, of_x, batch + rows + inner)
    x_TI = tf.reshape(x_in_order, [*batch_sizes, -1, width])
    y_axes = batch + rows + outer
    y = product(x_TI, flattened(kernel), flattened)
    return _transpose(tf.reshape(y, [size[axis] for axis in y_axes]), y_axes, of_y)


def convolution_fp32_wgrad(
    convolution: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    x: tf.Tensor,
    kernel: tf.Tensor,
    copy: tf.Tensor | None = None,
    pixels: tuple[slice, ...] | None = None,
) -> tf.Tensor:
    """Computes `convolution(x, tf.cast(kernel, x.dtype))`, with the kernel's gradient in float32.

    `dx` is that of autodiff; `dkernel` is that of `convolution`, which is linear in each argument,
    on float32 copies of x and dy. A kernel of one pixel, [1, ..., in, out], multiplies `x[pixels]`,
    the pixels that its strides meet: its `dkernel` is one dot as in `matmul_fp32_wgrad`, without
    copies. For other kernels `pixels` is None.
    """
    x = tf.convert_to_tensor(x)
    kernel = tf.convert_to_tensor(kernel)
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
                width, width_out = kernel.shape[-2:]
                x_TI = tf.reshape(x[pixels], [-1, width])
                dy_TO = tf.reshape(dy, [-1, width_out])
                return dx, tf.reshape(product(tf.transpose(x_TI), dy_TO), kernel.shape)
            # Else XLA would write x's copy where it computes x, and keep it from there on.
            _, dkernel = gradients(tf.cast(unfused(x), tf.float32), kernel, tf.cast(dy, tf.float32))
            return dx, dkernel

        return convolution(x, half), gradient

    if x.dtype in HALF:
        return convolve(x, kernel)
    return convolution(x, kernel)


def _product(x_TI: tf.Tensor, kernel_IO: tf.Tensor, copy_IO: tf.Tensor | None) -> tf.Tensor:
    """Multiplies two matrices, with any number of leading axes that both share."""
    if x_TI.dtype not in HALF:
        return tf.matmul(x_TI, kernel_IO)

    @custom_gradient
    def multiply(x_TI, kernel_IO):
        rounded_IO = rounded(kernel_IO, x_TI.dtype, copy_IO)

        def gradient(dy_TO):
            again_TI, dy_TO = _recompute_product(x_TI, dy_TO)
            dx_TI = tf.matmul(dy_TO, rounded_IO, transpose_b=True)
            dkernel_IO = dot(again_TI, dy_TO, transpose_a=True)
            return dx_TI, dkernel_IO

        return tf.matmul(x_TI, rounded_IO), gradient

    return multiply(x_TI, kernel_IO)


def _recompute_product(x: tf.Tensor, dy: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns x and dy, of which x is computed again if it is a product of two tensors.

    Such a product, as of a gated unit, is computed again on a GPU alone, once dy is there.
    """
    gated = _gated(x)
    if gated is None:
        return x, dy
    preactivations = {}
    for factor in gated.op.inputs:
        for t in _preactivations(factor):
            preactivations[t.name] = t
    *again, dy = barred(*preactivations.values(), dy)
    values = dict(zip(preactivations, again, strict=True))

    def rebuild(t: tf.Tensor) -> tf.Tensor:
        if t.name in values:
            return values[t.name]
        if t.op.type == "Const":
            return t
        if t.op.type in _TRANSPARENT:
            return tf.cast(rebuild(t.op.inputs[t.value_index]), t.dtype)
        operands = {}
        for argument, operand in zip(t.op.op_def.input_arg, t.op.inputs, strict=True):
            operands[argument.name] = rebuild(operand)
        operation = getattr(tf.raw_ops, t.op.type)
        values[t.name] = operation(**operands)
        return values[t.name]

    return tf.reshape(rebuild(gated), sizes(x)), dy


def _gated(x: tf.Tensor) -> tf.Tensor | None:
    """Returns the product of two tensors of one shape that x is, reshaped or not.

    Returns None where it is none, or where x is not to be computed again.
    """
    if not (has_gpu() and in_xla()):
        return None
    while x.op.type in ("Identity", "Reshape"):
        x = x.op.inputs[0]
    if x.op.type != "Mul":
        return None
    a, b = x.op.inputs
    if a.shape != b.shape:
        return None
    return x


def _preactivations(
    t: tf.Tensor, depth: int = 16, known: dict[Any, list[tf.Tensor]] | None = None
) -> list[tf.Tensor]:
    """Returns the one tensor that an activation of at most `depth` operations computes t from.

    Returns t if there is no such tensor, and none for a constant. `known` holds earlier results.
    """
    known = {} if known is None else known
    if (t.name, depth) in known:
        return known[t.name, depth]

    inputs: Sequence[tf.Tensor] = ()
    if depth > 0 and t.op.type in _TRANSPARENT:
        inputs = [t.op.inputs[t.value_index]]
    elif depth > 0 and t.op.type in _ELEMENTWISE:
        inputs = t.op.inputs
    sources = {}
    for operand in inputs:
        for source in _preactivations(operand, depth - 1, known):
            sources[source.name] = source

    is_constant = t.op.type == "Const" or (len(inputs) > 0 and not sources)
    has_result = is_constant or len(sources) == 1
    known[t.name, depth] = list(sources.values()) if has_result else [t]
    return known[t.name, depth]


def _require_dtypes(x: tf.Tensor, kernel: tf.Tensor) -> None:
    if x.dtype not in (*HALF, tf.float32, tf.float64):
        raise TypeError(
            f"x has dtype {x.dtype.name}: it must be float16, bfloat16, float32 or float64."
        )
    kernel_dtype = tf.float64 if x.dtype == tf.float64 else tf.float32
    if kernel.dtype != kernel_dtype:
        raise TypeError(
            f"kernel has dtype {kernel.dtype.name}, with x in {x.dtype.name}: pass the "
            f"{kernel_dtype.name} variable itself. Inside a Keras layer, read it in a scope "
            "without autocast."
        )


def _require_half(x: tf.Tensor, kernel: tf.Tensor) -> None:
    _require_dtypes(x, kernel)
    if x.dtype not in HALF:
        raise TypeError(
            f"x has dtype {x.dtype.name}: a product in float8 takes float16 or bfloat16. For "
            "others there is matmul_fp32_wgrad."
        )


def _float8_product(implementation: str) -> Callable[[tf.Tensor, tf.Tensor, Float8], tf.Tensor]:
    products = {"float8": product_float8, "reference": product_of_dequantized}
    if implementation not in products:
        raise ValueError(
            f"implementation={implementation!r} must be one of {', '.join(map(repr, products))}."
        )
    return products[implementation]


def matmul_axes(equation: str, x: tf.Tensor, kernel: tf.Tensor) -> tuple[str, str, str] | None:
    """Returns the letters of x's axes, the kernel's and the output's; None where it is no matmul.

    Digits stand for the axes of "...".
    """
    operands, _, of_y = equation.replace(" ", "").partition("->")
    of_x, _, of_kernel = operands.partition(",")
    elided_count = x.shape.rank - len(of_x.replace("...", ""))
    elided = "".join(chr(ord("0") + i) for i in range(elided_count))
    of_x = of_x.replace("...", elided)
    of_y = of_y.replace("...", elided)
    if len(of_x) != x.shape.rank or len(of_kernel) != kernel.shape.rank:
        return None

    size_in_x = dict(zip(of_x, x.shape, strict=True))
    for axis, size in zip(of_kernel, kernel.shape, strict=True):
        if size_in_x.get(axis) not in (None, size):
            return None

    terms = (of_x, of_kernel, of_y)
    for term in terms:
        for axis in term:
            terms_with_axis = [other for other in terms if axis in other]
            if term.count(axis) > 1 or len(terms_with_axis) < 2:
                return None
    return terms


def matmul_sizes(equation: str, x: tf.Tensor, kernel: tf.Tensor) -> tuple[int, int] | None:
    """Returns how many numbers of a row a product of matrices takes and gives; None for others."""
    axes = matmul_axes(equation, x, kernel)
    if axes is None:
        return None
    size = dict(zip(axes[1], kernel.shape, strict=True))
    _, inner, outer = _kernel_axes(*axes)
    return math.prod(size[axis] for axis in inner), math.prod(size[axis] for axis in outer)


def _kernel_axes(of_x: str, of_kernel: str, of_y: str) -> tuple[list[str], list[str], list[str]]:
    """Returns the kernel's axes that all three have, those that are summed, and the others."""
    batch = [axis for axis in of_kernel if axis in of_x and axis in of_y]
    inner = [axis for axis in of_kernel if axis in of_x and axis not in of_y]
    outer = [axis for axis in of_kernel if axis not in of_x]
    return batch, inner, outer


def _transpose(x: tf.Tensor, axes: str | list[str], to: str | list[str]) -> tf.Tensor:
    order = [axes.index(axis) for axis in to]
    return x if order == sorted(order) else tf.transpose(x, order)
