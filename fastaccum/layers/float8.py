"""`float8`: layers that multiply in float8, and why others do not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal

import keras
import tensorflow as tf

from fastaccum.basics.attributes import Nest
from fastaccum.basics.warnings import warn
from fastaccum.kernels import fp32_layers, private
from fastaccum.kernels.devices import compute_capability, has_gpu
from fastaccum.kernels.matmul import matmul_sizes
from fastaccum.layers.interceptors import Interceptor, Role

Float8 = Literal["auto"] | bool
Call = Callable[..., tf.Tensor]  # a layer's method
PRODUCTS = (keras.layers.Dense, keras.layers.EinsumDense)

# The compute capability of the first GPUs with float8 products.
_FIRST = (8, 9)
# GPUs multiply float8 matrices whose sizes are multiples of it.
_MULTIPLE = 16
# The least `inner * outer / (inner + outer)` of a kernel that "auto" takes. By an H200's roofline
# (790 and 1,580 TFLOP/s, 4 TB/s) its three products gain `inner * outer * 3.8e-15` s a row.
# Rounding takes `(inner + outer) * 2.3e-12` s in the program of a GPT 124M, which gains nothing.
_LEAST_GAIN = 600
IN_FLOAT8 = "float8"


class Float8Layers:
    """The layers of a train step that multiply in float8.

    Attributes:
        choices: "float8" or the reason for half precision, for each layer of products that a trace
            has called, by path.
    """

    def __init__(self, mode: Float8, last: Collection[keras.layers.Layer]):
        self._mode = mode
        self._last = {id(layer) for layer in last}
        self.choices: dict[str, str] = {}

    def make_forms(self, layers: Iterable[keras.layers.Layer]) -> list[Interceptor]:
        """Returns interceptors of the layers' products."""
        layers = list(layers)
        able = fp32_layers.float8_calls(layers)
        able_ids = {id(layer) for layer, _ in able}
        for layer in layers:
            if isinstance(layer, PRODUCTS) and id(layer) not in able_ids:
                self.choices[layer.path] = _why_not_able(layer)
        interceptors = []
        for layer, multiply in able:
            replacement = functools.partial(self._call, layer, multiply)
            interceptors.append(Interceptor(layer, "call", replacement, Role.PRECISION))
        return interceptors

    def _call(
        self,
        layer: keras.layers.Layer,
        multiply: Call,
        call: Call,
        inputs: Any,
        training: bool | None = None,
    ) -> tf.Tensor:
        obstacle = self._find_obstacle(layer, inputs)
        self.choices[layer.path] = obstacle or IN_FLOAT8
        if obstacle is not None:
            return call(inputs, training=training)
        return multiply(call, inputs, training=training)

    def _find_obstacle(self, layer: keras.layers.Layer, inputs: Any) -> str | None:
        if id(layer) in self._last:
            return "it is the last layer, whose errors reach the loss unaveraged"
        kernel = private.kernel(layer)
        sizes = kernel.shape
        if isinstance(layer, keras.layers.EinsumDense):
            sizes = matmul_sizes(layer.equation, inputs, kernel)
            if sizes is None:
                return f"{layer.equation!r} is no product of matrices"
            if layer.lora_enabled and not fp32_layers.low_rank_equations(
                layer.equation, inputs, kernel
            ):
                return f"LoRA divides the kernel of {layer.equation!r} along an axis of the input"
        inner, outer = sizes
        if inner % _MULTIPLE or outer % _MULTIPLE:
            return f"its sizes, {inner} x {outer}, are no multiples of {_MULTIPLE}"
        if self._mode == "auto" and inner * outer < _LEAST_GAIN * (inner + outer):
            return f"of {inner} x {outer} rounding takes longer than it saves (float8=True)"
        return None


def choose_mode(mode: Float8, layers: Iterable[keras.layers.Layer], uses_xla: bool) -> Float8:
    """Returns False for "auto" where the device has no float8 products; else the mode.

    Raises ValueError for True where no layer can, and warns where the device cannot.
    """
    has_products = uses_xla and has_gpu() and compute_capability() >= _FIRST
    if mode == "auto":
        return mode if has_products else False
    if mode is True:
        layers = list(layers)
        if not fp32_layers.float8_calls(layers):
            found = [_why_not_able(layer) for layer in layers if isinstance(layer, PRODUCTS)]
            reason = found[0] if found else "it has no Dense or EinsumDense layer"
            raise ValueError(
                f"float8=True: no layer of the model can multiply in float8, since {reason}. Make "
                "the model under keras.config.set_dtype_policy('mixed_bfloat16'), or pass "
                "float8='auto'."
            )
        if not has_products:
            warn(
                "float8=True: this device has no float8 products, or XLA does not compile the "
                "step. The numbers are those of float8, and the step is slower than without. Pass "
                "float8='auto' for float8 where it is faster."
            )
    return mode


def _why_not_able(layer: keras.layers.Layer) -> str:
    if layer.quantization_mode is not None:
        return f"Keras has quantized it ({layer.quantization_mode})"
    if type(layer) not in PRODUCTS:
        return f"{type(layer).__name__} is a class of its own"
    return f"it computes in {layer.compute_dtype} from {layer.variable_dtype} weights"


class LastProducts:
    """Search for the layers of products that give a model's outputs, by a trace of its call.

    Inside `intercepting(interceptors)` it is noted what each layer gives.
    """

    def __init__(self, layers: Iterable[keras.layers.Layer]):
        self._given: dict[int, tuple[tf.Tensor, keras.layers.Layer]] = {}  # by the tensor's id
        self.interceptors: list[Interceptor] = []
        for layer in layers:
            if isinstance(layer, PRODUCTS):
                watch = functools.partial(self._watch, layer)
                self.interceptors.append(Interceptor(layer, "call", watch, Role.OBSERVE))

    def _watch(self, layer: keras.layers.Layer, call: Call, *args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        self._given[id(output)] = output, layer
        return output

    def find(self, outputs: Nest) -> list[keras.layers.Layer]:
        """Returns the layers from which the outputs follow by operations on one tensor alone."""
        found = []
        for output in tf.nest.flatten(outputs):
            layer = self._giver(output)
            if layer is not None:
                found.append(layer)
        return found

    def _giver(self, t: Any) -> keras.layers.Layer | None:
        while isinstance(t, tf.Tensor):
            if id(t) in self._given:
                return self._given[id(t)][1]
            operands = [operand for operand in t.op.inputs if _is_activation(operand)]
            if len(operands) != 1:
                return None
            (t,) = operands
        return None


def _is_activation(t: tf.Tensor) -> bool:
    """Tells if a tensor is floating-point and neither a constant nor a weight."""
    while t.op.type in ("Cast", "Identity"):
        t = t.op.inputs[0]
    return t.dtype.is_floating and t.op.type not in ("Const", "ReadVariableOp")
