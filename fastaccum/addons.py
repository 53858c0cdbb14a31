"""tensorflow-addons on current TensorFlow.

The attributes of `fastaccum.addons` are those of `tensorflow_addons`.

>>> import fastaccum.addons
>>> import tensorflow_addons as tfa
>>> optimizer = tfa.optimizers.LAMB(1e-3)
>>> fastaccum.addons.optimizers is tfa.optimizers
True

tensorflow-addons 0.23, its last release, fails to import on TensorFlow 2.16 and later for two
reasons: it finds Keras 3 behind `tf.keras`, and it imports `keras.src.engine`. Once this module is
imported, `import tensorflow_addons` works: both lead to tf_keras (Keras 2), and `tf.keras` is
tf_keras for the rest of the process, and for those that it starts. `import keras` gives Keras 3 as
before. In a program that has used `tf.keras` as Keras 3 already, what needs tensorflow-addons
raises a RuntimeError. No current TensorFlow can load its compiled operations: what needs one raises
a NotImplementedError, and docs/guides/addons.md says what to use instead.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

_ADDONS = "tensorflow_addons"
_KERAS_3_BOUND = """\
tensorflow-addons needs tf_keras behind `tf.keras`, but this program has used `tf.keras` already \
and got Keras 3. \
Put `import fastaccum.addons` above all other imports, or add this line at the top of the program:

    import os; os.environ["TF_USE_LEGACY_KERAS"] = "1"

`tf.keras` and `from tensorflow.keras import ...` are then tf_keras; write `import keras` for \
Keras 3."""


def __getattr__(name: str) -> Any:
    # Import machinery, doctest and inspect probe for dunders; they must not cost an import.
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_ADDONS), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return dir(importlib.import_module(_ADDONS))


class _Finder:
    """Lets `import tensorflow_addons` find `_Loader`, or say why it cannot."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        if name != _ADDONS:
            return None
        spec = _find_addons(path, target)
        python = sys.version_info[:2]
        if spec is None:
            raise ModuleNotFoundError(_not_installed(_ADDONS, python), name=_ADDONS)
        if importlib.util.find_spec("tf_keras") is None:
            raise ModuleNotFoundError(_not_installed("tf_keras", python), name="tf_keras")
        assert spec.origin is not None
        spec.loader = _Loader(name, spec.origin)
        return spec


def _find_addons(path: Sequence[str] | None, target: Any) -> ModuleSpec | None:
    """Returns what the first of the other finders says of tensorflow-addons, if one knows it."""
    for finder in _other_finders():
        spec = finder.find_spec(_ADDONS, path, target)
        if spec is not None:
            return spec
    return None


def _other_finders() -> list[Any]:
    """Lists the finders without that of this module, and of the same before a reload."""
    return [finder for finder in sys.meta_path if getattr(finder, "__module__", "") != __name__]


class _Loader(SourceFileLoader):
    """Imports tensorflow-addons on top of tf_keras, and mends what current releases broke."""

    def exec_module(self, module: ModuleType) -> None:
        import tensorflow as tf

        _bind_tf_keras(tf)
        with _keras_src_engine(), warnings.catch_warnings():
            # It announces its end of life and the TensorFlow versions it was tested with, three
            # times over.
            warnings.filterwarnings("ignore", category=UserWarning, module=rf"{_ADDONS}\.")
            super().exec_module(module)
        _mend(module)


def _mend(addons: ModuleType) -> None:
    """Replaces what tensorflow-addons takes from releases that are no longer current."""
    import numpy as np
    import tensorflow as tf
    from tensorflow_addons.optimizers import discriminative_layer_training
    from tensorflow_addons.seq2seq import beam_search_decoder
    from tensorflow_addons.utils import resource_loader

    from fastaccum.kernels import private

    # The one module of tensorflow-addons that takes Keras 2's backend from `keras.src`, which is
    # now Keras 3's.
    discriminative_layer_training.backend = private.tf_keras_backend
    discriminative_layer_training.tf_utils = private.tf_keras_tf_utils
    addons.options.disable_custom_kernel()
    resource_loader.LazySO.ops = property(_refuse)
    # It takes `np.Inf`, which NumPy 2 has no more.
    beam_search_decoder.np = SimpleNamespace(Inf=np.inf, int64=np.int64)
    # It has an `if` of a tensor, which only a tf.function takes in a graph.
    geometric_mean = addons.metrics.GeometricMean
    geometric_mean.update_state = tf.function(geometric_mean.update_state)
    geometric_mean.result = tf.function(geometric_mean.result)
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{_ADDONS}.losses."):
            _inline(module)
    _follow_weights(addons.optimizers.SWA)
    _assign_to_keras_3(addons.optimizers.AveragedOptimizerWrapper)


def _inline(module: ModuleType) -> None:
    """Inlines a module's tf.functions into graphs that call them."""
    import tensorflow as tf

    # Else the gradient of a `tf.tile` takes its shape from a function's results, and XLA compiles
    # each step anew.
    function_class: Any = type(tf.function(lambda: None))

    class Inlined(function_class):
        def __call__(self, *args: object, **kwargs: object) -> object:
            if tf.executing_eagerly():
                return super().__call__(*args, **kwargs)
            return self.python_function(*args, **kwargs)

    for value in vars(module).values():
        if type(value) is function_class:
            value.__class__ = Inlined


def _refuse(library: Any) -> NoReturn:
    raise NotImplementedError(
        f"{library.relative_path} was compiled for TensorFlow 2.15, and no later one can load "
        "it: see docs/guides/addons.md for what to use instead."
    )


def _follow_weights(swa: Any) -> None:
    """Makes the averages of SWA follow the weights until `start_averaging`, as MovingAverage's do.

    They would be 0 until then.
    """
    average_op = vars(swa)["average_op"]

    def following(self: Any, var: Any, average_var: Any, local_apply_state: Any) -> Any:
        import tensorflow as tf

        from fastaccum.kernels import private

        start = private.get_hyper(self, "start_averaging", tf.int64)
        average_var.assign(tf.where(self.iterations < start, var, average_var))
        return average_op.__get__(self, swa)(var, average_var, local_apply_state)

    swa.average_op = following


def _assign_to_keras_3(wrapper: Any) -> None:
    """Lets `assign_average_vars` take the variables of Keras 3's models.

    It would leave these as they are.
    """
    assign = wrapper.assign_average_vars

    def assign_average_vars(self: Any, var_list: Any) -> Any:
        import keras

        tf_variables = []
        for variable in var_list:
            if isinstance(variable, keras.Variable):
                variable = variable.value
            tf_variables.append(variable)
        return assign(self, tf_variables)

    wrapper.assign_average_vars = assign_average_vars


def _not_installed(package: str, python: tuple[int, int]) -> str:
    """Says how to install a package, or what to use where no release of it is for this Python."""
    install = "pip install 'fastaccum[addons]'"
    if python < (3, 12):
        name = package.replace("_", "-")
        return f"fastaccum.addons needs {name}, which is not installed: {install}"
    major, minor = python
    return (
        "fastaccum.addons needs tensorflow-addons, whose last release is for Python 3.11. This "
        f"is Python {major}.{minor}. Use Python 3.10 or 3.11 ({install}), or what Keras 3 has "
        "instead: keras.optimizers.Lamb, AdamW, SGD(use_ema=True) and others, which "
        "docs/guides/addons.md lists."
    )


def _bind_tf_keras(tf: ModuleType) -> None:
    """Binds `tf.keras` to tf_keras for good, or leaves everything as it was and raises."""
    import tf_keras
    import tf_keras.api._v2.keras as tf_keras_api

    previous_setting = os.environ.get("TF_USE_LEGACY_KERAS")
    previous_paths = list(tf.__path__)
    path = os.path.dirname(os.path.dirname(tf_keras_api.__file__))
    # `tf.keras.x` asks the environment at its first use. `import tensorflow.keras` follows the
    # package's path, which TensorFlow takes from the environment at its own import, and puts what
    # it finds in the place of `tf.keras`.
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    if path not in previous_paths:
        tf.__path__.insert(0, path)
    if tf.keras.Model is not tf_keras.Model:
        tf.__path__[:] = previous_paths
        del os.environ["TF_USE_LEGACY_KERAS"]
        if previous_setting is not None:
            os.environ["TF_USE_LEGACY_KERAS"] = previous_setting
        raise RuntimeError(_KERAS_3_BOUND)


@contextlib.contextmanager
def _keras_src_engine() -> Iterator[None]:
    """Lets `from keras.src.engine import keras_tensor` find tf_keras's inside the block."""
    # Keras 3 in full first: nothing of it may be imported while the name is there.
    import keras  # noqa: F401

    from fastaccum.kernels import private

    _ = private.tf_keras_keras_tensor  # imports the module, which the package then has
    sys.modules[private.ADDONS_EXPECTS] = private.tf_keras_engine
    try:
        yield
    finally:
        del sys.modules[private.ADDONS_EXPECTS]


sys.meta_path[:] = _other_finders()
# Now, since a program may use `tf.keras` before it uses tensorflow-addons.
if all(map(importlib.util.find_spec, (_ADDONS, "tf_keras"))):
    if "tensorflow" in sys.modules:
        with contextlib.suppress(RuntimeError):  # `_Loader` raises it
            _bind_tf_keras(sys.modules["tensorflow"])
    else:
        os.environ["TF_USE_LEGACY_KERAS"] = "1"
sys.meta_path.insert(0, _Finder)
