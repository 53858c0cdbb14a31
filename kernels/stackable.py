"""Checks that a LayerStack can hold layers: of one kind, sharing nothing, with nothing that it
would silently drop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras

from fastaccum.kernels import private
from fastaccum.kernels.checks import naming, shown

# Of these the penalty of a stack is the sum of the layers' penalties.
SUMMED_REGULARIZERS = (
    keras.regularizers.L1,
    keras.regularizers.L2,
    keras.regularizers.L1L2,
    type(None),
)


def seed_generators(layer: keras.layers.Layer) -> list[keras.random.SeedGenerator]:
    return [
        generator
        for part in private.flatten_layers(layer)
        for generator in private.seed_generators(part)
    ]


def variables(layer: keras.layers.Layer) -> list[keras.Variable]:
    """Returns the weights, then the states of the seed generators."""
    return [*layer.weights, *(generator.state for generator in seed_generators(layer))]


def make(make_layer: Callable[[], keras.layers.Layer]) -> keras.layers.Layer:
    with naming("make_layer"):
        layer = make_layer() if callable(make_layer) else None
    if not isinstance(layer, keras.layers.Layer):
        raise TypeError(
            f"make_layer={shown(make_layer)} must be a Keras layer or a function that returns a "
            "new one."
        )
    if getattr(layer.dtype_policy, "quantization_mode", None):
        raise ValueError(
            f"make_layer returned {describe(layer)}, which is quantized: a LayerStack has none "
            "of its kernels."
        )
    return layer


def describe(layer: keras.layers.Layer) -> str:
    return f"layer {layer.name!r} ({type(layer).__name__})"


def require_same_variables(layers: Sequence[keras.layers.Layer]) -> None:
    """Raises ValueError for layers whose variables are not alike, or are the same ones."""
    expected, *_ = shapes = [
        [(tuple(v.shape), private.variable_dtype(v)) for v in variables(layer)] for layer in layers
    ]
    owner: dict[int, int] = {}
    for i, layer in enumerate(layers):
        # One may have been switched to a subclass that differs in its gradients alone.
        alike = isinstance(layer, type(layers[0])) or isinstance(layers[0], type(layer))
        if not alike or shapes[i] != expected:
            raise ValueError(
                f"Layer {i}, {describe(layer)}, has variables {shapes[i]}, but the first, "
                f"{describe(layers[0])}, has {expected}. The layers of a LayerStack must be of "
                "one kind, built for one shape."
            )
        for variable in variables(layer):
            if owner.setdefault(id(variable), i) != i:
                raise ValueError(
                    f"Layers {owner[id(variable)]} and {i} share {variable.path!r}: make_layer "
                    "must return a new layer with variables and seed generators of its own each "
                    "time."
                )


def require_same_settings(layers: Sequence[keras.layers.Layer]) -> None:
    """Raises ValueError for layers that one body cannot stand for."""
    first, *others = map(_settings, layers)
    for i, each in enumerate(others, start=1):
        if each != first:
            raise ValueError(
                f"Layer {i} is {each}, but the first {first}: only names, weights and seeds may "
                "differ."
            )


def _settings(layer: keras.layers.Layer) -> object:
    """Returns a layer's configuration without what may differ between the layers of a stack: names
    and seeds.
    """
    names: list[object] = []

    def comparable(config):
        if isinstance(config, dict):
            names.append(config.get("name"))
            ignored = ("name", "seed", "build_config", "shared_object_id")
            return {key: comparable(value) for key, value in config.items() if key not in ignored}
        if isinstance(config, (list, tuple)):
            return [comparable(value) for value in config]
        # The layers of a functional model refer to each other by name.
        return names.index(config) if isinstance(config, str) and config in names else config

    try:
        return comparable(layer.get_config())
    except NotImplementedError:  # a layer that cannot be saved
        return None


def require_supported(layer: keras.layers.Layer) -> None:
    """Raises ValueError for what a LayerStack would silently drop."""
    for part in private.flatten_layers(layer):
        if private.metrics(part):
            raise ValueError(
                f"{describe(layer)} holds metrics, which a LayerStack would not update: move "
                "them out."
            )
        if isinstance(part, keras.layers.Embedding):
            raise ValueError(
                f"{describe(layer)} holds {describe(part)}, whose ids a LayerStack cannot check: "
                "embed outside."
            )
    for variable in layer.weights:
        if variable.constraint is not None or not isinstance(
            variable.regularizer, SUMMED_REGULARIZERS
        ):
            raise ValueError(
                f"{variable.path!r} has constraint={variable.constraint!r} and "
                f"regularizer={variable.regularizer!r}: stacked weights can have no constraint, "
                "and of regularizers only the sums L1, L2 and L1L2."
            )
