"""Checks that a LayerStack can hold layers.

They must be of one kind, share nothing, and have nothing that a stack would silently drop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras

from fastaccum.kernels import private
from fastaccum.kernels.checks import naming, shown

# The penalty of a stack of weights is the sum of the layers' penalties with these alone.
SUMMED_REGULARIZERS = (
    keras.regularizers.L1,
    keras.regularizers.L2,
    keras.regularizers.L1L2,
    type(None),
)

# Keys of a layer's configuration whose values the layers of a stack need not share.
_MAY_DIFFER = ("name", "seed", "build_config", "shared_object_id")


def seed_generators(layer: keras.layers.Layer) -> list[keras.random.SeedGenerator]:
    """Returns the seed generators of a layer and of the layers in it."""
    generators = []
    for part in private.flatten_layers(layer):
        generators.extend(private.seed_generators(part))
    return generators


def variables(layer: keras.layers.Layer) -> list[keras.Variable]:
    """Returns the weights, then the states of the seed generators."""
    states = [generator.state for generator in seed_generators(layer)]
    return [*layer.weights, *states]


def make(make_layer: Callable[[], keras.layers.Layer]) -> keras.layers.Layer:
    """Makes a layer, and checks that it is a Keras layer that is not quantized."""
    layer = None
    if callable(make_layer):
        with naming("make_layer"):
            layer = make_layer()
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
    """Returns a layer's name and class for an error."""
    return f"layer {layer.name!r} ({type(layer).__name__})"


def require_same_variables(layers: Sequence[keras.layers.Layer]) -> None:
    """Raises ValueError for layers whose variables are not alike, or are the same ones."""
    first = layers[0]
    expected = _specs(first)
    owner: dict[int, int] = {}  # the number of the layer that has a variable, by its id
    for i, layer in enumerate(layers):
        # One may have been switched to a subclass with float32 gradients (`fp32_layers`).
        is_same_kind = isinstance(layer, type(first)) or isinstance(first, type(layer))
        specs = _specs(layer)
        if not is_same_kind or specs != expected:
            raise ValueError(
                f"Layer {i}, {describe(layer)}, has variables {specs}, but the first, "
                f"{describe(first)}, has {expected}. The layers of a LayerStack must be of one "
                "kind, built for one shape."
            )
        for variable in variables(layer):
            if owner.setdefault(id(variable), i) != i:
                raise ValueError(
                    f"Layers {owner[id(variable)]} and {i} share {variable.path!r}: make_layer "
                    "must return a new layer with variables and seed generators of its own each "
                    "time."
                )


def _specs(layer: keras.layers.Layer) -> list[tuple[tuple[int, ...], str]]:
    """Returns the shape and dtype of each variable of a layer."""
    return [(tuple(v.shape), private.variable_dtype(v)) for v in variables(layer)]


def require_same_settings(layers: Sequence[keras.layers.Layer]) -> None:
    """Raises ValueError for layers that cannot be computed by the same body of a loop."""
    expected = _settings(layers[0])
    for i, layer in enumerate(layers[1:], start=1):
        settings = _settings(layer)
        if settings != expected:
            raise ValueError(
                f"Layer {i} is {settings}, but the first {expected}: only names, weights and "
                "seeds may differ."
            )


def _settings(layer: keras.layers.Layer) -> object:
    """Returns a layer's configuration without names and seeds, which may differ in a stack.

    A layer of a functional model refers to another by its name. Equal models have other names, so
    a reference becomes the number of the dict that has the name, in the order of the walk.
    Layers without a configuration count as equal.
    """
    names: list[object] = []  # of each dict so far, None for one without

    def comparable(config):
        if isinstance(config, dict):
            names.append(config.get("name"))
            return {
                key: comparable(value) for key, value in config.items() if key not in _MAY_DIFFER
            }
        if isinstance(config, (list, tuple)):
            return [comparable(value) for value in config]
        if isinstance(config, str) and config in names:
            return names.index(config)
        return config

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
        is_summed = isinstance(variable.regularizer, SUMMED_REGULARIZERS)
        if variable.constraint is not None or not is_summed:
            raise ValueError(
                f"{variable.path!r} has constraint={variable.constraint!r} and "
                f"regularizer={variable.regularizer!r}: stacked weights can have no constraint, "
                "and of regularizers only the sums L1, L2 and L1L2."
            )
