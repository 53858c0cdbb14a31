"""tensorflow-addons on current TensorFlow: `fastaccum.addons` is the package `tensorflow_addons` itself.

>>> import fastaccum.addons
>>> optimizer = fastaccum.addons.optimizers.LAMB(1e-3)
>>> type(optimizer).__module__
'tensorflow_addons.optimizers.lamb'

Nothing is imported before the first attribute is asked for. tensorflow-addons 0.23, its last release, fails to import
on TensorFlow 2.16 and later for two reasons: it finds Keras 3 behind `tf.keras`, and it imports `keras.src.engine`.
Here both lead to tf_keras (Keras 2): `tf.keras` for the rest of the process. `import keras` gives Keras 3 as before.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

_KERAS_3_BOUND = """\
tensorflow-addons needs tf_keras behind `tf.keras`, but this program has used `tf.keras` already and got Keras 3. \
Add this line at the top of the program, before `import tensorflow`:

    import os; os.environ["TF_USE_LEGACY_KERAS"] = "1"

`tf.keras` and `from tensorflow.keras import ...` are then tf_keras; write `import keras` for Keras 3."""


def __getattr__(name: str) -> Any:
    # Import machinery, doctest and inspect probe for dunders; they must not cost an import.
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_tensorflow_addons(), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return dir(_tensorflow_addons())


def _tensorflow_addons() -> ModuleType:
    for package in ("tensorflow_addons", "tf_keras"):
        if package not in sys.modules and importlib.util.find_spec(package) is None:
            raise ImportError(_not_installed(package, sys.version_info[:2]))
    import tensorflow as tf

    _bind_tf_keras(tf)
    with _keras_src_engine(), warnings.catch_warnings():
        # It announces its end of life and the TensorFlow versions it was tested with, three times over.
        warnings.filterwarnings("ignore", category=UserWarning, module=r"tensorflow_addons\.")
        addons = importlib.import_module("tensorflow_addons")
    from tensorflow_addons.optimizers import discriminative_layer_training
    from tf_keras.src import backend
    from tf_keras.src.utils import tf_utils

    # The one module of tensorflow-addons that takes Keras 2's backend from `keras.src`, which is now Keras 3's.
    discriminative_layer_training.backend = backend
    discriminative_layer_training.tf_utils = tf_utils
    return addons


def _not_installed(package: str, python: tuple[int, int]) -> str:
    name = package.replace("_", "-")
    text = f"fastaccum.addons needs {name}, which is not installed: pip install fastaccum[addons]"
    if python >= (3, 12):
        text += (
            f". This is Python {python[0]}.{python[1]}, and the wheels of tensorflow-addons end at 3.11:"
            " use Python 3.10 or 3.11, or a Keras 3 optimizer"
        )
    return text


def _bind_tf_keras(tf: ModuleType) -> None:
    """Binds `tf.keras` to tf_keras for good, or leaves everything as it was and raises."""
    import tf_keras
    import tf_keras.api._v2.keras as tf_keras_api

    previous, paths = os.environ.get("TF_USE_LEGACY_KERAS"), list(tf.__path__)
    path = os.path.dirname(os.path.dirname(tf_keras_api.__file__))
    # `tf.keras.x` asks the environment at its first use. `import tensorflow.keras` follows the package's path, which
    # TensorFlow takes from the environment at its own import, and puts what it finds in the place of `tf.keras`.
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    if path not in paths:
        tf.__path__.insert(0, path)
    if tf.keras.Model is not tf_keras.Model:
        tf.__path__[:] = paths
        del os.environ["TF_USE_LEGACY_KERAS"]
        if previous is not None:
            os.environ["TF_USE_LEGACY_KERAS"] = previous
        raise RuntimeError(_KERAS_3_BOUND)


@contextlib.contextmanager
def _keras_src_engine() -> Iterator[None]:
    """`from keras.src.engine import keras_tensor` finds tf_keras's, while this lasts."""
    # Keras 3 in full first: nothing of it may be imported while the name is there.
    import keras  # noqa: F401
    import tf_keras.src.engine.keras_tensor

    sys.modules["keras.src.engine"] = tf_keras.src.engine
    try:
        yield
    finally:
        del sys.modules["keras.src.engine"]
