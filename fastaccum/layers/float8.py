"""`float8`: layers that multiply in float8, and why others do not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal

import keras
import tensorflow as tf

from fastaccum.basics.attributes import Nest
from fastaccum.basics.warnings import warn
from fastaccum.kernels import private
from fastaccum.kernels.devices import compute_capability, has_gpu
from fastaccum.kernels.fp32_layers import autocasts, float8_call, low_rank_equations
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
# Rounding takes `(inner + outer) * 1.9e-12` s in the program of a GPT 124M, which gains 3% by it.
_LEAST_GAIN = 500
IN_FLOAT8 = "float8"
# Products that are no Dense layer's, and in half precision.
_OTHER_PRODUCTS = (
    "BatchMatMulV2",
    "BatchMatMulV3",
    "Conv1D",
    "Conv2D",
    "Conv3D",
    "Einsum",
    "MatMul",
)


class Float8Layers:
    """The layers of a train step that multiply in float8.

    Args:
        mode: True or "auto".
        exempt: why layers of products stay in half precision, by their ids, as
            `ProductSearch.find_exempt` returns it.

    Attributes:
        choices: "float8" or the reason for half precision, for each layer of products, by path.
    """

    def __init__(self, mode: Float8, exempt: Mapping[int, str]):
        self._mode = mode
        self._exempt = exempt
        self.choices: dict[str, str] = {}

    def make_forms(self, layers: Iterable[keras.layers.Layer]) -> list[Interceptor]:
        """Returns interceptors of the layers' products."""
        interceptors = []
        for layer in layers:
            multiply = float8_call(layer)
            if multiply is not None:
                replacement = functools.partial(self._call, layer, multiply)
                interceptors.append(Interceptor(layer, "call", replacement, Role.PRECISION))
            elif isinstance(layer, PRODUCTS):
                # A layer that is not built has no path.
                self.choices[layer.path or layer.name] = _why_not_able(layer)
        return interceptors

    def require_some(self) -> None:
        """Raises ValueError if no layer that was traced multiplies in float8, with True."""
        if self._mode is True and IN_FLOAT8 not in self.choices.values():
            reasons = [f"{path!r}: {reason}" for path, reason in self.choices.items()]
            raise ValueError(
                "float8=True: no layer of the model multiplies in float8. Pass float8=False, or "
                f"change what keeps the layers from it: {'; '.join(reasons[:3])}."
            )

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
        return multiply(inputs)

    def _find_obstacle(self, layer: keras.layers.Layer, inputs: Any) -> str | None:
        if id(layer) in self._exempt:
            return self._exempt[id(layer)]
        kernel = private.kernel(layer)
        if not autocasts(layer, inputs, kernel):
            return f"its input is no dense tensor of {layer.compute_dtype}"
        sizes = kernel.shape
        if isinstance(layer, keras.layers.EinsumDense):
            sizes = matmul_sizes(layer.equation, inputs, kernel)
            if sizes is None:
                return f"{layer.equation!r} is no product of matrices"
            if layer.lora_enabled and not low_rank_equations(layer.equation, inputs, kernel):
                return f"LoRA divides the kernel of {layer.equation!r} along an axis of the input"
        inner, outer = sizes
        if inner % _MULTIPLE or outer % _MULTIPLE:
            return f"its sizes, {inner} x {outer}, are not multiples of {_MULTIPLE}"
        if self._mode == "auto" and inner * outer < _LEAST_GAIN * (inner + outer):
            return f"of {inner} x {outer} rounding takes longer than it saves (float8=True)"
        return None


def kernels(layers: Iterable[keras.layers.Layer]) -> list[keras.Variable]:
    """Returns the kernels of the layers that can multiply in float8."""
    found = {}
    for layer in layers:
        if float8_call(layer) is not None:
            kernel = private.kernel(layer)
            found[id(kernel)] = kernel
    return list(found.values())


def choose_mode(mode: Float8, layers: Iterable[keras.layers.Layer], uses_xla: bool) -> Float8:
    """Returns False for "auto" where the device has no float8 products; else the mode.

    Raises ValueError for True where no layer can, and warns where the device cannot.
    """
    device_has_float8 = has_gpu() and compute_capability() >= _FIRST
    if mode == "auto":
        return mode if device_has_float8 and uses_xla else False
    if mode is True:
        _require_able(list(layers))
        if not (device_has_float8 and uses_xla):
            reason = "this device has no float8 products"
            if device_has_float8:
                reason = "XLA does not compile the step"
            warn(
                f"float8=True: {reason}. The numbers are those of float8, and the step is slower "
                "than without. Pass float8='auto' for float8 where it is faster."
            )
    return mode


def _require_able(layers: Collection[keras.layers.Layer]) -> None:
    if any(float8_call(layer) is not None for layer in layers):
        return
    products = [layer for layer in layers if isinstance(layer, PRODUCTS) and layer.built]
    if not products:
        raise ValueError(
            "float8=True: the model calls no Dense or EinsumDense layer of Keras 3, so nothing is "
            "multiplied in float8. Pass float8=False."
        )
    remedy = "Pass float8=False."
    if products[0].quantization_mode is not None:
        remedy = "Make the model without quantize(), or pass float8=False."
    elif any(layer.compute_dtype == "float32" for layer in products):
        remedy = (
            "Make the model under keras.config.set_dtype_policy('mixed_bfloat16'), or pass "
            "float8=False."
        )
    raise ValueError(
        "float8=True: no layer of the model can multiply in float8. Of "
        f"{products[0].path!r}: {_why_not_able(products[0])}. {remedy}"
    )


def _why_not_able(layer: keras.layers.Layer) -> str:
    if not layer.built:
        return "it is not called"
    if layer.quantization_mode is not None:
        return f"Keras has quantized it ({layer.quantization_mode})"
    if layer.compute_dtype == "float32" or layer.variable_dtype != "float32":
        return f"it computes in {layer.compute_dtype} from {layer.variable_dtype} weights"
    return f"{type(layer).__name__} is a class of its own"


class ProductSearch:
    """Search for the layers of products that a model's outputs come from, by a trace of its call.

    Inside `intercepting(interceptors)` it is noted what each layer returns.
    """

    def __init__(self, layers: Iterable[keras.layers.Layer]):
        self._layer_by_output: dict[int, tuple[tf.Tensor, keras.layers.Layer]] = {}
        self.interceptors: list[Interceptor] = []
        for layer in layers:
            if isinstance(layer, PRODUCTS):
                watch = functools.partial(self._watch, layer)
                self.interceptors.append(Interceptor(layer, "call", watch, Role.OBSERVE))

    def _watch(self, layer: keras.layers.Layer, call: Call, *args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        if tf.is_symbolic_tensor(output):
            self._layer_by_output[id(output)] = output, layer
        return output

    def find_exempt(self, outputs: Nest) -> dict[int, str]:
        """Returns why layers are to stay in half precision, by their ids.

        They are the last one before each output, and those on which no output depends. A
        `vectorized_map` replaces what it has traced by other operations, which have TensorFlow's
        gradients and not those of a product in float8: its layers are of the latter.
        """
        exempt = {}
        outputs = [t for t in tf.nest.flatten(outputs) if tf.is_symbolic_tensor(t)]
        graphs = {id(t.graph) for t in outputs}
        needed = _ancestors(outputs)
        for t, layer in self._layer_by_output.values():
            # In the graph of a loop's body, it is the loop that outputs depend on.
            if id(t.graph) in graphs and id(t) not in needed:
                exempt[id(layer)] = (
                    "no output of the model depends on it, or a vectorized_map runs it"
                )
        for output in outputs:
            for layer in self._find_last(output):
                exempt[id(layer)] = "it is the last layer, whose errors reach the loss unaveraged"
        return exempt

    def _find_last(self, output: tf.Tensor) -> list[keras.layers.Layer]:
        """Returns the layers that no other one stands between and an output.

        Of a residual sum, they are not those on which another of them depends.
        """
        met = _ancestors([output], self._ends_search)
        nearest = [self._layer_by_output[i] for i in met if i in self._layer_by_output]
        last = []
        for t, layer in nearest:
            others = [other for other, _ in nearest if other is not t]
            if id(t) not in _ancestors(others):
                last.append(layer)
        return last

    def _ends_search(self, t: tf.Tensor) -> bool:
        return id(t) in self._layer_by_output or t.op.type in _OTHER_PRODUCTS


def _ancestors(
    tensors: Iterable[tf.Tensor], ends: Callable[[tf.Tensor], bool] = lambda t: False
) -> set[int]:
    """Returns the ids of tensors and of those that they come from, up to some that end it."""
    ids = set()
    ahead = list(tensors)
    while ahead:
        t = ahead.pop()
        if id(t) in ids:
            continue
        ids.add(id(t))
        if not ends(t):
            ahead += t.op.inputs
    return ids
