"""tensorflow-addons as `fastaccum.addons`: imported when used, beside a Keras 3 that goes on as before."""

import os
import subprocess
import sys

PROLOGUE = "import os; os.environ['TF_CPP_MIN_LOG_LEVEL'] = '2'; import sys\n"


def run(code):
    """Runs a program of its own, since `tf.keras` is bound once in a process."""
    env = {k: v for k, v in os.environ.items() if k != "TF_USE_LEGACY_KERAS"}
    command = [sys.executable, "-c", PROLOGUE + code]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)


def succeeds(code):
    result = run(code)
    assert result.returncode == 0, result.stderr


def test_nothing_is_imported_before_it_is_used():
    succeeds("""
import fastaccum.addons as addons
assert not hasattr(addons, "__wrapped__")
assert "tensorflow_addons" not in sys.modules and "tf_keras" not in sys.modules
import warnings
warnings.simplefilter("error")
warnings.filterwarnings("ignore", category=DeprecationWarning)
from fastaccum.addons import optimizers
import tensorflow_addons
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


def test_keras_3_goes_on_beside_it(tmp_path):
    """A Keras 3 model made before, trained, saved and loaded after; tf.keras is tf_keras in every spelling."""
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
        assert {LINE!r} in str(error) and "before `import tensorflow`" in str(error)
    else:
        raise AssertionError
assert tf.__path__ == path and "TF_USE_LEGACY_KERAS" not in os.environ
assert not {{"tensorflow_addons", "keras.src.engine"}} & (set(sys.modules) - modules)
""")


def test_tf_keras_bound_by_an_import():
    code = """
from tensorflow.keras.layers import Dense
import fastaccum.addons
fastaccum.addons.optimizers
"""
    assert "RuntimeError: tensorflow-addons needs tf_keras" in run(code).stderr
    succeeds(LINE + code)


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
        fastaccum.addons.optimizers
    except ImportError as error:
        assert Without.hidden.replace("_", "-") in str(error) and "pip install fastaccum[addons]" in str(error)
    else:
        raise AssertionError
""")


def test_where_its_wheels_end():
    from fastaccum.addons import _not_installed

    assert "3.11" not in _not_installed("tensorflow_addons", (3, 11))
    assert "This is Python 3.12, and the wheels of tensorflow-addons end at 3.11" in _not_installed(
        "tensorflow_addons", (3, 12)
    )
