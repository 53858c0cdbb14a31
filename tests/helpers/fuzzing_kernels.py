"""What fuzzed calls of the kernels are made of: arrays, ways to run a function with its gradients,
and oracles.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

import fastaccum as fa

TOLERANCES = {"float64": 1e-10, "float32": 2e-4, "float16": 2e-2, "bfloat16": 1e-1}


def array(*shape: int, dtype: Any = "float32", seed: int = 0, high: int = 5) -> np.ndarray:
    """Random numbers: normal ones, or whole ones below `high`, as dtype has them."""
    rng = np.random.default_rng((seed, *shape))
    numbers = rng.normal(size=shape)
    if dtype == "bfloat16":
        return np.asarray(numbers, tf.bfloat16.as_numpy_dtype)
    if np.issubdtype(np.dtype(dtype), np.integer):
        numbers = rng.integers(0, high, shape)
    return np.asarray(numbers).astype(dtype)


def some(rng: np.random.Generator, *choices: Any) -> Any:
    """One of these."""
    return choices[int(rng.integers(len(choices)))]


def spoiled(values: Any, *put: Any) -> np.ndarray:
    """A copy with these values in the first places."""
    values = np.array(values)
    values.reshape(-1)[: len(put)] = put[: values.size]
    return values


def masked(values: Any) -> np.ma.MaskedArray:
    """With its first element masked."""
    return np.ma.masked_array(values, np.arange(np.size(values)).reshape(np.shape(values)) == 0)


def from_a_graph(values: Any) -> tf.Tensor:
    """A tensor of a graph that has been left."""
    left: list[tf.Tensor] = []
    tf.function(lambda t: left.append(t + 0), autograph=False).get_concrete_function(
        tf.constant(values)
    )
    return left[0]


def _cotangent(y: tf.Tensor) -> tf.Tensor:
    return tf.cast(
        tf.reshape(tf.cos(tf.cast(tf.range(tf.size(y)), tf.float32)), tf.shape(y)), y.dtype
    )


def _with_gradients(function: Callable, compiled: Callable) -> Callable:
    """`function(**arguments)`, and its gradient by each floating tensor among them, through
    `compiled`.
    """

    def call(**arguments: Any) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        given = {
            n: t
            for n, t in arguments.items()
            if isinstance(t, tf.Tensor) and not tf.is_symbolic_tensor(t)
        }
        given = {n: t for n, t in given.items() if t.dtype not in (tf.string, tf.variant)}

        def run(tensors):
            floating = {n: t for n, t in tensors.items() if t.dtype.is_floating}
            with tf.GradientTape() as tape:
                tape.watch(list(floating.values()))
                y = function(**{**arguments, **tensors})
            return y, tape.gradient(y, floating, _cotangent(y)) if floating else {}

        return compiled(run)(given)

    return call


def eager(function: Callable) -> Callable:
    return _with_gradients(function, lambda run: run)


def graph(function: Callable) -> Callable:
    return _with_gradients(function, lambda run: tf.function(run, autograph=False))


def xla(function: Callable) -> Callable:
    return _with_gradients(
        function, lambda run: tf.function(run, autograph=False, jit_compile=True)
    )


def unknown(function: Callable) -> Callable:
    """In a graph that knows the ranks of its tensors and their last two sizes."""

    def compiled(run):
        def call(tensors):
            spec = {
                n: tf.TensorSpec([*[None] * (t.shape.rank - 2), *t.shape[-2:]], t.dtype)
                for n, t in tensors.items()
            }
            return tf.function(run, [spec], autograph=False)(tensors)

        return call

    return _with_gradients(function, compiled)


def unranked(function: Callable) -> Callable:
    """In a graph that knows no shape."""

    def compiled(run):
        def call(tensors):
            spec = {n: tf.TensorSpec(None, t.dtype) for n, t in tensors.items()}
            return tf.function(run, [spec], autograph=False)(tensors)

        return call

    return _with_gradients(function, compiled)


def double(value: Any, like: Any = None) -> tf.Tensor:
    """A value in float64, and where there is a `like`, what rounding to its dtype adds."""
    value = tf.convert_to_tensor(value) if isinstance(value, tf.IndexedSlices) else value
    value = value.numpy() if hasattr(value, "numpy") else value
    exact = tf.Variable(np.asarray(value).astype("float64"))
    if like is None:
        return exact
    return exact, tf.cast(tf.cast(exact, tf.convert_to_tensor(like).dtype), tf.float64) - exact


def agrees(
    result: Any,
    arguments: Mapping[str, Any],
    oracle: Callable[..., tf.Tensor],
    leaves: Mapping[str, Any],
) -> None:
    """Compares `(y, gradients)` with an expression of float64 and its autodiff, where that is
    finite.
    """
    y, gradients = result
    watched = {name: leaf for name, leaf in leaves.items() if name in gradients}
    with tf.GradientTape() as tape:
        expected = oracle()
    derived = tape.gradient(
        expected, watched, tf.cast(_cotangent(tf.cast(expected, y.dtype)), tf.float64)
    )
    tolerance = max(
        TOLERANCES.get(tf.convert_to_tensor(a).dtype.name, 0)
        for n, a in arguments.items()
        if n in leaves and a is not None
    )
    _close("the result", y, expected, tolerance)
    for name, gradient in gradients.items():
        wanted = tf.zeros_like(watched[name]) if derived[name] is None else derived[name]
        if gradient is None:
            assert not np.any(wanted), f"{name} has no gradient"
        else:
            _close(
                f"the gradient of {name}",
                tf.convert_to_tensor(gradient),
                tf.convert_to_tensor(wanted),
                tolerance,
            )


def _close(what: str, got: Any, wanted: Any, tolerance: float) -> None:
    got, wanted = (np.asarray(t, "float64") for t in (got, wanted))
    assert got.shape == wanted.shape, f"{what} has shape {got.shape}, not {wanted.shape}"
    known = np.isfinite(wanted)
    scale = max(1.0, float(np.abs(wanted[known]).max(initial=0.0)))
    off = np.abs(np.where(known, got - np.where(known, wanted, 0), 0))
    off = float(np.nan_to_num(off, nan=np.inf).max(initial=0.0))
    assert off <= tolerance * scale, (
        f"{what} is off by {off:.3g}: {got.ravel()[:6]} for {wanted.ravel()[:6]}"
    )


def distance(*variables: Any, of: Callable = lambda loss, weight: (loss, weight)) -> Callable:
    """A `loss_fn` of any nest of numbers, which returns `of(loss_sum, weight_sum)`."""

    @tf.autograph.experimental.do_not_convert
    def loss_fn(micro_batch):
        leaves = [t for t in tf.nest.flatten(micro_batch) if t is not None]
        leaves = [
            tf.cast(tf.strings.length(t) if t.dtype == tf.string else t, tf.float32) for t in leaves
        ]
        s = tf.add_n([tf.reduce_sum(tf.sin(t)) for t in leaves])
        loss = tf.add_n([tf.reduce_sum((tf.cast(v, tf.float32) - s) ** 2) for v in variables])
        return of(loss, 1.0 + s * s)

    return loss_fn


def counting(counter: tf.Variable, loss_fn: Callable) -> Callable:
    """`loss_fn`, which also counts how often it was called."""

    @tf.autograph.experimental.do_not_convert
    def counted(micro_batch):
        counter.assign_add(1)
        return loss_fn(micro_batch)

    return counted


def train(stack: Any, **arguments: Any) -> tuple[Any, Any]:
    """A TrainStep, and what its first step reports."""
    step = fa.TrainStep(**arguments)
    return step, step(stack)
