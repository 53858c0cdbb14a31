"""Rows of a table that no example of a step looked up, under tf_keras.optimizers.legacy and
tensorflow-addons.

Most of these optimizers leave rows without a lookup alone, by `_resource_apply_sparse`, where the
form for dense gradients would decay or move them. A train step adds up a dense gradient and marks
the rows that were looked up:

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

# By the class that defines the sparse form. What does the same to every row as the dense form, what
# does nothing at all to other rows (kernels mostly, which XLA lacks), and what must be asked.
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
_NOTHING = {
    "Adadelta",
    "Adagrad",
    "ConditionalGradient",
    "Ftrl",
    "NovoGrad",
    "ProximalAdagrad",
    "with momentum",
}
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


def treats_apart(optimizer: keras.optimizers.Optimizer) -> bool:
    """Tells if an optimizer treats rows without a lookup not as rows of gradient zero; ValueError
    if not known.
    """
    return _find_forms(optimizer)[1] != "as dense"


def replace_dense_form(
    optimizer: keras.optimizers.Optimizer, looked_up: Mapping[Hashable, tf.Tensor]
) -> Iterator[tuple[object, str, Callable]]:
    """Yields attributes to replace, so that rows stay that were not `looked_up`, bool [rows] by a
    table's `ref()`.
    """
    if not looked_up:
        return
    own = getattr(optimizer, private.resource_apply_dense.name)
    dense, to_others = _find_forms(optimizer)
    sparse = getattr(optimizer, private.resource_apply_sparse.name)
    taken = inspect.signature(sparse).parameters

    def apply(gradient, variable, **state):
        if variable.ref() not in looked_up:
            return own(gradient, variable, **state)
        slots = [optimizer.get_slot(variable, name) for name in optimizer.get_slot_names()]
        tables = [variable, *(slot for slot in slots if slot.shape[:1] == variable.shape[:1])]
        before = [t.read_value() for t in tables]
        dense(gradient, variable, **state)
        touched, others = [t.read_value() for t in tables], before
        if to_others == "ask":
            for table, value in zip(tables, before, strict=True):
                table.assign(value)
            given = {name: value for name, value in state.items() if name in taken}
            sparse(gradient[:0], variable, tf.zeros([0], tf.int32), **given)
            others = [t.read_value() for t in tables]
        for table, new, other in zip(tables, touched, others, strict=True):
            rows = tf.reshape(looked_up[variable.ref()], [-1] + [1] * (len(table.shape) - 1))
            table.assign(tf.where(rows, new, other))
        return tf.no_op()

    apply.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]  # which says whether to pass a state
    yield optimizer, private.resource_apply_dense.name, apply


def _find_forms(
    optimizer: keras.optimizers.Optimizer,
) -> tuple[Callable, Literal["as dense", "nothing", "ask"]]:
    """Returns the dense form of an optimizer's update, and the effect of the sparse one on other
    rows.
    """
    names = private.resource_apply_dense.name, private.resource_apply_sparse.name
    dense, sparse = (
        [vars(c)[name] for c in type(optimizer).__mro__ if name in vars(c)] for name in names
    )
    decays = any(map(_decays, sparse))
    (own_dense, *_), (own_sparse, *_) = (
        [f for f in each if not _decays(f)] for each in (dense, sparse)
    )
    family = own_sparse.__qualname__.split(".")[0]
    if private.momentum(optimizer, False) and family in ("SGD", "RMSprop"):
        family = "with momentum"
    theirs = all(
        package(f) in ("tf_keras", "tensorflow_addons", "transformers")
        for f in (own_dense, own_sparse)
    )
    updates_all_rows = family == "OptimizerV2" and package(own_sparse) == "tf_keras"
    if updates_all_rows or (theirs and family in _DENSE and not decays):
        return getattr(optimizer, private.resource_apply_dense.name), "as dense"
    if theirs and family == "SGD":  # whose sparse form goes past that of the weight decay
        return functools.partial(own_dense, optimizer), "nothing"
    if theirs and family in _NOTHING | _TO_ASK:
        return getattr(
            optimizer, private.resource_apply_dense.name
        ), "nothing" if family in _NOTHING else "ask"
    name = type(optimizer).__name__
    raise ValueError(
        f"optimizer={name} updates embeddings by a `_resource_apply_sparse` that is not known to "
        f"be exact here. Set {name}._resource_apply_sparse = "
        "tf_keras.optimizers.legacy.Optimizer._resource_apply_sparse, which updates all rows, "
        "or use an optimizer of Keras 3."
    )


def _decays(form: Callable) -> bool:
    # Before that of any other class.
    return package(form) == "tensorflow_addons" and form.__qualname__.startswith(
        "DecoupledWeightDecayExtension"
    )
