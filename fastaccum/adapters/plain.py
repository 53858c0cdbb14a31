"""Values of Python, NumPy, TensorFlow and Keras as JSON holds them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf


def plain(value: Any) -> Any:
    """`value` as JSON holds it: numbers as Python's, arrays as lists, anything unknown as its type's name.

    >>> plain({"rate": np.float32(0.5), 1: (None, keras.layers.Dense)})
    {'rate': 0.5, '1': [None, 'type']}
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(each) for each in value]
    if isinstance(value, (np.generic, np.ndarray, tf.Tensor, tf.Variable, keras.Variable)):
        return np.asarray(value).tolist()
    return type(value).__name__
