"""Updates the rows of a table that no example of a step looked up, as legacy optimizers do.

An optimizer of tf_keras.optimizers.legacy or tensorflow-addons has two methods for a table: the
dense form, `_resource_apply_dense`, takes a gradient of all rows; the sparse form,
`_resource_apply_sparse`, takes one of the rows that were looked up. On these rows the forms are
equal. The other rows have a gradient of 0, with which the dense form may still decay or move them,
while most sparse forms leave them alone. A train step sums a dense gradient and marks the rows that
were looked up. Here the dense form is replaced by

    touched   = dense form(gradient)
    untouched = sparse form(gradient of no row)     # may still decay the slots of the whole table
    table     = where(looked up, touched, untouched)         # and each of its slots likewise
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Literal, NamedTuple

import keras
import tensorflow as tf

from fastaccum.basics.attributes import package
from fastaccum.kernels import private

# What a sparse form does to the rows that were not looked up: what the dense form does to rows
# whose gradient is 0; nothing; or an update that the sparse form is called for.
_Effect = Literal["as dense", "unchanged", "own update"]

# By the class that defines the sparse form; SGD and RMSprop without momentum. "unchanged" needs no
# call of the sparse form, which XLA could seldom compile: most are kernels that it lacks.
_EFFECTS: dict[str, _Effect] = {
    "AdaBelief": "own update",
    "Adadelta": "unchanged",
    "Adagrad": "as dense",
    "Adam": "as dense",
    "AdamWeightDecay": "as dense",
    "Adamax": "own update",
    "COCOB": "as dense",
    "ConditionalGradient": "unchanged",
    "Ftrl": "unchanged",
    "LAMB": "as dense",
    "LazyAdam": "own update",
    "Nadam": "own update",
    "NonFusedAdam": "as dense",
    "NovoGrad": "unchanged",
    "ProximalAdagrad": "unchanged",
    "RMSprop": "as dense",
    "RectifiedAdam": "own update",
    "SGD": "as dense",
    "Yogi": "own update",
}
# Instead of "as dense", where tensorflow-addons' decoupled weight decay comes before the sparse
# form. In the sparse form it decays the looked-up rows alone, in the dense form all rows. A class
# that is not listed is refused with it, and SGD is a case of its own in `_find_forms`.
_EFFECTS_WITH_DECAY: dict[str, _Effect] = {
    "Adagrad": "unchanged",
    "Adam": "own update",
    "NonFusedAdam": "own update",
    "RMSprop": "own update",
}
_KNOWN_PACKAGES = ("tf_keras", "tensorflow_addons", "transformers")


def treats_apart(optimizer: keras.optimizers.Optimizer) -> bool:
    """Tells if an optimizer updates rows without a lookup in another way than rows of gradient 0.

    Raises ValueError if that is not known.
    """
    return _find_forms(optimizer).effect != "as dense"


def replace_dense_form(
    optimizer: keras.optimizers.Optimizer, looked_up: Mapping[Hashable, tf.Tensor]
) -> Iterator[tuple[object, str, Callable]]:
    """Yields the replacement of an optimizer's dense form that the module's docstring shows.

    `looked_up` has a bool [rows] for each table, by the table's `ref()`.
    """
    if not looked_up:
        return
    as_defined = getattr(optimizer, private.resource_apply_dense.name)
    forms = _find_forms(optimizer)
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
        forms.dense(gradient, variable, **state)
        touched = [t.read_value() for t in tables]
        if forms.effect == "own update":
            for table, value in zip(tables, before, strict=True):
                table.assign(value)
            sparse_state = {k: value for k, value in state.items() if k in sparse_parameters}
            sparse(gradient[:0], variable, tf.zeros([0], tf.int32), **sparse_state)
            untouched = [t.read_value() for t in tables]
        else:
            untouched = before

        for table, new, other in zip(tables, touched, untouched, strict=True):
            rows = tf.reshape(looked_up[variable.ref()], [-1] + [1] * (len(table.shape) - 1))
            table.assign(tf.where(rows, new, other))
        return tf.no_op()

    # The optimizer passes `apply_state` only to a form whose signature has it.
    apply.__signature__ = inspect.signature(as_defined)  # type: ignore[attr-defined]
    yield optimizer, private.resource_apply_dense.name, apply


class _Forms(NamedTuple):
    """The dense form that rows with a lookup take, and the sparse form's effect on all others."""

    dense: Callable
    effect: _Effect


def _find_forms(optimizer: keras.optimizers.Optimizer) -> _Forms:
    """Finds an optimizer's forms by the classes that define them.

    Raises ValueError if a form is not of a class that is known.
    """
    as_defined = getattr(optimizer, private.resource_apply_dense.name)
    dense_forms = _definitions(optimizer, private.resource_apply_dense.name)
    sparse_forms = _definitions(optimizer, private.resource_apply_sparse.name)
    has_decay = any(_decays(form) for form in sparse_forms)
    dense = next(form for form in dense_forms if not _decays(form))
    sparse = next(form for form in sparse_forms if not _decays(form))
    sparse_class = sparse.__qualname__.split(".")[0]

    # The base class's sparse form is what the error below says to set: it stands for all rows.
    if sparse_class == "OptimizerV2" and package(sparse) == "tf_keras":
        return _Forms(as_defined, "as dense")

    effect = None
    if package(dense) in _KNOWN_PACKAGES and package(sparse) in _KNOWN_PACKAGES:
        effect = _EFFECTS.get(sparse_class)
        if sparse_class in ("SGD", "RMSprop") and private.momentum(optimizer, False):
            effect = "unchanged"  # with momentum they call a kernel for the looked-up rows alone
        elif has_decay and sparse_class == "SGD":
            # Without momentum, SGD overrides the method that calls the sparse form, in which the
            # decay stands. The decay is then never reached: looked-up rows do not decay either.
            return _Forms(functools.partial(dense, optimizer), "unchanged")
        elif has_decay and effect == "as dense":
            effect = _EFFECTS_WITH_DECAY.get(sparse_class)
    if effect is not None:
        return _Forms(as_defined, effect)

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
    """Tells if a form is tensorflow-addons' decay, which then calls the next class's form."""
    is_of_addons = package(form) == "tensorflow_addons"
    return is_of_addons and form.__qualname__.startswith("DecoupledWeightDecayExtension")
