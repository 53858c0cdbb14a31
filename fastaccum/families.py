"""Finds the adapter for a user's model or optimizer: Keras 3's, or a legacy one."""

from __future__ import annotations

import difflib
import types

import keras

from fastaccum.adapters.models import Model
from fastaccum.adapters.optimizers import Keras3Optimizer, MultiOptimizer, Optimizer
from fastaccum.basics import patches
from fastaccum.basics.arguments import KerasModel
from fastaccum.basics.attributes import kinds, package, require_model
from fastaccum.basics.warnings import warn
from fastaccum.legacy.tf_keras_models import PretrainedModel, TFKerasModel
from fastaccum.legacy.tf_keras_optimizers import LegacyOptimizer, TFKerasOptimizer

# The first that fits.
_MODELS = (Model, PretrainedModel, TFKerasModel)
# By name, since only those who use tf_keras import it. The first that fits.
_OPTIMIZERS = {
    "keras.MultiOptimizer": MultiOptimizer,
    "keras.Optimizer": Keras3Optimizer,
    "tf_keras.Optimizer": TFKerasOptimizer,
    "tf_keras.OptimizerV2": LegacyOptimizer,
}


def adapt_model(model: KerasModel) -> Model:
    """Returns the adapter for a Keras 3 or tf_keras model."""
    require_model(model)
    model_kinds = kinds(model)
    return next(adapter(model) for adapter in _MODELS if adapter.KIND in model_kinds)


def adapt_optimizer(
    optimizer: keras.optimizers.Optimizer, named: types.ModuleType = keras.optimizers
) -> Optimizer:
    """Returns the adapter for an optimizer, or for the name of one in the module `named`.

    The optimizer is one of Keras 3, tf_keras or tensorflow-addons.
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    if isinstance(optimizer, str):
        optimizer = _make_named(optimizer, named)
    if isinstance(optimizer, type):
        raise TypeError(
            f"optimizer={optimizer.__name__} is a class: call it, and pass what it makes"
        )
    optimizer_kinds = kinds(optimizer)
    for kind, adapter in _OPTIMIZERS.items():
        if kind not in optimizer_kinds:
            continue
        if vars(optimizer).pop(patches.SKIPPED, False):
            warn(
                f"optimizer={type(optimizer).__name__} starts without its saved state: the state "
                "in the file does not fit the weights that the loaded model trains, or Keras did "
                "not compile the loaded model. If the model was saved with LoRA, see "
                "docs/guides/saving.md."
            )
        return adapter(optimizer)
    raise TypeError(
        f"optimizer={optimizer!r} is of type {type(optimizer).__name__}: pass a Keras 3, "
        'tf_keras or tensorflow-addons optimizer, or a name such as "adamw"'
    )


def _make_named(name: str, optimizers: types.ModuleType) -> keras.optimizers.Optimizer:
    """Makes an optimizer with its defaults, by the name of its class in a module of them."""
    # Not every release of Keras has all of them.
    not_by_name = [
        getattr(optimizers, class_name, None)
        for class_name in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
    ]
    classes = {k.lower(): v for k, v in vars(optimizers).items() if isinstance(v, type)}
    known = {}
    for lower_name, kind in classes.items():
        if issubclass(kind, optimizers.Optimizer) and kind not in not_by_name:
            known[lower_name] = kind
    if name.lower() in known:
        return known[name.lower()]()

    near = " or ".join(map(repr, difflib.get_close_matches(name.lower(), known)))
    hint = ""
    if near:
        hint = f" Did you mean {near}?"
    raise ValueError(
        f"optimizer={name!r} is not a name of {package(optimizers.Optimizer)}.optimizers.{hint} "
        "Pass others as objects, or as tfa:NAME to `fastaccum train`."
    )
