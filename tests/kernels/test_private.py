"""Private names: found at old and new places; the import of fastaccum needs none of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fastaccum.kernels import private

# Imports TensorFlow, Keras and tf_keras once; then, for each name in a fork, hides it at all of its
# places and imports every public name of fastaccum. A fork that fails prints the name.
WITHOUT_EACH = """
import importlib, importlib.util, os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras, tensorflow as tf, numpy as np

class Hidden(importlib.abc.MetaPathFinder):
    def __init__(self, name):
        self.name = name
    def find_spec(self, name, path=None, target=None):
        if name == self.name:
            raise ImportError(name + " is hidden")

def hide(place):
    module, _, name = place.partition(":")
    if name:
        try:
            owner = importlib.import_module(module)
        except ImportError:
            return
        *path, last = name.split(".")
        for part in path:
            owner = getattr(owner, part, None)
        if owner is not None and last in vars(owner):
            delattr(owner, last)
        return
    sys.meta_path.insert(0, Hidden(module))
    parent, _, last = module.rpartition(".")
    if sys.modules.pop(module, None) is not None and hasattr(sys.modules.get(parent), last):
        delattr(sys.modules[parent], last)

def import_all():
    import fastaccum
    for name in fastaccum.__all__ if hasattr(fastaccum, "__all__") else dir(fastaccum):
        getattr(fastaccum, name)
    for name in dir(fastaccum.kernels):
        getattr(fastaccum.kernels, name)
    return fastaccum

def try_without(name, places):
    hidden = os.fork()
    if hidden:
        return os.waitstatus_to_exitcode(os.waitpid(hidden, 0)[1])
    code = 1
    try:
        for place in places:
            hide(place)
        import_all()
        from fastaccum.kernels import private
        assert not private.has(name), "it is still found"
        code = 0
    except BaseException as error:
        print(f"{name}: {type(error).__name__}: {error}", flush=True)
    finally:
        os._exit(code)

path = sys.argv[1]
loaded = importlib.util.spec_from_file_location("names", path)
names = importlib.util.module_from_spec(loaded)
loaded.loader.exec_module(names)
assert "fastaccum" not in sys.modules
failed = [name for name, place in names.PLACES.items() if try_without(name, place.places)]
print("tried", len(names.PLACES), "failed", failed)
sys.exit(bool(failed))
"""


def test_the_import_needs_no_private_name(tmp_path):
    command = [sys.executable, "-c", WITHOUT_EACH, private.__file__]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert f"tried {len(private.PLACES)} failed []" in result.stdout


def test_the_installed_releases_have_every_name_but_tf_keras_s():
    absent = private.missing()
    assert not [name for name in absent if not name.startswith("tf_keras")]


def test_a_place_is_found_at_the_first_that_has_it():
    place = private.Place(
        ("tensorflow.nowhere:gone", "math:nothing", "math:tau", "math:pi"), "", ""
    )
    assert place.find() == pytest.approx(6.283185)
    assert private.Place(("math:nothing",), "", "").find() is None


def test_what_is_missing_is_named(monkeypatch):
    gone = private.Place(("tensorflow.python.gone",), "reading a plan", "the plan")
    monkeypatch.setitem(private.PLACES, "gone", gone)
    assert not private.has("gone")
    with pytest.raises(
        private.MissingName,
        match=r"tensorflow\.python\.gone.*reading a plan.*Off without it: the plan",
    ):
        _ = private.gone
    with pytest.raises(AttributeError, match="no attribute 'never_declared'"):
        _ = private.never_declared


def test_an_attribute_that_is_missing_is_named():
    class Layer:
        pass

    with pytest.raises(
        private.MissingName, match="Layer has no _seed_generators, which is needed for: the seeds"
    ):
        private.seed_generators(Layer())
    with pytest.raises(private.MissingName, match="Layer has no _flatten_layers"):
        private.flatten_layers(Layer())
    assert private.seed_generators(Layer(), None) is None
