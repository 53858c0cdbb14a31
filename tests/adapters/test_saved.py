"""A process that has imported nothing of fastaccum but `fastaccum` itself loads the models that it wrote."""

from __future__ import annotations

import importlib
import subprocess
import sys

import keras
import numpy as np
import pytest

import fastaccum as fa
from fastaccum.adapters import saved

MODELS = {"unrolled": {"positions": "learned", "tied": True}, "stacked": {"stacked": True}}
LOAD = """
import sys
{imports}
assert "fastaccum.transformer" not in sys.modules
from pathlib import Path
import numpy as np
for path in map(Path, sys.argv[1:]):
    model = keras.saving.load_model(path)
    np.save(path.with_suffix(".npy"), model(np.arange(8)[None]))
    print(model.loss.name, *[type(layer).__name__ for layer in model.layers])
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("models"), {}
    for name, options in MODELS.items():
        model = fa.gpt(width=16, layers=2, heads=2, context=8, dtype="mixed_float16", **options)
        fa.kernels.fp32_weight_gradients(model)
        model.compile(loss=fa.LinearCrossEntropy())
        made[folder / f"{name}.keras"] = model
        model.save(folder / f"{name}.keras")
    return made


@pytest.mark.faults
@pytest.mark.parametrize(
    "imports",
    [
        "import keras, fastaccum",
        "import fastaccum; assert not {'keras', 'tensorflow'} & {*sys.modules}\nimport importlib.util\n"
        "assert importlib.util.find_spec('keras')\nimport keras",
    ],
    ids=["keras first", "fastaccum first"],
)
def test_a_new_process_loads_what_was_saved(models, imports):
    done = subprocess.run([sys.executable, "-c", LOAD.format(imports=imports), *models], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        " ".join(["linear_cross_entropy", *(type(layer).__name__ for layer in model.layers)])
        for model in models.values()
    ]
    for path, model in models.items():
        np.testing.assert_array_equal(np.load(path.with_suffix(".npy")), model(np.arange(8)[None]))


def test_every_registered_layer_has_its_stand_in():
    registered = {
        (layer.__module__, layer.__name__)
        for module in saved.LAYERS
        for layer in vars(importlib.import_module(module)).values()
        if isinstance(layer, type) and keras.saving.get_registered_name(layer).startswith("fastaccum>")
    }
    assert registered == {(module, name) for module, names in saved.LAYERS.items() for name in names}
    names = [name for name in keras.saving.get_custom_objects() if name.startswith("fastaccum>")]
    assert len(names) == len(registered)
