"""How the slots of an optimizer, and bfloat16 weights, are stored between updates.

An update reads them as float32, computes in float32, and rounds the new values to what is stored:

    m, v = read(slots)                                  # float32
    weight, m, v = optimizer.update(gradient, weight, m, v)
    slots = round(m, v)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import keras
import tensorflow as tf

from fastaccum.basics.attributes import Variable, raw
from fastaccum.kernels import private
from fastaccum.kernels.block_code import Blocks, decode, encode, measure
from fastaccum.kernels.random_keys import hash_bits
from fastaccum.kernels.stochastic_rounding import round_stochastically

StateDtype: TypeAlias = Literal["float32", "bfloat16", "int8"]
STATE_DTYPES: tuple[StateDtype, ...] = ("float32", "bfloat16", "int8")

# Slots of fewer numbers stay in float32 where others are int8, as in bitsandbytes and torchao: they
# take little memory, and blocks of 256 are large parts of them.
MIN_CODED = 4096
# The attribute of a slot's codes that holds their scales.
SCALES = "fastaccum_scales"
# The attribute of a slot that is stored in another dtype than Keras's: that dtype, by its name.
DTYPE_BY_KERAS = "fastaccum_dtype_by_keras"
# The lists of an optimizer that hold no slots.
_NO_SLOTS = (private.variables.name, private.trainable_variables.name)


@dataclasses.dataclass(frozen=True)
class Storage:
    """The storage of a training's state.

    Attributes:
        optimizer_state_dtype: of the slots. "float32" leaves them as Keras makes them, in the dtype
            of their weights.
        stochastic_rounding: round bfloat16 weights and slots stochastically, not to nearest.
    """

    optimizer_state_dtype: StateDtype = "float32"
    stochastic_rounding: bool = False

    @property
    def changes_slots(self) -> bool:
        """True if slots are stored otherwise than Keras stores them."""
        return self.optimizer_state_dtype != "float32"

    def slot_dtype(self, weight: Variable) -> str:
        """Returns the dtype of a weight's slots."""
        dtype = tf.as_dtype(raw(weight).dtype)
        if not self.changes_slots or dtype not in (tf.float32, tf.bfloat16):
            return dtype.name
        if self.optimizer_state_dtype == "bfloat16":
            return "bfloat16"
        is_coded = weight.shape.rank > 1 and weight.shape.num_elements() >= MIN_CODED
        return "int8" if is_coded else "float32"


AS_KERAS = Storage()


class Draw(NamedTuple):
    """The random numbers that round a weight or one of its slots."""

    key: tf.Tensor  # of the update and the weight, uint32 [2]
    number: int  # the place of the tensor among those that the update assigns

    def round(self, value: tf.Tensor) -> tf.Tensor:
        """Rounds float32 to bfloat16 stochastically."""
        pair, half = divmod(self.number, 2)  # two tensors share what a key draws
        key_of_pair = hash_bits(self.key, tf.constant([2 * pair, 2 * pair + 1], tf.uint32))
        return round_stochastically(value, key_of_pair, half)


class Format(Protocol):
    """The format of a weight or a slot: what its variables hold."""

    def read(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the number that an update computes with, from the variables' values."""

    def measure(self, value: tf.Tensor) -> list[tf.Tensor]:
        """Returns what `write` must know of all numbers before it writes any."""

    def write(self, value: tf.Tensor, draw: Draw, measures: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the variables' values for numbers."""


@dataclasses.dataclass(frozen=True)
class AsComputed:
    """One variable, of the dtype in which the update computes."""

    def read(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        (value,) = values
        return value

    def measure(self, value: tf.Tensor) -> list[tf.Tensor]:
        return []

    def write(self, value: tf.Tensor, draw: Draw, measures: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return [value]


@dataclasses.dataclass(frozen=True)
class InBfloat16:
    """One bfloat16 variable; the update computes in float32."""

    is_stochastic: bool

    def read(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        (value,) = values
        return tf.cast(value, tf.float32)

    def measure(self, value: tf.Tensor) -> list[tf.Tensor]:
        return []

    def write(self, value: tf.Tensor, draw: Draw, measures: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        if self.is_stochastic:
            return [draw.round(value)]
        return [tf.cast(value, tf.bfloat16)]


@dataclasses.dataclass(frozen=True)
class InBlocks:
    """The int8 codes of blocks and their scales; the update computes in float32."""

    def read(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        return decode(Blocks(*values))

    def measure(self, value: tf.Tensor) -> list[tf.Tensor]:
        return [measure(value)]

    def write(self, value: tf.Tensor, draw: Draw, measures: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        # To nearest: stochastic rounding of second moments, whose update is a thousandth, would add
        # up to many units of so coarse a code.
        (scales,) = measures
        return list(encode(value, scales))


AS_COMPUTED = AsComputed()


@dataclasses.dataclass(frozen=True)
class Stored:
    """A weight or a slot, as its variables hold it."""

    variables: tuple[tf.Variable, ...]
    format: Format

    @property
    def spec(self) -> tuple[Any, ...]:
        """The format, shapes and dtypes, which those share that one program updates."""
        specs = [(tuple(variable.shape), variable.dtype) for variable in self.variables]
        return (self.format, *specs)

    @property
    def shape(self) -> tf.TensorShape:
        return self.variables[0].shape


# A trained variable, and then its slot in each of the optimizer's lists of slots, or None.
OwnVariables: TypeAlias = list[Stored | None]


def dtype_of(variable: Variable) -> tf.DType:
    """Returns the dtype that a variable is held in, which a tf_keras layer's may not show."""
    return getattr(raw(variable), "true_dtype", raw(variable).dtype)


def stored_variable(weight: Variable, storage: Storage) -> Stored:
    """Returns how a weight, or a slot that is not coded, is stored."""
    variable = raw(weight)
    if variable.dtype != tf.bfloat16:
        return Stored((variable,), AS_COMPUTED)
    # Without stochastic rounding, and with the slots that Keras makes, an update is Keras's own.
    if not storage.stochastic_rounding and not storage.changes_slots:
        return Stored((variable,), AS_COMPUTED)
    return Stored((variable,), InBfloat16(storage.stochastic_rounding))


def stored_slot(slot: Variable, storage: Storage) -> Stored:
    """Returns how a slot is stored."""
    scales = scales_of(slot)
    if scales is not None:
        return Stored((raw(slot), raw(scales)), InBlocks())
    return stored_variable(slot, storage)


def scales_of(slot: Variable) -> keras.Variable | None:
    """Returns the scales of a slot's int8 codes; None for a slot that is not coded."""
    return getattr(slot, SCALES, None)


def dtype_by_keras(slot: Variable) -> str | None:
    """Returns the dtype that Keras gives a slot which is stored in another; None for others."""
    return getattr(slot, DTYPE_BY_KERAS, None)


def without_scales(part: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Lists an optimizer's variables without the scales of int8 codes, as Keras has them."""
    scales = {id(scales_of(v)) for v in part.variables if scales_of(v) is not None}
    return [variable for variable in part.variables if id(variable) not in scales]


def read(slot: keras.Variable) -> tf.Tensor:
    """Returns the numbers of a slot; in float32, if they are int8 codes."""
    value = tf.convert_to_tensor(raw(slot))
    scales = scales_of(slot)
    if scales is None:
        return value
    return decode(Blocks(value, tf.convert_to_tensor(raw(scales))))


def assign(slot: keras.Variable, value: tf.Tensor) -> None:
    """Assigns numbers to a slot, rounded to nearest."""
    scales = scales_of(slot)
    if scales is None:
        slot.assign(value)
        return
    blocks = encode(tf.cast(value, tf.float32))
    slot.assign(blocks.codes)
    scales.assign(blocks.scales)


def slot_lists(part: keras.optimizers.Optimizer) -> dict[str, list[keras.Variable | None]]:
    """Returns the optimizer's lists with a slot, or None, for each weight, by attribute."""
    count = len(private.variables_indices(part))
    lists = {}
    for name, value in vars(part).items():
        if name in _NO_SLOTS or not isinstance(value, list) or len(value) != count:
            continue
        if all(slot is None or isinstance(slot, keras.Variable) for slot in value):
            lists[name] = value
    return lists
