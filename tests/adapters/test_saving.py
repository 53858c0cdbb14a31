"""A process that has imported nothing of fastaccum but `fastaccum` itself loads the models that it
wrote.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest

import fastaccum as fa
from fastaccum.adapters import saving

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


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        "import keras, fastaccum",
        "import fastaccum; assert not {'keras', 'tensorflow'} & {*sys.modules}\nimport "
        "importlib.util\nassert importlib.util.find_spec('keras')\nimport keras",
    ],
    ids=["keras first", "fastaccum first"],
)
def test_a_new_process_loads_what_was_saved(models, imports):
    done = subprocess.run(
        [sys.executable, "-c", LOAD.format(imports=imports), *models],
        capture_output=True,
        text=True,
    )
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
        for module in saving.LAYERS
        for layer in vars(importlib.import_module(module)).values()
        if isinstance(layer, type)
        and keras.saving.get_registered_name(layer).startswith("fastaccum>")
    }
    assert registered == {
        (module, name) for module, names in saving.LAYERS.items() for name in names
    }
    names = [name for name in keras.saving.get_custom_objects() if name.startswith("fastaccum>")]
    assert len(names) == len(registered)


@keras.saving.register_keras_serializable("test_saving")
class Inner(keras.layers.Layer):
    """A layer whose own layer gets LoRA, of which its configuration says nothing."""

    def __init__(self, **options):
        super().__init__(**options)
        self.dense = keras.layers.Dense(4)

    def call(self, inputs):
        return self.dense(inputs)


X, Y = np.ones((8, 3), "float32"), np.ones((8, 4), "float32")


def trained(layer, lora=None):
    """A model, trained for two steps with LoRA in the layer `lora`."""
    model = keras.Sequential([keras.Input((3,)), layer])
    if lora is not None:
        lora.enable_lora(2)
    fa.Trainer(model, keras.optimizers.Adam(0.1), "mse", jit_compile=False).fit(
        X, Y, epochs=2, verbose=0
    )
    return model


def warned(train):
    """The warnings of fastaccum's, whose line is that of the caller."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train()
    return [
        str(w.message) for w in caught if w.category is RuntimeWarning and w.filename == __file__
    ]


def test_a_loaded_optimizer_that_lost_its_state_with_lora_is_warned_of(tmp_path):
    """Warns of a lost state, and not of an optimizer that has its state."""
    for lora in (True, False):
        layer = Inner()
        model = trained(layer, layer.dense if lora else None)
        model.save(tmp_path / "model.keras")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # Keras's own, while it loads
            loaded = keras.saving.load_model(tmp_path / "model.keras")
        said = warned(lambda loaded=loaded: fa.Trainer(loaded, loaded.optimizer))
        assert len(said) == lora and all(
            "optimizer=Adam starts without its saved state" in each for each in said
        )
        assert (len(loaded.trainable_variables), int(loaded.optimizer.iterations)) == (
            2,
            0 if lora else 2,
        )
        np.testing.assert_allclose(
            loaded.predict(X, verbose=0), model.predict(X, verbose=0), rtol=1e-5
        )


def test_more_weights_to_train_than_the_file_has_state_of_are_warned_of(tmp_path):
    """Warns of a model with LoRA on one of several layers, whose file lacks state for the others."""
    layers = [Inner() for _ in range(3)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    for layer in layers[:2]:
        layer.dense.trainable = False
    layers[2].dense.enable_lora(2)
    fa.Trainer(model, keras.optimizers.Adam(0.1), "mse", jit_compile=False).fit(
        X, Y, epochs=1, verbose=0
    )
    model.save(tmp_path / "model.keras")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Keras's own, while it loads
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert len(loaded.trainable_variables) > len(model.trainable_variables)
    (said,) = warned(lambda: fa.Trainer(loaded, loaded.optimizer))
    assert "starts without its saved state" in said


@pytest.mark.parametrize("how", ["load_model", "load_weights"])
def test_lora_that_keras_has_merged_is_warned_of(tmp_path, how):
    """Warns that both matrices are zero, so neither is trained. With new values they are trained."""
    layer = keras.layers.Dense(4, use_bias=False, name="only")
    model = trained(layer, layer)
    trainer = fa.Trainer(model, "sgd", "mse", jit_compile=False)
    assert warned(lambda: trainer.fit(X, Y, verbose=0)) == []
    if how == "load_model":
        model.save(tmp_path / "model.keras")
        model = keras.saving.load_model(tmp_path / "model.keras")
        trainer = fa.Trainer(model, "sgd", "mse", jit_compile=False)
    else:
        model.save_weights(tmp_path / "model.weights.h5")
        model.load_weights(tmp_path / "model.weights.h5")
    before = model.get_weights()
    (said,) = warned(lambda: trainer.fit(X, Y, verbose=0))
    assert "matrices of only are all 0" in said
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)
    model.layers[0].lora_kernel_a.assign(np.ones((3, 2)))
    assert warned(lambda: trainer.fit(X, Y, verbose=0)) == []
    assert model.layers[0].lora_kernel_b.numpy().any()


def test_keras_table_of_saved_layers_can_be_a_set():
    # which KerasHub makes of it to save a preset
    assert set(keras.saving.get_custom_objects().values())
