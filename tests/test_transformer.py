import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa
from fastaccum import transformer
from fastaccum.transformer import PRESETS, gpt

pytestmark = pytest.mark.long

VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS = 61, 12, 24, 2, 3


def small(**kwargs):
    sizes = {"context": CONTEXT, "width": WIDTH, "layers": LAYERS, "heads": HEADS, **kwargs}
    return gpt(VOCABULARY, **sizes)


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(3)
    return small()


@pytest.fixture(scope="module")
def ids_BT():
    return np.random.default_rng(3).integers(0, VOCABULARY, (2, CONTEXT)).astype("int32")


def test_maps_ids_to_float32_logits(model, ids_BT):
    logits_BTV = model(ids_BT)
    assert logits_BTV.shape == (2, CONTEXT, VOCABULARY)
    assert logits_BTV.dtype == tf.float32
    assert np.isfinite(logits_BTV).all()


def test_starts_near_the_uniform_guess(model, ids_BT):
    loss = keras.losses.sparse_categorical_crossentropy(ids_BT, model(ids_BT), from_logits=True)
    assert np.mean(loss) == pytest.approx(np.log(VOCABULARY), rel=0.15)


def test_takes_fewer_positions_than_its_context(model, ids_BT):
    whole, part = model(ids_BT), model(ids_BT[:, :5])
    np.testing.assert_allclose(whole[:, :5], part, atol=2e-6)


@pytest.mark.parametrize("jit_compile", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("dtype", ["float32", "mixed_float16"])
@pytest.mark.parametrize("changed", [pytest.param(1, marks=pytest.mark.slow), CONTEXT - 1])
def test_a_later_token_leaves_earlier_logits_bit_equal(ids_BT, dtype, jit_compile, changed):
    forward = tf.function(small(dtype=dtype), jit_compile=jit_compile)
    other_BT = ids_BT.copy()
    other_BT[:, changed] = (other_BT[:, changed] + 1) % VOCABULARY
    before, after = forward(tf.constant(ids_BT)).numpy(), forward(tf.constant(other_BT)).numpy()
    np.testing.assert_array_equal(before[:, :changed], after[:, :changed])
    assert (before[:, changed:] != after[:, changed:]).any(axis=-1).all()


def test_positions_matter(model):
    """Without positions, attention would not see which of two earlier tokens came first."""
    first, second = model(np.array([[1, 2, 3, 4]])), model(np.array([[2, 1, 3, 4]]))
    assert np.abs(first[:, -1] - second[:, -1]).max() > 1e-3


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("how", ["argument", "global"])
def test_mixed_precision_computes_in_16_bits_and_keeps_float32_weights(model, ids_BT, policy, how):
    previous = keras.config.dtype_policy()
    try:
        if how == "global":
            keras.config.set_dtype_policy(policy)
        mixed = small(dtype=policy if how == "argument" else None)
    finally:
        keras.config.set_dtype_policy(previous)
    mixed.set_weights(model.get_weights())
    layers = [layer for layer in mixed._flatten_layers(include_self=False) if layer.weights]
    computed = {layer.name: layer.compute_dtype for layer in layers}
    assert computed.pop("head") == "float32"
    assert set(computed.values()) == {policy.removeprefix("mixed_")}
    assert {variable.dtype for variable in mixed.trainable_variables} == {"float32"}
    logits_BTV = mixed(ids_BT)
    assert logits_BTV.dtype == tf.float32
    tolerance = 0.01 if policy == "mixed_float16" else 0.08
    np.testing.assert_allclose(logits_BTV, model(ids_BT), atol=tolerance)


def test_large_activations_stay_finite_in_mixed_float16(ids_BT):
    """Queries and keys of about 200: their unscaled product over 64 terms would pass 65504."""
    model = small(width=128, heads=2, layers=1, dtype="mixed_float16")
    qkv = model.get_layer("block_0").attention.qkv
    kernel = np.full(qkv.kernel.shape, 0.0, "float32")
    kernel[:, : 2 * 128] = np.tile(np.eye(128, dtype="float32"), 2) * 70.0
    qkv.kernel.assign(kernel)
    assert np.isfinite(model(ids_BT)).all()


@pytest.mark.parametrize("dtype", ["float32", "mixed_float16"])
def test_saves_and_loads(tmp_path, ids_BT, dtype):
    model = small(dtype=dtype)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(model(ids_BT), loaded(ids_BT))
    assert (
        loaded.get_layer("block_1").attention.qkv.compute_dtype
        == model.get_layer("block_1").compute_dtype
    )
    with pytest.raises(ValueError, match=f"{CONTEXT + 1} positions"):
        loaded(np.zeros((1, CONTEXT + 1), "int32"))


def test_trains_in_one_xla_program(ids_BT):
    keras.utils.set_random_seed(5)
    model = small()
    model.compile(
        "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=True
    )
    x, y = ids_BT[:, :-1], ids_BT[:, 1:]
    model.optimizer.learning_rate = 1e-2
    losses = [model.train_on_batch(x, y) for _ in range(30)]
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize(("vocabulary", "width", "layers"), [(256, 24, 1), (61, 48, 3)])
def test_parameter_count(vocabulary, width, layers):
    model = gpt(vocabulary, width=width, layers=layers, heads=3)
    assert (
        model.count_params()
        == 2 * vocabulary * width + layers * (12 * width**2 + 2 * width) + width
    )


def test_the_seed_fixes_the_initial_weights():
    def weights(seed):
        keras.utils.set_random_seed(seed)
        return small().get_weights()

    for a, b in zip(weights(1), weights(1), strict=True):
        np.testing.assert_array_equal(a, b)
    assert any((a != b).any() for a, b in zip(weights(1), weights(2), strict=True))


def test_sizes_override_the_preset():
    model = gpt(preset="nano", width=16, layers=1)
    assert model.get_layer("embedding").output_dim == 16
    assert model.get_layer("context").context == PRESETS["nano"]["context"]
    assert model.get_layer("block_0").heads == PRESETS["nano"]["heads"]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"width": 10, "heads": 4}, r"width=10.*heads=8"),
        ({"width": 12, "heads": 4}, r"width=12.*heads=8"),
        ({"layers": 0}, "layers=0"),
        ({"width": -8}, "width=-8"),
        ({"heads": 2.5}, "heads=2.5"),
        ({"vocabulary_size": 0}, "vocabulary_size=0"),
        ({"vocabulary_size": "nano"}, r"did you mean preset='nano'\?"),
        ({"preset": "giant"}, r"preset='giant'.*nano"),
        ({"preset": ["nano"]}, r"preset=\['nano'\]"),
        ({"dtype": "float64"}, "dtype='float64'"),
        ({"positions": "absolute"}, r"positions='absolute'.*learned"),
        ({"positions": "learned", "width": 10, "heads": 4}, r"width=10.*heads=4"),
        ({"heads": 4, "key_value_heads": 3}, r"heads=4.*key_value_heads=3"),
        ({"key_value_heads": 0}, "key_value_heads=0"),
        ({"dtype": "int8"}, "dtype.*int8"),
        ({"dtype": ()}, "dtype: Cannot interpret"),
        ({"name": "a/b"}, "name='a/b' must be a printable string"),
        ({"name": "\ud800"}, "name='.*' must be a printable string"),
    ],
)
def test_bad_sizes_name_the_value(sizes, message):
    with pytest.raises(ValueError, match=message):
        gpt(**sizes)


def test_more_positions_than_the_context_are_refused(model):
    with pytest.raises(ValueError, match=rf"{CONTEXT + 1} positions.*context={CONTEXT}"):
        model(np.zeros((1, CONTEXT + 1), "int32"))


FORMS = {
    "grouped": {"heads": 4, "key_value_heads": 2, "layers": 1},
    "learned positions": {"positions": "learned", "layers": 1},
    "tied": {"tied": True, "layers": 1},
    "stacked": {"stacked": True},
    "all": {
        "heads": 4,
        "key_value_heads": 1,
        "positions": "learned",
        "tied": True,
        "stacked": True,
    },
}


@pytest.mark.parametrize(
    "form",
    [form if form == "all" else pytest.param(form, marks=pytest.mark.slow) for form in FORMS],
)
def test_every_form_is_causal_trains_saves_and_loads(tmp_path, ids_BT, form):
    keras.utils.set_random_seed(7)
    model = small(dtype="mixed_float16", **FORMS[form])
    logits_BTV = model(ids_BT)[:, :-1]
    loss = keras.losses.sparse_categorical_crossentropy(ids_BT[:, 1:], logits_BTV, from_logits=True)
    assert np.mean(loss) == pytest.approx(np.log(VOCABULARY), rel=0.15)
    other_BT = ids_BT.copy()
    other_BT[:, -1] = (other_BT[:, -1] + 1) % VOCABULARY
    before, after = model(ids_BT), model(other_BT)
    np.testing.assert_array_equal(before[:, :-1], after[:, :-1])
    assert np.abs(before[:, -1] - after[:, -1]).max() > 1e-3
    options = {"gradient_accumulation_steps": 2, "jit_compile": form == "all"}
    trainer = fa.Trainer(model, keras.optimizers.Adam(0.01), fa.LinearCrossEntropy(), **options)
    history = trainer.fit(ids_BT[:, :-1], ids_BT[:, 1:], batch_size=1, epochs=30, verbose=0)
    assert history.history["loss"][-1] < 0.2 * history.history["loss"][0]
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(model(ids_BT), loaded(ids_BT))
    assert loaded.count_params() == model.count_params()


def test_parameters_of_grouped_and_tied():
    width, groups = 24, 2 / 4
    grouped = gpt(
        VOCABULARY, width=width, layers=1, heads=4, key_value_heads=2, tied=True, context=8
    )
    block = width * width * (1 + 2 * groups) + 9 * width**2 + 2 * width
    assert grouped.count_params() == VOCABULARY * width + block + width


def test_a_stack_of_blocks_computes_what_the_blocks_do(ids_BT):
    stacked, plain = small(stacked=True), small()
    for i, layer in enumerate(stacked.get_layer("blocks").unstack()):
        plain.get_layer(f"block_{i}").set_weights(layer.get_weights())
    for name in ("embedding", "final_norm", "head"):
        plain.get_layer(name).set_weights(stacked.get_layer(name).get_weights())
    np.testing.assert_allclose(plain(ids_BT), stacked(ids_BT), atol=1e-5)


@pytest.mark.parametrize(("preset", "millions"), [("124m", 124), ("350m", 354), ("1.3b", 1311)])
def test_a_preset_has_the_parameters_of_its_name(preset, millions):
    sizes = {key: value for key, value in PRESETS[preset].items() if key != "layers"}
    # One block is enough to know them all.
    one, two = (
        gpt(**{**sizes, "width": 64, "heads": 2, "context": 8, "layers": n, "stacked": False})
        for n in (1, 2)
    )
    assert two.count_params() - one.count_params() == 12 * 64**2 + 2 * 64
    width, layers = PRESETS[preset]["width"], PRESETS[preset]["layers"]
    assert round((50257 * width + layers * (12 * width**2 + 2 * width) + width) / 1e6) == millions


@pytest.mark.parametrize("gpu", [False, True])
def test_positions_turn_pairs_of_halves_by_their_angles(gpu, monkeypatch):
    monkeypatch.setattr(transformer, "has_gpu", lambda: gpu)
    time, width = 5, 8
    x = np.random.default_rng(0).normal(size=(2, time, 3, width)).astype("float32")
    angles = np.arange(time)[:, None, None] * 10000.0 ** (-np.arange(width // 2) / (width // 2))
    turned = (x[..., : width // 2] + 1j * x[..., width // 2 :]) * np.exp(1j * angles)
    cos, sin = transformer._rotary(time, width, False), transformer._rotary(time, width, True)
    got = transformer._rotate(tf.constant(x), cos, sin)
    np.testing.assert_allclose(got, np.concatenate([turned.real, turned.imag], -1), atol=1e-6)
