"""Creates an optimizer's slots in the dtype that they are stored in, and converts them to it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from fastaccum.adapters.storage import (
    AS_KERAS,
    DTYPE_BY_KERAS,
    SCALES,
    Storage,
    assign,
    dtype_by_keras,
    read,
    scales_of,
    slot_lists,
)
from fastaccum.basics.attributes import Variable, replaced
from fastaccum.kernels import private
from fastaccum.kernels.block_code import count_blocks


@contextmanager
def made_in(part: keras.optimizers.Optimizer, storage: Storage) -> Iterator[None]:
    """Lets Keras make the slots in their stored dtype while it builds an optimizer in the block."""
    make = part.add_variable_from_reference

    def make_slot(
        reference_variable: Variable, name: str | None = None, initializer: Any = "zeros"
    ) -> keras.Variable:
        dtype = storage.slot_dtype(reference_variable)
        with replaced([(part, "add_variable", functools.partial(_add_slot, part, dtype))]):
            return make(reference_variable, name=name, initializer=initializer)

    with replaced([(part, "add_variable_from_reference", make_slot)]):
        yield


def _add_slot(
    part: keras.optimizers.Optimizer,
    slot_dtype: str,
    *,
    shape: Sequence[int],
    initializer: Any,
    name: str,
    dtype: str,
    **options: Any,
) -> keras.Variable:
    """Adds a slot of `slot_dtype` as Keras's `add_variable` does of its weight's `dtype`."""
    add = functools.partial(type(part).add_variable, part, **options)
    if slot_dtype != "int8":
        slot = add(shape=shape, initializer=initializer, name=name, dtype=slot_dtype)
        if slot_dtype != dtype:
            setattr(slot, DTYPE_BY_KERAS, dtype)
        return slot
    codes = add(shape=shape, initializer="zeros", name=name, dtype="int8")
    blocks = count_blocks(codes.shape.num_elements())
    scales = add(shape=[blocks], initializer="zeros", name=f"{name}_scales", dtype="float32")
    setattr(codes, SCALES, scales)
    setattr(codes, DTYPE_BY_KERAS, dtype)
    initializer = keras.initializers.get(initializer)
    if not isinstance(initializer, keras.initializers.Zeros):
        assign(codes, initializer(shape, dtype="float32"))
    return codes


def settle(part: keras.optimizers.Optimizer, storage: Storage) -> None:
    """Converts the slots of a built optimizer to their stored dtype, one after the other.

    Averages of weights are no slots of the update, and stay in the dtype of the weights. So does
    everything that Keras or the user has made, if `storage` changes no slots.
    """
    weights = private.trainable_variables(part)
    averages = private.moving_averages(part, None)
    for name, slots in slot_lists(part).items():
        storage_of_list = AS_KERAS if slots is averages else storage
        settled = list(slots)
        for place, (slot, weight) in enumerate(zip(slots, weights, strict=True)):
            if slot is None or slot.shape != weight.shape:
                continue
            if not storage_of_list.changes_slots and dtype_by_keras(slot) is None:
                continue
            dtype = storage_of_list.slot_dtype(weight)
            if keras.backend.standardize_dtype(slot.dtype) != dtype:
                settled[place] = _converted(part, slot, dtype, weight)
        if any(new is not old for new, old in zip(settled, slots, strict=True)):
            vars(part)[name] = settled


def _converted(
    part: keras.optimizers.Optimizer, slot: keras.Variable, slot_dtype: str, weight: Variable
) -> keras.Variable:
    """Replaces a slot among the optimizer's variables by one of another dtype; returns that."""
    variables = private.variables(part)
    count = len(variables)
    converted = _add_slot(
        part,
        slot_dtype,
        shape=slot.shape,
        initializer="zeros",
        name=slot.name,
        dtype=AS_KERAS.slot_dtype(weight),
    )
    added = [variables.pop() for _ in variables[count:]]
    assign(converted, read(slot))

    place = next(i for i, variable in enumerate(variables) if variable is slot)
    del variables[place]
    if scales_of(slot) is not None:
        del variables[place]  # they follow their codes
    for variable in added:  # the last comes first
        variables.insert(place, variable)
    return converted
