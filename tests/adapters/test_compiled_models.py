"""A Trainer of a model that is compiled already trains it with what it was compiled with."""

import keras
import numpy as np
import pytest

import fastaccum as fa

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 5)).astype("float32")
Y = RNG.normal(size=(16, 3)).astype("float32")


def make(K=keras, dtype="float32"):
    K.utils.set_random_seed(1)
    return K.Sequential([K.Input((5,)), K.layers.Dense(3, dtype=dtype)])


def fit(side, rows, epochs=2):
    side.fit(X, Y, batch_size=rows, epochs=epochs, shuffle=False, verbose=0)


@pytest.mark.parametrize("package", ["keras", "tf_keras"])
def test_the_compiled_optimizer_trains_on_with_its_state(package):
    K = pytest.importorskip(package)
    theirs, ours = make(K), make(K)
    for model in (theirs, ours):
        model.compile(K.optimizers.Adam(0.05), "mse")
        fit(model, 8)
    fit(theirs, 8)
    trainer = fa.Trainer(ours, gradient_accumulation_steps=2, jit_compile=False)
    assert trainer.optimizer is ours.optimizer
    fit(trainer, 4)
    assert int(ours.optimizer.iterations) == int(theirs.optimizer.iterations) == 8
    for own, each in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(own, each, atol=1e-6)


def test_under_mixed_float16_it_is_the_one_that_compile_wrapped():
    before, sgd = keras.config.dtype_policy(), keras.optimizers.SGD(0.1)
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = make(dtype=None)
        model.compile(sgd, "mse")
    finally:
        keras.config.set_dtype_policy(before)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert fa.Trainer(model, jit_compile=False).optimizer is sgd


def test_with_a_loss_or_without_a_compilation_it_is_adamw():
    compiled = make()
    compiled.compile("sgd", "mse")
    for trainer in (fa.Trainer(compiled, loss="mae"), fa.Trainer(make(), loss="mse")):
        assert type(trainer.optimizer) is keras.optimizers.AdamW


def test_a_compiled_optimizer_that_accumulates_itself_is_refused():
    model = make()
    model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=4), "mse")
    with pytest.raises(
        ValueError,
        match=r"gradient_accumulation_steps=4.*pass Trainer\(gradient_accumulation_steps=4",
    ):
        fa.Trainer(model)
