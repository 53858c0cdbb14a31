"""Names variables alike in every process, and describes their values."""

from __future__ import annotations

import re
import zlib
from collections.abc import Container, Mapping, Sequence

import numpy as np
import tensorflow as tf

from fastaccum.basics.attributes import Variable, raw
from fastaccum.fingerprint.values import Json

# The numbers by which Keras tells apart what one process made. Another process counts anew.
NUMBER = r"_\d+(?=[_/]|$)"


def name_variables(
    groups: Mapping[str, Sequence[Variable]],
) -> dict[str, dict[str, tf.Variable]]:
    """Names each group's variables, once each, alike in every process."""
    named_groups: dict[str, dict[str, tf.Variable]] = {}
    for group, variables in groups.items():
        named: dict[str, tf.Variable] = {}
        seen = set()
        for variable in variables:
            tf_variable = raw(variable)
            if id(tf_variable) in seen:
                continue
            seen.add(id(tf_variable))
            path = getattr(variable, "path", None) or tf_variable.name
            path = path.split(":")[0]  # without the ":0" of TensorFlow's names
            named[free_name(path, named)] = tf_variable
        named_groups[group] = named
    return named_groups


def free_name(path: str, taken: Container[str]) -> str:
    """Returns `path` without Keras's numbers; if that is taken, with the first free -2, -3, ..."""
    without_numbers = re.sub(NUMBER, "", path)
    name = without_numbers
    number = 2
    while name in taken:
        name = f"{without_numbers}-{number}"
        number += 1
    return name


def checksums(groups: Mapping[str, Sequence[Variable]]) -> Json:
    """Returns checksums of the model's and the optimizer's variables, by name.

    In place of a checksum, a variable of one number has that number, which an error can show.
    """
    named_groups = name_variables({"model": groups["model"], "optimizer": groups["optimizer"]})
    sums = {}
    for group, named in named_groups.items():
        for name, variable in named.items():
            array = np.array(variable.read_value())
            if array.size == 1:
                sums[f"{group}/{name}"] = array.item()
            else:
                sums[f"{group}/{name}"] = zlib.crc32(array.tobytes())
    return sums
