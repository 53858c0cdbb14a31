"""tensorflow-addons as `fastaccum.addons`: imported when used, beside a Keras 3 that goes on as
before.
"""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa

PAGE = Path(__file__).parents[1] / "docs/guides/addons.md"
needs_addons = pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="tensorflow-addons ends at Python 3.11"
)
PROLOGUE = "import os; os.environ['TF_CPP_MIN_LOG_LEVEL'] = '2'; import sys\n"


def run(code):
    """Runs a program of its own, since `tf.keras` is bound once in a process."""
    env = {k: v for k, v in os.environ.items() if k != "TF_USE_LEGACY_KERAS"}
    command = [sys.executable, "-c", PROLOGUE + code]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)


def succeeds(code):
    result = run(code)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@pytest.mark.sample
@needs_addons
def test_nothing_is_imported_before_it_is_used():
    succeeds("""
import fastaccum.addons as addons
assert not hasattr(addons, "__wrapped__")
assert "tensorflow_addons" not in sys.modules and "tf_keras" not in sys.modules
import warnings
warnings.simplefilter("error")
warnings.filterwarnings("ignore", category=DeprecationWarning)
from tensorflow.keras import layers
import tensorflow_addons
from fastaccum.addons import optimizers
import tf_keras
assert layers.Dense is tf_keras.layers.Dense
assert optimizers is tensorflow_addons.optimizers
assert addons.losses is tensorflow_addons.losses and "image" in dir(addons)
assert addons.__name__ == "fastaccum.addons"
try:
    addons.nothing
except AttributeError as error:
    assert "nothing" in str(error)
else:
    raise AssertionError
""")


@needs_addons
@pytest.mark.slow
def test_who_asks_for_every_name_leaves_tf_keras_alone():
    succeeds("""
import inspect, pydoc
import fastaccum as fa
assert "class Trainer" in pydoc.render_doc(fa, renderer=pydoc.plaintext)
inspect.getmembers(fa)
from fastaccum import *
import keras, tensorflow as tf
assert tf.keras.Model is keras.Model and Trainer is fa.Trainer
assert "fastaccum.addons" not in sys.modules and "TF_USE_LEGACY_KERAS" not in os.environ
assert fa.addons.__name__ == "fastaccum.addons" and "addons" in dir(fa)
""")


@needs_addons
@pytest.mark.slow
def test_keras_3_goes_on_beside_it(tmp_path):
    """A Keras 3 model made before, trained, saved and loaded after; tf.keras is tf_keras in every
    spelling.
    """
    succeeds(f"""
import keras, numpy as np, tensorflow as tf
def make():
    layers = [keras.layers.Dense(4, "relu"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile("adam", "mse")
    return model
before = make()
import fastaccum.addons
fastaccum.addons.optimizers.LAMB(1e-3)
assert "keras.src.engine" not in sys.modules and not hasattr(keras.src, "engine")
x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
for model in (before, make()):
    model.fit(x, y, verbose=0)
    for name in ("model.keras", "model.weights.h5"):
        path = os.path.join({str(tmp_path)!r}, name)
        model.save(path) if name.endswith(".keras") else model.save_weights(path)
    loaded = keras.saving.load_model(os.path.join({str(tmp_path)!r}, "model.keras"))
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    np.testing.assert_array_equal(loaded.optimizer.iterations, model.optimizer.iterations)
    keras.models.clone_model(model)
    model.load_weights(path)
# Its MultiOptimizer takes Keras 2's backend from a name that is Keras 3's.
import tf_keras
old = tf_keras.Sequential([tf_keras.Input((3,)), tf_keras.layers.Dense(4), tf_keras.layers.Dense(1)])
sgd = tf_keras.optimizers.legacy.SGD
pairs = [(sgd(0.1), old.layers[0]), (sgd(0.2), old.layers[1])]
old.compile(fastaccum.addons.optimizers.MultiOptimizer(pairs), "mse")
old.fit(x, y, verbose=0)
from tensorflow import keras as one
import tensorflow.keras as two
from tensorflow.keras.layers import Dense
assert tf.keras.Model is one.Model is two.Model is tf_keras.Model
assert issubclass(Dense, tf_keras.layers.Layer)
assert keras.__version__.startswith("3.") and not issubclass(keras.Model, tf_keras.Model)
""")


LINE = 'import os; os.environ["TF_USE_LEGACY_KERAS"] = "1"'


@needs_addons
@pytest.mark.slow
def test_tf_keras_bound_to_keras_3_before():
    """The error says the line to add, and leaves everything as it was."""
    succeeds(f"""
import tensorflow as tf
tf.keras.Model
path, modules = list(tf.__path__), set(sys.modules)
import fastaccum.addons
for _ in range(2):
    try:
        fastaccum.addons.optimizers
    except RuntimeError as error:
        assert {LINE!r} in str(error) and "above all other imports" in str(error)
    else:
        raise AssertionError
assert tf.__path__ == path and "TF_USE_LEGACY_KERAS" not in os.environ
assert not {{"tensorflow_addons", "keras.src.engine"}} & (set(sys.modules) - modules)
""")


@needs_addons
@pytest.mark.slow
@pytest.mark.parametrize("before", ["import keras", "os.environ['TF_USE_LEGACY_KERAS'] = '0'"])
def test_tf_keras_is_bound_before_anything_is_used(before):
    """Binds tf_keras also if TensorFlow was imported before, as by Keras 3, or if the environment
    asks for Keras 3.
    """
    succeeds(f"""
{before}
import fastaccum.addons
import tensorflow as tf
from tensorflow.keras.layers import Dense
assert tf.keras.Model.__module__.startswith("tf_keras.") and Dense is tf.keras.layers.Dense
assert "tensorflow_addons" not in sys.modules and os.environ["TF_USE_LEGACY_KERAS"] == "1"
""")


@needs_addons
@pytest.mark.slow
def test_it_may_be_reloaded():
    """Reloads the module, as notebooks do that load changed modules again."""
    succeeds("""
import importlib
import fastaccum.addons
for _ in range(2):
    importlib.reload(fastaccum.addons)
assert sum(getattr(finder, "__module__", "") == "fastaccum.addons" for finder in sys.meta_path) == 1
import tensorflow_addons
assert importlib.reload(fastaccum.addons).optimizers is tensorflow_addons.optimizers
""")


@needs_addons
@pytest.mark.slow
def test_tf_keras_bound_by_an_import():
    code = """
from tensorflow.keras.layers import Dense
import fastaccum.addons
fastaccum.addons.optimizers
"""
    assert "RuntimeError: tensorflow-addons needs tf_keras" in run(code).stderr
    succeeds(LINE + code)


@needs_addons
def test_not_installed():
    """Each package hidden from the import system, as on a machine without it."""
    succeeds("""
from importlib.machinery import PathFinder
class Without(PathFinder):
    hidden = None
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] == cls.hidden else PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Without
import fastaccum.addons
for Without.hidden in ("tensorflow_addons", "tf_keras"):
    try:
        import tensorflow_addons
    except ImportError as error:
        assert Without.hidden.replace("_", "-") in str(error) and "pip install 'fastaccum[addons]'" in str(error)
    else:
        raise AssertionError
""")


def test_where_its_wheels_end():
    from fastaccum.addons import _not_installed

    assert "3.11" not in _not_installed("tensorflow_addons", (3, 11))
    text = _not_installed("tensorflow_addons", (3, 12))
    assert (
        "last release is for Python 3.11. This is Python 3.12. Use" in text
        and "keras.optimizers.Lamb" in text
    )


@needs_addons
def test_the_guide_names_what_needs_a_compiled_operation():
    image, layers, text = fa.addons.image, fa.addons.layers, fa.addons.text
    grid = tf.zeros([1, 4, 4, 1])
    calls = {
        "text.parse_time": lambda: text.parse_time("2026", "%Y", "SECOND"),
        "text.skip_gram_sample": lambda: text.skip_gram_sample(tf.constant(["a", "b"])),
        "image.resampler": lambda: image.resampler(grid, tf.zeros([1, 2])),
        "image.connected_components": lambda: image.connected_components(grid[0, :, :, 0]),
        "image.euclidean_dist_transform": lambda: image.euclidean_dist_transform(
            tf.zeros([4, 4, 1], tf.uint8)
        ),
        "layers.EmbeddingBag": lambda: layers.EmbeddingBag(4, 4)(tf.zeros([2, 2], tf.int32)),
        "layers.CorrelationCost": lambda: layers.CorrelationCost(1, 1, 1, 1, 1, "channels_last")(
            [grid, grid]
        ),
    }
    assert set(re.findall(r"^\| `tfa\.(\S+)` \|", PAGE.read_text(), re.MULTILINE)) == set(calls)
    for call in calls.values():
        with pytest.raises(
            NotImplementedError, match=r"\w+\.so was compiled .* see docs/guides/addons\.md"
        ):
            call()
    # written in Python, too
    assert image.adjust_hsv_in_yiq(tf.zeros([4, 4, 3]), 0.1).shape == (4, 4, 3)


@needs_addons
@pytest.mark.parametrize(
    "name", ["triplet_semihard_loss", pytest.param("lifted_struct_loss", marks=pytest.mark.slow)]
)
def test_losses_become_part_of_the_graph_that_calls_them(name):
    """Inlines losses: a tensor that a tf.function passes to its gradient is no constant for XLA,
    which would compile each step anew.
    """
    loss = getattr(fa.addons.losses, name)
    labels = tf.constant([0, 1, 0, 1])
    rows = tf.constant([[1.0, 2, 3], [2, 1, 0], [1, 0, 1], [0, 1, 2]])
    traced = tf.function(lambda: loss(labels, rows)).get_concrete_function()
    assert not [op.name for op in traced.graph.get_operations() if "PartitionedCall" in op.type]
    np.testing.assert_allclose(traced(), loss(labels, rows), rtol=1e-6)


@needs_addons
def test_averages_are_swapped_in_for_an_evaluation():
    """SWA's are the weights until its averages begin; a Keras 3 model's can be kept."""
    import tf_keras

    x = np.ones((8, 2), "float32")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    inner = tf_keras.optimizers.legacy.SGD(0.01)
    swa = fa.addons.optimizers.SWA(inner, start_averaging=2, average_period=1)
    trainer = fa.Trainer(model, swa, "mse", gradient_accumulation_steps=2)
    swap, weights = keras.callbacks.SwapEMAWeights(), []
    for _ in range(2):
        history = trainer.fit(
            x, x[:, :1], batch_size=2, verbose=0, validation_data=(x, x[:, :1]), callbacks=[swap]
        )
        weights.append(model.get_weights()[0])
        plain = trainer.evaluate(x, x[:, :1], verbose=0)
        averaged = trainer.evaluate(x, x[:, :1], verbose=0, callbacks=[swap])
        assert history.history["val_loss"] == pytest.approx([averaged], rel=1e-5)
        assert (averaged == pytest.approx(plain, rel=1e-5)) == (len(weights) == 1)
        np.testing.assert_allclose(model.get_weights()[0], weights[-1], rtol=1e-5)
    swa.assign_average_vars(model.trainable_variables)
    assert trainer.evaluate(x, x[:, :1], verbose=0) == pytest.approx(averaged, rel=1e-5)


def test_keras_has_what_the_guide_says():
    names = set(re.findall(r"`keras\.([\w.]+)", PAGE.read_text()))
    assert len(names) > 15
    for name in names:
        functools.reduce(getattr, name.split("."), keras)
