"""`fa.remat`: what its blocks are, and that training with it is training without."""

import copy
import functools
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import fastaccum as fa
from fastaccum.kernels import blockwise_attention, recompute
from fastaccum.layers import attention, blocks
from fastaccum.layers.attention_masks import read_mask
from fastaccum.layers.remat import installed, recomputing

layers = keras.layers
VOCABULARY, LENGTH, WIDTH, CLASSES = 11, 6, 8, 5


class Mlp(layers.Layer):
    """A block of one's own: normalised, gated by dropout, with a loss and a step that it counts."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm, self.inner, self.drop = (
            layers.LayerNormalization(),
            layers.Dense(2 * width, "gelu"),
            dropout(),
        )
        self.outer, self.supports_masking = layers.Dense(width), True

    def build(self, shape):
        self.calls = self.add_weight(
            shape=(), initializer="zeros", trainable=False, dtype="float32"
        )
        self.norm.build(shape)
        self.inner.build(shape)
        self.outer.build((*shape[:-1], self.inner.units))

    def call(self, x):
        self.calls.assign_add(1.0)
        y = self.outer(self.drop(self.inner(self.norm(x))))
        self.add_loss(1e-2 * tf.reduce_mean(tf.square(tf.cast(y, tf.float32))))
        return x + y


class Stage(layers.Layer):
    def __init__(self, depth):
        super().__init__()
        self.blocks, self.down = [Mlp() for _ in range(depth)], layers.Dense(WIDTH)

    def build(self, shape):
        for layer in (*self.blocks, self.down):
            layer.build(shape)

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        return self.down(x)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.embed, self.stages = layers.Embedding(VOCABULARY, WIDTH), [Stage(2), Stage(2)]
        self.head = layers.Dense(VOCABULARY)

    def call(self, ids):
        x = self.embed(ids)
        for stage in self.stages:
            x = stage(x)
        return self.head(x)


def dropout():
    return layers.Dropout(0.2, seed=3)


def attended(depth=2):
    """A flat graph of plain layers, with masks, and one Dense that two places share."""
    ids, shared = keras.Input((LENGTH,), dtype="int32"), layers.Dense(WIDTH, "tanh", name="shared")
    x = dropout()(layers.Embedding(VOCABULARY, WIDTH, mask_zero=True, name="embedding")(ids))
    for k in range(depth):
        y = layers.LayerNormalization()(x)
        x = layers.Add()(
            [x, layers.MultiHeadAttention(2, 4, dropout=0.2, seed=k)(y, y, use_causal_mask=True)]
        )
        y = layers.Dense(WIDTH)(layers.Dense(2 * WIDTH, "gelu")(layers.LayerNormalization()(x)))
        x = layers.Add()([x, shared(y)])
    return keras.Model(ids, layers.Dense(VOCABULARY, name="head")(x))


def convolved():
    """Residual connections, batch statistics, a Sequential around the graph."""
    images = keras.Input((8, 8, 3))
    x = images
    for filters in (4, 8):
        y = layers.ReLU()(
            layers.BatchNormalization()(
                layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
            )
        )
        y = layers.BatchNormalization()(layers.Conv2D(filters, 3, padding="same")(y))
        x = layers.ReLU()(layers.Add()([y, layers.Conv2D(filters, 1)(x)]))
    body = keras.Model(images, x)
    top = [layers.GlobalAveragePooling2D(), dropout(), layers.Dense(CLASSES)]
    return keras.Sequential([keras.Input((8, 8, 3)), body, *top])


def subclassed():
    model = Subclassed()
    model(np.zeros((1, LENGTH), "int32"))
    return model


def tokens():
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (8, LENGTH))
    return ids, np.roll(ids, -1, 1)


def images():
    return np.random.default_rng(0).normal(size=(8, 8, 8, 3)).astype("float32"), np.arange(
        8
    ) % CLASSES


MODELS = {
    "attended": (attended, tokens),
    "convolved": (convolved, images),
    "subclassed": (subclassed, tokens),
}


def made(make, dtype="float32"):
    before = keras.config.dtype_policy()
    try:
        keras.config.set_dtype_policy(dtype)
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        return make()
    finally:
        keras.config.set_dtype_policy(before)


def state(model):
    generators = [
        generator for layer in model._flatten_layers() for generator in layer._seed_generators
    ]
    return [v.numpy() for v in [*model.variables, *(generator.state for generator in generators)]]


def trained(model, data, **options):
    """The model's variables after two updates, their change, and the losses."""
    before, (x, y) = state(model), data()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    options = {"gradient_accumulation_steps": 2, "loss": loss} | options
    history = fa.Trainer(model, keras.optimizers.SGD(0.1), **options).fit(
        x, y, batch_size=2, verbose=0
    )
    after = state(model)
    return after, [a - b for a, b in zip(after, before, strict=True)], history.history["loss"]


def require_equal(plain, recomputed, tolerance):
    (after, moved, losses), (same, _, same_losses) = plain, recomputed
    np.testing.assert_allclose(same_losses, losses, rtol=tolerance)
    for expected, value, change in zip(after, same, moved, strict=True):
        if np.issubdtype(value.dtype, np.floating):
            np.testing.assert_allclose(
                value, expected, atol=tolerance * max(np.abs(change).max(), 1e-3), rtol=0
            )
        else:
            np.testing.assert_array_equal(value, expected)  # of seeds


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("attended", "mixed_float16", marks=[pytest.mark.slow, pytest.mark.sample]),
        pytest.param("subclassed", "float32", marks=[pytest.mark.slow, pytest.mark.sample]),
        ("convolved", "float32"),
    ],
)
def test_training_is_that_of_the_plain_model(name, dtype):
    make, data = MODELS[name]
    plain = trained(made(make, dtype), data)
    recomputed = trained(fa.remat(made(make, dtype)), data)
    require_equal(plain, recomputed, 1e-5 if dtype == "float32" else 1e-2)


def test_a_trainer_that_has_a_program_traces_it_anew():
    model, (x, y) = made(convolved), images()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trainer = fa.Trainer(model, "sgd", loss, jit_compile=True)

    def barriers():
        return trainer.compiler_ir((x[None], y[None]), "hlo").count(" opt-barrier(")

    plain = barriers()  # those of the Dropout
    fa.remat(model)
    assert barriers() > plain
    fa.remat(model, "everything_saveable")
    assert barriers() == plain
    named = model.layers[0].layers[1:3]  # a Conv2D and a BatchNormalization
    fa.remat(model, layer_names=[layer.name for layer in named])
    assert barriers() > plain
    assert len(installed(model)) == 2


@pytest.mark.parametrize(
    ("names", "dtype"),
    [(None, "float32"), (["second", "third"], "float32"), (["second", "third"], "mixed_bfloat16")],
    ids=["a graph", "layers", "layers, in mixed precision"],
)
def test_a_policy_says_what_is_kept(names, dtype):
    def make():
        own = [
            layers.Dense(64, "tanh", name=name) for name in ("first", "second", "third", "fourth")
        ]
        others = [*(layers.Dense(64, "tanh") for _ in range(4)), layers.Dense(1)]
        return keras.Sequential([keras.Input((64,)), *own, *others])

    model = made(make, dtype)
    trainer = fa.Trainer(model, "sgd", "mse", gradient_accumulation_steps=2, scan_layers=False)
    x = np.ones((2, 4, 64), "float32")
    assert blocks.find(model)[0].segments

    def products(policy):
        fa.remat(model, policy, names)
        return trainer.compiler_ir((x, x[..., :1]), "hlo").count(" dot(")

    plain, again = products(None), products("nothing_saveable")
    assert again > plain
    assert products(["projection"]) == products("auto") == plain, (
        "what is kept is not computed again"
    )
    with pytest.raises(
        ValueError, match=r"no value of a layer has the name 'projections'.*'projection'"
    ):
        products(["projections"])


LONG = 160  # tokens: two blocks of attention on a CPU, so that its loops stay loops


class Attending(layers.Layer):
    def __init__(self, rate):
        super().__init__()
        self.norm, self.supports_masking = layers.LayerNormalization(), True
        self.attention = layers.MultiHeadAttention(2, 8, dropout=rate, seed=3)

    def build(self, shape):
        self.norm.build(shape)
        self.attention.build(shape, shape)

    def call(self, x):
        y = self.norm(x)
        return x + self.attention(y, y, use_causal_mask=True)


def of_attention(policy, rate=0.0, padded=False, dtype="float32"):
    """A trainer of two blocks of fused attention, and a stack of two micro-batches of two rows."""

    def make():
        ids = keras.Input((LONG,), dtype="int32")
        x = layers.Embedding(VOCABULARY, WIDTH, mask_zero=padded)(ids)
        return keras.Model(ids, layers.Dense(VOCABULARY)(Attending(rate)(Attending(rate)(x))))

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    options = {"flash_attention": True, "jit_compile": True, "gradient_accumulation_steps": 2}
    trainer = fa.Trainer(
        fa.remat(made(make, dtype), policy), keras.optimizers.SGD(0.1), loss, **options
    )
    x = np.reshape(np.arange(4 * LONG) % VOCABULARY, (2, 2, LONG))
    return trainer, (x * (np.arange(LONG) < LONG // 2) if padded else x, x)


def stepped(*case):
    trainer, stack = of_attention(*case)
    trainer.train_step(stack)
    assert set(trainer._builder.engine.objective.attention.choices.values()) == {"fused: blockwise"}
    return state(trainer.model)


def are_equal(some, others):
    return all(np.array_equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize(
    ("rate", "padded"), [pytest.param(0.0, False, marks=pytest.mark.slow), (0.3, True)], ids=str
)
def test_attention_that_is_kept_changes_no_bit(rate, padded, monkeypatch):
    again = stepped("nothing_saveable", rate, padded)
    assert are_equal(stepped(["attention"], rate, padded), again)
    forward = recompute._Block.forward

    def spoiled(self, values):
        y, kept = forward(self, values)
        return y, [1.5 * t for t in kept]

    monkeypatch.setattr(recompute._Block, "forward", spoiled)
    assert not are_equal(stepped(["attention"], rate, padded), again), (
        "the backward pass reads what is kept"
    )


class Seen(layers.Layer):
    """Ids in, out which tokens each token sees: those before it that are no padding."""

    def call(self, ids):
        places = tf.range(LENGTH)
        return (ids != 0)[:, None] & (places[:, None] >= places)

    def compute_output_spec(self, ids):
        return keras.KerasTensor((None, LENGTH, LENGTH), "bool")


class Given(layers.Layer):
    """A block that is handed its mask."""

    def __init__(self):
        super().__init__()
        self.attention, self.inner = layers.MultiHeadAttention(2, 4), layers.Dense(WIDTH)

    def build(self, shape, *_):
        self.attention.build(shape, shape)
        self.inner.build(shape)

    def call(self, x, seen=None):
        return x + self.inner(self.attention(x, x, attention_mask=seen))

    def compute_output_spec(self, x, seen=None):
        return keras.KerasTensor(x.shape, x.dtype)


def handed(flat):
    ids = keras.Input((LENGTH,), dtype="int32")
    x, seen = layers.Embedding(VOCABULARY, WIDTH)(ids), Seen()(ids)
    for _ in range(4):
        x = (
            x + layers.MultiHeadAttention(2, 4)(x, x, attention_mask=seen)
            if flat
            else Given()(x, seen=seen)
        )
    return keras.Model(ids, layers.Dense(VOCABULARY)(x))


@pytest.mark.parametrize(
    ("policy", "flat"),
    [
        (["attention"], False),
        pytest.param("nothing_saveable", True, marks=pytest.mark.slow),
        pytest.param("auto", False, marks=pytest.mark.slow),
    ],
)
def test_a_mask_made_outside_of_the_blocks_is_read(policy, flat, monkeypatch):
    def result(policy, flash_attention):
        model, options = (
            made(lambda: handed(flat)),
            {"flash_attention": flash_attention, "jit_compile": True},
        )
        assert bool(installed(fa.remat(model, policy))) == (policy is not None)
        return trained(model, tokens, **options)

    plain = result(None, False)
    require_equal(plain, result(policy, True), 1e-4)

    def without_padding(*arguments, **options):
        return read_mask(*arguments, **options)._replace(keys=None)

    monkeypatch.setattr(attention, "read_mask", without_padding)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        require_equal(plain, result(policy, True), 1e-2)


def test_attention_that_is_kept_is_not_computed_again(monkeypatch):
    """Each of two blocks has a loop over its scores forward and one backward."""

    def loops(policy):
        trainer, stack = of_attention(policy)
        return trainer.compiler_ir(stack, "hlo").count(" while(")

    plain = loops(None)
    assert loops("nothing_saveable") == plain + 2
    assert loops(["attention"]) == plain
    monkeypatch.setattr(blockwise_attention, "checkpoint_name", lambda t, _: t)
    assert loops(["attention"]) == plain + 2, "nothing has the name"


def test_remat_leaves_the_model_as_it_was(tmp_path):
    model = made(attended)
    config, names, before = (
        saved(model, tmp_path),
        [layer.name for layer in model.layers],
        set(vars(model)),
    )
    weights = [w.path for w in model.weights]
    assert fa.remat(fa.remat(model)) is model
    assert len(installed(model)) == 1
    assert (saved(model, tmp_path), [layer.name for layer in model.layers]) == (config, names)
    assert [w.path for w in model.weights] == weights
    assert not installed(keras.models.load_model(tmp_path / "model.keras"))
    assert not installed(keras.models.clone_model(model))
    before_scope = installed(model)
    with recomputing(model, ["attention"]):
        assert installed(model) != before_scope
    assert installed(model) == before_scope
    x, _ = tokens()
    np.testing.assert_array_equal(model(x), fa.remat(model, None)(x))
    assert set(vars(model)) == before


def saved(model, folder):
    """A model's file, without its date."""
    model.save(folder / "model.keras")
    with zipfile.ZipFile(folder / "model.keras") as file:
        return {name: file.read(name) for name in file.namelist() if name != "metadata.json"}


def cut(model):
    (block,) = blocks.find(model)
    return block.segments


def operations(segments):
    return [[node.operation.name for node in segment.nodes] for segment in segments]


def test_a_flat_graph_is_cut_where_one_value_crosses():
    segments = cut(made(functools.partial(attended, 6)))
    first, *inner, last = operations(segments)
    assert [segment.recomputed for segment in segments] == [
        False,
        *[True] * (len(segments) - 3),
        False,
        False,
    ]
    assert first == ["embedding"], "ids are checked outside"
    assert last == ["head"], "a LinearCrossEntropy may take it over"
    assert 6 <= len(inner) <= 14
    assert all(len(segment.outputs) == 1 and len(segment.inputs) <= 2 for segment in segments)
    nodes = [id(node) for segment in segments for node in segment.nodes]
    assert len(nodes) == len(set(nodes)) == 6 * 8 + 3, (
        "a shared layer's calls are nodes of their own"
    )


def test_boundaries_and_insides_take_the_least_memory():
    """Tries all ways to cut a chain."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        inside, out = rng.integers(1, 50, 8), rng.integers(1, 20, 8)
        costs = [
            blocks._Cost(float(a), [(k + 1, float(b))])
            for k, (a, b) in enumerate(zip(inside, out, strict=True))
        ]

        def memory(ends, inside=inside, out=out):
            starts = [0, *ends[:-1]]
            return sum(out[e - 1] for e in ends) + max(
                inside[a:b].sum() for a, b in zip(starts, ends, strict=True)
            )

        ways = [[k for k in range(1, 8) if way >> k & 1] + [8] for way in range(0, 256, 2)]
        ends, found = blocks._least(costs, set())
        assert found == memory(ends)
        assert found <= 1.15 * min(map(memory, ways))


def test_blocks_are_the_outermost_layers_that_repeat():
    model = made(subclassed)
    assert [block.layer for block in blocks.find(model)] == [
        b for stage in model.stages for b in stage.blocks
    ]

    def inner():
        return keras.Sequential(
            [keras.Input((WIDTH,)), *(layers.Dense(WIDTH, "tanh") for _ in range(2))]
        )

    nested = keras.Sequential(
        [keras.Input((WIDTH,)), layers.Dense(WIDTH), *(inner() for _ in range(9))]
    )
    assert [block.layer for block in blocks.find(nested)] == nested.layers[1:]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["embedding"], "'embedding' .*cannot be computed again.*ids are checked"),
        (["no_such"], "no layer 'no_such'.*'head'"),
        (["stack"], "holds a LayerStack"),
    ],
)
def test_a_layer_that_cannot_be_recomputed_is_refused(names, message):
    ids = keras.Input((LENGTH,))
    x = layers.Embedding(VOCABULARY, WIDTH, name="embedding")(ids)
    x = fa.kernels.LayerStack(lambda: layers.Dense(WIDTH), 2, name="stack")(x)
    model = keras.Model(ids, layers.Dense(2, name="head")(x))
    with pytest.raises(ValueError, match=message):
        fa.remat(model, layer_names=names)
    assert not installed(model)


class Tagger(layers.Layer):
    """Ids in, a word's vector out."""

    def __init__(self):
        super().__init__()
        self.embed, self.dense = layers.Embedding(VOCABULARY, WIDTH), layers.Dense(WIDTH)

    def build(self, shape):
        self.embed.build(shape)
        self.dense.build((*shape, WIDTH))

    def call(self, ids):
        return self.dense(self.embed(ids))

    def compute_output_spec(self, ids):
        return keras.KerasTensor((*ids.shape, WIDTH))


def test_layers_that_hold_an_embedding_are_no_blocks():
    """Leaves out layers with an embedding, which would look up its ids again without a check."""
    ids = keras.Input((LENGTH,), dtype="int32")
    sides = [Tagger(), Tagger()]
    model = keras.Model(ids, layers.Dense(1)(layers.Add()([side(ids) for side in sides])))
    recomputed = [layer for block in blocks.find(model) for layer in block.layers]
    assert not {*map(id, recomputed)} & {
        id(part) for side in sides for part in side._flatten_layers()
    }


def test_spectral_normalization_stays_outside_of_blocks():
    """Leaves out a layer that reads its kernel in a branch, then assigns it."""
    normalised = layers.SpectralNormalization(layers.Dense(64), name="normalised")
    model = keras.Sequential(
        [keras.Input((64,)), normalised, *(layers.Dense(64, "tanh") for _ in range(16))]
    )
    (block,) = blocks.find(model)
    assert block.layers and normalised not in block.layers
    with pytest.raises(ValueError, match="holds a SpectralNormalization"):
        fa.remat(model, layer_names=["normalised"])


def test_a_copied_layer_of_tf_keras_has_its_own_weights():
    block = tf_keras.Sequential([tf_keras.layers.Dense(3, use_bias=False)])
    model = tf_keras.Sequential([tf_keras.layers.Dense(4), block])
    x = tf.ones([1, 4])
    model(x)
    fa.remat(model, layer_names=[block.layers[0].name])
    copied, expected = copy.deepcopy(block.layers[0]), block(x).numpy()
    np.testing.assert_array_equal(copied(x), expected)
    copied.kernel.assign_add(tf.ones([4, 3]))
    np.testing.assert_allclose(copied(x), expected + 4, rtol=1e-5)
    np.testing.assert_array_equal(block(x), expected)
    assert installed(model) and not installed(copied)


def test_a_layer_of_tf_keras_is_saved_with_its_signature(tmp_path):
    block = tf_keras.layers.Dense(3)
    model = tf_keras.Sequential([tf_keras.Input((4,)), tf_keras.layers.Dense(4), block])
    fa.remat(model, layer_names=[block.name])
    tf.saved_model.save(model, tmp_path)
    x = tf.ones([2, 4])
    np.testing.assert_allclose(tf.saved_model.load(tmp_path)(x), model(x), rtol=1e-6)


def test_a_model_without_blocks_is_an_error():
    with pytest.raises(ValueError, match=r"no blocks.*layer_names"):
        fa.remat(keras.Sequential([keras.Input((4,)), layers.Dense(1)]))
    with pytest.raises(TypeError, match="or left out"):
        fa.remat(keras.Sequential([keras.Input((4,)), layers.Dense(1)]), layer_names=[])
    with pytest.raises(ValueError, match="no weights yet"):
        fa.remat(Subclassed())
    with pytest.raises(TypeError, match="not a Keras model"):
        fa.remat(layers.Dense(1))
    with pytest.raises(ValueError, match="policy='some'"):
        fa.remat(made(attended), "some")


class LegacyBlock(tf_keras.layers.Layer):
    def __init__(self, rate):
        super().__init__()
        self.inner, self.drop = tf_keras.layers.Dense(8, "tanh"), tf_keras.layers.Dropout(rate)
        self.outer = tf_keras.layers.Dense(4)

    def call(self, x, training=None):
        return x + self.outer(self.drop(self.inner(x), training=training))


def legacy(rate):
    tf_keras.utils.set_random_seed(0)
    model = tf_keras.Sequential([LegacyBlock(rate), LegacyBlock(rate), tf_keras.layers.Dense(1)])
    model(np.zeros((1, 4), "float32"))
    return model


@pytest.mark.slow
@pytest.mark.sample
def test_blocks_of_tf_keras():
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    moved = []
    for model in (legacy(0.0), fa.remat(legacy(0.0))):
        trainer = fa.Trainer(model, tf_keras.optimizers.SGD(0.1), "mse")
        trainer.fit(x, x[:, :1], batch_size=4, shuffle=False, verbose=0)
        moved.append(np.concatenate([v.numpy().ravel() for v in model.variables]))
    assert "opt-barrier" in trainer.compiler_ir((x[None], x[None, :, :1]), "hlo")
    np.testing.assert_allclose(*moved, rtol=1e-6, atol=1e-7)
    # What a dropout of tf_keras draws is kept: no seed of the model's determines it.
    trainer = fa.Trainer(fa.remat(legacy(0.5)), tf_keras.optimizers.SGD(0.1), "mse")
    assert trainer.compiler_ir((x[None], x[None, :, :1]), "hlo").count(" opt-barrier(") == 2
