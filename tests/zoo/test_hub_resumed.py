"""KerasHub's models whose training goes on: in a second process, and after LoRA was saved and
loaded.
"""

import pathlib
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest

import fastaccum as fa

hub = pytest.importorskip("keras_hub").models
pytestmark = pytest.mark.zoo

LENGTH, ROWS = 6, 8
SIZES = {"vocabulary_size": 23, "num_layers": 2, "hidden_dim": 16, "intermediate_dim": 24}
HEADS, GROUPED = (
    {"num_heads": 2, "max_sequence_length": LENGTH},
    {"num_query_heads": 4, "num_key_value_heads": 2},
)

BACKBONES = {  # with their dropout
    "GPT-2": lambda: hub.GPT2CausalLM(hub.GPT2Backbone(**SIZES, **HEADS)),
    "Gemma": lambda: hub.GemmaCausalLM(hub.GemmaBackbone(**SIZES, **GROUPED, head_dim=4)),
    "Llama": lambda: hub.LlamaCausalLM(hub.LlamaBackbone(**SIZES, **GROUPED)),
    "Llama 3": lambda: hub.Llama3CausalLM(hub.Llama3Backbone(**SIZES, **GROUPED)),
    "BERT": lambda: hub.BertTextClassifier(hub.BertBackbone(**SIZES, **HEADS), 3),
    "ViT": lambda: hub.ViTImageClassifier(
        hub.ViTBackbone(
            (32, 32, 3), patch_size=16, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=24
        ),
        3,
    ),
}


def made(name):
    """A model and its data."""
    keras.utils.set_random_seed(0)
    rng, model = np.random.default_rng(0), BACKBONES[name]()
    if name == "ViT":
        return model, rng.normal(size=(ROWS, 32, 32, 3)).astype("float32"), np.arange(ROWS) % 3
    ids = rng.integers(1, 23, (ROWS, LENGTH))
    x = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    return (
        (model, x | {"segment_ids": 0 * ids}, np.arange(ROWS) % 3)
        if name == "BERT"
        else (model, x, ids)
    )


def fit(model, x, y, epochs, **options):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trainer = fa.Trainer(
        model, keras.optimizers.Adam(1e-2), loss, gradient_accumulation_steps=2, jit_compile=False
    )
    trainer.fit(x, y, batch_size=2, epochs=epochs, verbose=0, **options)


def train(name, epochs, folder=None):
    model, x, y = made(name)
    fit(model, x, y, epochs, checkpoint_dir=folder and pathlib.Path(folder) / name)
    return model.get_weights()


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """The weights of all models after two epochs, one in each of two processes."""
    folder = tmp_path_factory.mktemp("resumed")
    for epochs in ("1", "2"):
        subprocess.run([sys.executable, __file__, folder, epochs], check=True)
    return folder


@pytest.mark.parametrize("name", BACKBONES)
def test_a_training_goes_on_in_a_second_process(resumed, name):
    found = np.load(resumed / f"{name}.npz")
    for got, wanted in zip(found.values(), train(name, epochs=2), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("name", ["GPT-2", "Gemma", "Llama", "BERT"])
def test_lora_goes_on_after_it_was_saved(tmp_path, name):
    model, x, y = made(name)
    model.backbone.enable_lora(rank=2)
    fit(model, x, y, epochs=1)
    trained = [v.path for v in model.trainable_variables]
    model.save(tmp_path / "lora.keras")
    with pytest.warns(RuntimeWarning, match="starts without its saved state"):
        fa.Trainer(loaded := keras.saving.load_model(tmp_path / "lora.keras"), loaded.optimizer)
    np.testing.assert_allclose(
        loaded.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-4, atol=1e-5
    )
    loaded.backbone.enable_lora(rank=2)
    assert [v.path for v in loaded.trainable_variables] == trained
    before = {v.path: v.numpy() for v in loaded.weights}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(loaded, x, y, epochs=1)
    moved = {v.path for v in loaded.weights if not np.array_equal(v, before[v.path])}
    assert moved == set(trained) and any("lora" in path for path in moved)


if __name__ == "__main__":
    for name in BACKBONES:
        np.savez(f"{sys.argv[1]}/{name}.npz", *train(name, int(sys.argv[2]), sys.argv[1]))
