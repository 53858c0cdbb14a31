"""Makes stand-ins for what is stored in fewer bytes: float32 variables to trace an update with.

They have no memory, and nobody ever initializes them: a trace takes their shapes and dtypes alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from fastaccum.adapters.storage import AS_COMPUTED, InBlocks, OwnVariables, Stored, slot_lists
from fastaccum.basics.attributes import raw
from fastaccum.kernels import private
from fastaccum.kernels.block_code import BLOCK


class StandIns(NamedTuple):
    """Stand-ins for the variables of an update, for its trace."""

    weight: keras.Variable
    variables: list[tf.Variable | None]  # the weight, and its slot in each list
    # Of the optimizer: what makes it find these slots for this weight.
    attributes: list[tuple[object, str, object]]


def stand_in(
    optimizer: keras.optimizers.Optimizer, own: OwnVariables, trained: keras.Variable
) -> StandIns:
    """Makes float32 variables without memory for what is stored in fewer bytes."""
    shape = _shape_of_trace(own)
    is_reshaped = shape != trained.shape
    variables: list[tf.Variable | None] = []
    for stored in own:
        if stored is None:
            variables.append(None)
        elif is_reshaped:
            variables.append(_without_memory(stored, shape))
        elif stored.format is AS_COMPUTED:
            variables.append(stored.variables[0])
        else:
            variables.append(_without_memory(stored, stored.shape))
    weight = trained
    if variables[0] is not raw(weight):
        weight = _as_keras_variable(variables[0], like=trained)
    indices = private.variables_indices(optimizer)
    index = indices[private.var_key(optimizer, trained)]
    indices_with_stand_in = {**indices, private.var_key(optimizer, weight): index}
    decays = private.use_weight_decay(optimizer, raw(trained))
    attributes: list[tuple[object, str, object]] = [
        (optimizer, private.variables_indices.name, indices_with_stand_in),
        (optimizer, private.use_weight_decay.name, lambda variable: decays),
    ]
    for (name, slots), variable in zip(slot_lists(optimizer).items(), variables[1:], strict=True):
        with_stand_in: list[Any] = list(slots)
        if variable is not None and variable is not raw(slots[index]):
            with_stand_in[index] = _as_keras_variable(variable, like=slots[index])
        attributes.append((optimizer, name, with_stand_in))
    return StandIns(weight, variables, attributes)


def _shape_of_trace(own: OwnVariables) -> tf.TensorShape:
    """Returns the shape in which an update is traced: the weight's, or, with blocks, their rows.

    Where all numbers stand in rows, XLA makes one kernel of an update. Otherwise it would keep the
    new slots in float32.
    """
    stored_variables = [stored for stored in own if stored is not None]
    shape = stored_variables[0].shape
    has_blocks = any(isinstance(stored.format, InBlocks) for stored in stored_variables)
    are_alike = all(stored.shape == shape for stored in stored_variables)
    if has_blocks and are_alike and shape.num_elements() % BLOCK == 0:
        return tf.TensorShape([shape.num_elements() // BLOCK, BLOCK])
    return shape


def _without_memory(stored: Stored, shape: tf.TensorShape) -> tf.Variable:
    """Makes a variable of the dtype in which an update computes with what is stored."""
    dtype = stored.variables[0].dtype if stored.format is AS_COMPUTED else tf.float32
    with tf.init_scope():
        return private.UninitializedVariable(dtype=dtype, shape=shape, trainable=False)


def _as_keras_variable(variable: tf.Variable | None, like: keras.Variable) -> keras.Variable:
    """Returns a tf.Variable as a keras.Variable with the name and path of another."""
    with tf.init_scope():
        seen = keras.Variable(variable, name=like.name, trainable=like.trainable)
    private.variable_path.set(seen, like.path)
    return seen
