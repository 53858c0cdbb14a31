"""Rows of a table that no example of a step looked up, as legacy optimizers update them.

Most optimizers of tf_keras.optimizers.legacy and tensorflow-addons leave rows without a lookup
alone, by `_resource_apply_sparse`, where the form for dense gradients would decay or move them. A
train step adds up a dense gradient and marks the rows that were looked up:

    touched = dense form(gradient)                    # on these rows the two are equal
    others  = sparse form(of no row)
    table   = where(looked up, touched, others)       # its slots likewise
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Literal

import keras
import tensorflow as tf

from fastaccum.basics.attributes import package
from fastaccum.kernels import private

# Classes by what the sparse form that they define does to rows without a lookup. The same as the
# dense form:
_DENSE = {
    "Adagrad",
    "Adam",
    "AdamWeightDecay",
    "COCOB",
    "LAMB",
    "NonFusedAdam",
    "OptimizerV2",
    "RMSprop",
    "SGD",
}
# Nothing at all. Most of these are kernels, which XLA lacks:
_NOTHING = {
    "Adadelta",
    "Adagrad",
    "ConditionalGradient",
    "Ftrl",
    "NovoGrad",
    "ProximalAdagrad",
    "with momentum",
}
# Something of its own, which the sparse form is called for:
_TO_ASK = {
    "AdaBelief",
    "Adam",
    "Adamax",
    "LazyAdam",
    "NonFusedAdam",
    "Nadam",
    "RMSprop",
    "RectifiedAdam",
    "Yogi",
}
_KNOWN_PACKAGES = ("tf_keras", "tensorflow_addons", "transformers")


def treats_apart(optimizer: keras.optimizers.Optimizer) -> bool:
    """Tells if an optimizer updates rows without a lookup in another way than rows of gradient 0.

    Raises ValueError if that is not known.
    """
    return _find_forms(optimizer)[1] != "as dense"


def replace_dense_form(
    optimizer: keras.optimizers.Optimizer, looked_up: Mapping[Hashable, tf.Tensor]
) -> Iterator[tuple[object, str, Callable]]:
    """Yields attributes to replace, so that rows that were not looked up are updated as such.

    `looked_up` has bool [rows] by a table's `ref()`.
    """
    if not looked_up:
        return
    as_defined = getattr(optimizer, private.resource_apply_dense.name)
    dense, to_others = _find_forms(optimizer)
    sparse = getattr(optimizer, private.resource_apply_sparse.name)
    sparse_parameters = inspect.signature(sparse).parameters

    def apply(gradient, variable, **state):
        if variable.ref() not in looked_up:
            return as_defined(gradient, variable, **state)
        tables = [variable]
        for name in optimizer.get_slot_names():
            slot = optimizer.get_slot(variable, name)
            if slot.shape[:1] == variable.shape[:1]:
                tables.append(slot)

        before = [t.read_value() for t in tables]
        dense(gradient, variable, **state)
        touched = [t.read_value() for t in tables]
        untouched = before
        if to_others == "ask":
            for table, value in zip(tables, before, strict=True):
                table.assign(value)
            sparse_state = {k: value for k, value in state.items() if k in sparse_parameters}
            sparse(gradient[:0], variable, tf.zeros([0], tf.int32), **sparse_state)
            untouched = [t.read_value() for t in tables]
        for table, new, other in zip(tables, touched, untouched, strict=True):
            rows = tf.reshape(looked_up[variable.ref()], [-1] + [1] * (len(table.shape) - 1))
            table.assign(tf.where(rows, new, other))
        return tf.no_op()

    # The optimizer reads it to see whether to pass a state.
    apply.__signature__ = inspect.signature(as_defined)  # type: ignore[attr-defined]
    yield optimizer, private.resource_apply_dense.name, apply


def _find_forms(
    optimizer: keras.optimizers.Optimizer,
) -> tuple[Callable, Literal["as dense", "nothing", "ask"]]:
    """Returns the dense form of an update, and the sparse form's effect on other rows."""
    as_defined = getattr(optimizer, private.resource_apply_dense.name)
    dense_forms = _definitions(optimizer, private.resource_apply_dense.name)
    sparse_forms = _definitions(optimizer, private.resource_apply_sparse.name)
    decays = any(_decays(form) for form in sparse_forms)
    dense = next(form for form in dense_forms if not _decays(form))
    sparse = next(form for form in sparse_forms if not _decays(form))
    family = sparse.__qualname__.split(".")[0]
    if private.momentum(optimizer, False) and family in ("SGD", "RMSprop"):
        family = "with momentum"
    is_known = package(dense) in _KNOWN_PACKAGES and package(sparse) in _KNOWN_PACKAGES
    updates_all_rows = family == "OptimizerV2" and package(sparse) == "tf_keras"
    if updates_all_rows or (is_known and family in _DENSE and not decays):
        return as_defined, "as dense"
    if is_known and family == "SGD":  # whose sparse form goes past that of the weight decay
        return functools.partial(dense, optimizer), "nothing"
    if is_known and family in _NOTHING:
        return as_defined, "nothing"
    if is_known and family in _TO_ASK:
        return as_defined, "ask"
    name = type(optimizer).__name__
    raise ValueError(
        f"optimizer={name} updates embeddings by a `_resource_apply_sparse` that is not known to "
        f"be exact here. Set {name}._resource_apply_sparse = "
        "tf_keras.optimizers.legacy.Optimizer._resource_apply_sparse, which updates all rows, "
        "or use an optimizer of Keras 3."
    )


def _definitions(optimizer: keras.optimizers.Optimizer, method: str) -> list[Callable]:
    """Lists the definitions of a method in an optimizer's class and its bases, in order."""
    classes = type(optimizer).__mro__
    return [vars(cls)[method] for cls in classes if method in vars(cls)]


def _decays(form: Callable) -> bool:
    """Tells if a form is the one that decays weights, then calls that of the next class."""
    is_of_addons = package(form) == "tensorflow_addons"
    return is_of_addons and form.__qualname__.startswith("DecoupledWeightDecayExtension")
