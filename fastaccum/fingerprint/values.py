"""Values of a description as JSON holds them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

Json = dict[str, Any]  # an object of JSON


def plain(value: object) -> Any:
    """Converts `value` for JSON.

    Numbers become Python's and arrays become lists; the name of its type stands for anything
    unknown.
    """
    if isinstance(value, (np.generic, np.ndarray, tf.Tensor, tf.Variable, keras.Variable)):
        return np.asarray(value).tolist()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (set, frozenset)):  # whose order is another in each process
        return sorted((plain(item) for item in value), key=repr)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return type(value).__name__
