"""Converts the slots of a checkpoint to the storage that a resumed training has."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

import tensorflow as tf

from fastaccum.basics.warnings import warn
from fastaccum.kernels.block_code import Blocks, decode, encode

# How a change of storage is told.
_RENDERED = {"int8": "int8 blocks"}


def convert_in_place(
    tensors: MutableMapping[str, tf.Tensor],
    variables: Mapping[str, tf.Variable],
    scales_then: Mapping[str, str],
    scales_now: Mapping[str, str],
) -> None:
    """Converts slots among the tensors where the variables store them otherwise.

    A slot that was rounded when it was saved stays as it was rounded. One that is stored in fewer
    bytes now is rounded to nearest, once. A warning tells both.

    Args:
        tensors: those of the checkpoint, by name.
        variables: those of the training, by name.
        scales_then: the name of the scales of int8 codes in the checkpoint, by that of the codes.
        scales_now: the same for the training.

    Raises:
        ValueError: raised for int8 codes without scales.
    """
    dtypes_then: set[str] = set()
    dtypes_now: set[str] = set()
    for name, variable in variables.items():
        saved = tensors.get(name)
        if saved is None or not name.startswith("optimizer/") or saved.dtype == variable.dtype:
            continue
        dtypes_then.add(saved.dtype.name)
        dtypes_now.add(variable.dtype.name)
        numbers = saved
        if name in scales_then:
            numbers = decode(Blocks(saved, tensors[scales_then[name]]))
        elif saved.dtype == tf.int8:
            raise ValueError(f"The checkpoint has {name} in int8, and no scales of it.")
        if name in scales_now:
            blocks = encode(tf.cast(numbers, tf.float32))
            tensors[name] = blocks.codes
            tensors[scales_now[name]] = blocks.scales
        else:
            tensors[name] = tf.cast(numbers, variable.dtype)

    if dtypes_then:
        warn(
            f"The checkpoint has optimizer slots in {_rendered(dtypes_then)}, and this training "
            f"stores them in {_rendered(dtypes_now)} (optimizer_state_dtype): they are converted, "
            "and keep the rounding of the coarser of the two. Training does not go on bit for bit "
            "as it would have.",
            UserWarning,
        )


def _rendered(dtypes: set[str]) -> str:
    return " and ".join(_RENDERED.get(dtype, dtype) for dtype in sorted(dtypes, reverse=True))
