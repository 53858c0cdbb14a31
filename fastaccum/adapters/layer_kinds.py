"""Tells what a call of a layer may do, by its class and settings."""

from __future__ import annotations

import keras
import tensorflow as tf

from fastaccum.basics.attributes import kinds, of_keras, package
from fastaccum.kernels.layer_stack import LayerStack

# Keras's layers that mix rows. Not every version of Keras 3 has them all.
_MIXING_NAMES = ("MixUp", "CutMix", "Equalization", "AugMix", "RandAugment")
_MIXING = [getattr(keras.layers, name) for name in _MIXING_NAMES if hasattr(keras.layers, name)]

# Of Keras's own layers and ours: those whose call may add losses, assign other layers' variables or
# mix rows.
_TRACED = (keras.layers.SpectralNormalization, keras.layers.Lambda, LayerStack, *_MIXING)


def never_draws(layer: keras.layers.Layer) -> bool:
    """Tells if a layer of Keras's could draw random numbers, but does not, since its rate is 0."""
    names = ("rate", "stddev", "dropout", "recurrent_dropout")  # the last two of recurrent cells
    rates = [getattr(layer, name) for name in names if hasattr(layer, name)]
    return of_keras(type(layer)) and bool(rates) and not any(rates)


def convolves(layer: keras.layers.Layer) -> bool:
    """Tells if a layer is of a class with "Conv" in its name, or of a class derived from one."""
    return any("Conv" in kind for kind in kinds(layer))


def may_count_rows(layer: keras.layers.Layer) -> bool:
    """Tells if a call may compute with the number of rows: Keras's and KerasHub's layers do not."""
    is_of_user = package(type(layer)) not in ("keras", "tf_keras", "keras_hub", "fastaccum")
    return is_of_user or isinstance(layer, keras.layers.Lambda) or _has_own_activation(layer)


def _has_own_activation(layer: keras.layers.Layer) -> bool:
    """Tells if an activation of a layer is of the user's own, and may compute anything."""
    for name in ("activation", "recurrent_activation"):
        function = getattr(layer, name, None)
        if function is not None and package(function) not in ("keras", "tf_keras", "tensorflow"):
            return True
    return False


def may_do_more(layer: keras.layers.Layer) -> bool:
    """Tells if a layer's call may add losses, assign other layers' variables or mix rows.

    Few of Keras's layers do.
    """
    is_known = package(type(layer)) in ("keras", "fastaccum") and not isinstance(layer, _TRACED)
    axes = tf.nest.flatten(getattr(layer, "axis", -1))
    works_across_rows = 0 in axes
    operations = getattr(layer, "operations", ())  # of a functional model: also ops between layers
    has_ops = any(not isinstance(operation, keras.layers.Layer) for operation in operations)
    has_own_functions = (
        has_ops or layer.activity_regularizer is not None or _has_own_activation(layer)
    )
    is_stateful = getattr(layer, "stateful", False)
    return not is_known or has_own_functions or is_stateful or works_across_rows
