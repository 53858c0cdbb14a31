"""`remat`: a model whose blocks are computed again in the backward pass, instead of being kept."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import keras
import tensorflow as tf

from fastaccum.basics.attributes import Nest, require_model
from fastaccum.kernels import private
from fastaccum.kernels.recompute import recomputed
from fastaccum.kernels.recomputed_function import Policy, require_policy
from fastaccum.layers import blocks, interceptors, walks

AnyModel = TypeVar("AnyModel", bound=keras.Model)
_changes = 0  # of any model, in this process


def remat(
    model: AnyModel,
    policy: str | Sequence[str] | None = "nothing_saveable",
    layer_names: Sequence[str] | None = None,
) -> AnyModel:
    """Recomputes a model's blocks in the backward pass instead of keeping them: saves GPU memory.

    Of each block only the inputs are kept (Chen et al., 2016, arXiv:1604.06174). The gradients are
    the same, to rounding, for about a third more arithmetic. Dropout drops the same elements, and
    moving statistics move once. This applies to train steps that XLA compiles, of a `Trainer` or of
    Keras itself with `jit_compile=True`.

    A block is one of several layers of the same class side by side, such as a model's Transformer
    layers. If there are none, a functional or Sequential model is cut into segments where few
    values cross. Embeddings, a `LayerStack` and a linear output layer stay outside. Weights, names,
    `layers`, configuration and saved form of the model do not change, so a loaded or cloned model
    has to be passed here again.

    Args:
        model: a Keras 3 or tf_keras model that has its weights.
        policy: what is kept of a block besides its inputs, as in `fastaccum.kernels.LayerStack`:
            "nothing_saveable"; ["attention"] for fused attention's output and log-sum-exp, or other
            names; or "auto" for every value that has a name, products with weights among them. None
            or "everything_saveable" undoes `remat`.
        layer_names: the names of the layers to use as blocks, instead of those that are found.

    Returns:
        The model itself.

    Raises:
        TypeError: raised if it is no model, or names are no strings.
        ValueError: raised if a policy is unknown, if a named layer cannot be computed again, if the
            model has no weights yet, or if there is no block in it; when the step is traced, if no
            value of a block has a name.

    >>> layers = [keras.layers.Dense(64, "tanh") for _ in range(8)]
    >>> model = remat(keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(1)]))
    >>> everything = [*layers, model.layers[-1]]
    >>> [layer.name for layer in model.layers] == [layer.name for layer in everything]
    True
    """
    require_model(model)
    replacing: list[interceptors.Interceptor] = []
    if policy is not None and require_policy(policy) != "everything_saveable":
        replacing = [_interceptor(block, policy) for block in _blocks(model, layer_names)]
    _replace(model, replacing)
    global _changes
    _changes += 1
    return model


@contextlib.contextmanager
def recomputing(model: keras.Model, policy: Policy | None) -> Iterator[None]:
    """Applies `remat(model, policy)` inside the `with` block, and restores the model on exit.

    The policy None changes nothing.
    """
    if policy is None:
        yield
        return
    before = installed(model)
    try:
        yield remat(model, policy)
    finally:
        remat(model, None)
        _replace(model, before)


def changes() -> int:
    """Returns how often `remat` has changed a model in this process."""
    return _changes


def installed(model: keras.Model) -> list[interceptors.Interceptor]:
    """Returns what `remat` has put into a model.

    They are the same objects until `remat` changes the model again.
    """
    layers = list(private.flatten_layers(model))
    distinct = {id(layer): layer for layer in layers}
    for layer in layers:
        graph = blocks.graph_of(layer)
        if graph is not None:  # also in Sequential models
            distinct[id(graph)] = graph

    of_remat = []
    for layer in distinct.values():
        of_remat.extend(interceptors.installed(layer, interceptors.Role.RECOMPUTE))
    return of_remat


def _replace(model: keras.Model, replacing: list[interceptors.Interceptor]) -> None:
    for interceptor in installed(model):
        interceptors.remove(interceptor)
    for interceptor in replacing:
        interceptors.install(interceptor)


def _blocks(model: keras.Model, layer_names: Sequence[str] | None) -> list[blocks.Block]:
    if layer_names is not None:
        return [blocks.Block(layer) for layer in _named(model, layer_names)]
    if not model.weights:
        raise ValueError(
            f"Model {model.name!r} has no weights yet: call it on a batch, or build it, before "
            "fa.remat."
        )
    blocks_of_model = blocks.find(model)
    if not blocks_of_model:
        reasons = []
        for part in private.flatten_layers(model):
            if not part.weights:
                continue
            reason = blocks.refusal(part)
            if reason is not None:
                reasons.append(f"{part.name!r} {reason}")
        why = "; ".join(reasons[:3]) or "it is too small"
        raise ValueError(
            f"Model {model.name!r} has no blocks: no layers of one class side by side whose call "
            "could be computed again, and no functional graph worth a cut "
            f"({why}). Name layers: fa.remat(model, layer_names=[...])."
        )
    return blocks_of_model


def _named(model: keras.Model, layer_names: Sequence[str]) -> list[keras.layers.Layer]:
    if (
        isinstance(layer_names, str)
        or not layer_names
        or not all(isinstance(name, str) for name in layer_names)
    ):
        raise TypeError(
            f"layer_names={layer_names!r} must be a list of names of layers, or left out."
        )
    layers = list(private.flatten_layers(model))
    by_name = {layer.name: layer for layer in reversed(layers)}  # of several, the first
    for name in layer_names:
        if name not in by_name:
            raise ValueError(
                f"layer_names: the model has no layer {name!r}. It has {list(by_name)[::-1]}."
            )
        reason = blocks.refusal(by_name[name])
        if reason is not None:
            raise ValueError(
                f"layer_names: {name!r} ({type(by_name[name]).__name__}) cannot be computed "
                f"again: it {reason}. Leave it out, or name the layers within it."
            )
    return [by_name[name] for name in layer_names]


def _interceptor(block: blocks.Block, policy: Policy) -> interceptors.Interceptor:
    if block.segments is None:
        method = "call"
        replacement = _recompute_layer(block.layer, policy)
    else:
        method = private.run_through_graph.name
        replacement = _recompute_segments(block.layer, block.segments, policy)
    return interceptors.Interceptor(
        block.layer, method, replacement, interceptors.Role.RECOMPUTE, policy=policy
    )


def _recompute_layer(layer: keras.layers.Layer, policy: Policy) -> Callable[..., Nest]:
    """Makes the replacement of a layer's `call`."""

    def recompute(call: Callable, *args: object, **kwargs: object) -> Nest:
        return recomputed(
            lambda args, kwargs: call(*args, **kwargs),
            args,
            kwargs,
            policy=policy,
            layers=private.flatten_layers(layer),
        )

    return recompute


def _recompute_segments(
    graph: keras.Function, segments: list[blocks.Segment], policy: Policy
) -> Callable[..., Nest]:
    """Makes the replacement of the method by which Keras runs a functional model's graph."""

    def walk(
        call: Callable,
        inputs: Nest,
        operation_fn: Callable = lambda operation: operation,
        **options: object,
    ) -> Nest:
        """Runs the graph, segment by segment."""
        if not walks.may_walk(inputs, options):
            return call(inputs, operation_fn, **options)

        def run(segment: blocks.Segment, segment_inputs: list[tf.Tensor]) -> list[tf.Tensor]:
            run_nodes = functools.partial(walks.run_nodes, segment, operation_fn)
            if segment.recomputed:
                return recomputed(run_nodes, segment_inputs, policy=policy, layers=segment.layers)
            return run_nodes(segment_inputs)

        return walks.run_segments(graph, segments, inputs, run)

    return walk
