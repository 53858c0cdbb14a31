"""`scan_layers`: layers that repeat are found, run as one loop, and train as they do unrolled."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa
from fastaccum.layers import blocks
from fastaccum.layers.repeats import find_repeats

layers = keras.layers
VOCABULARY, LENGTH, WIDTH, ROWS = 13, 6, 8, 12


def transformer(depth=4, dropout=0.0):
    """A decoder written node by node, in a Python loop."""
    ids = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH)(ids)
    for _ in range(depth):
        h = layers.LayerNormalization()(x)
        h = layers.MultiHeadAttention(2, 4, dropout=dropout)(h, h, use_causal_mask=True)
        x = x + h
        h = layers.Dense(2 * WIDTH, "gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dropout(dropout)(layers.Dense(WIDTH)(h))])
    return keras.Model(ids, layers.Dense(VOCABULARY)(x))


def dense(depth=4, **options):
    """A Sequential of blocks with statistics."""
    inner = []
    for _ in range(depth):
        inner += [layers.Dense(WIDTH, "tanh", **options), layers.BatchNormalization()]
    return keras.Sequential([keras.Input((LENGTH,)), layers.Dense(WIDTH), *inner, layers.Dense(3)])


def alternating():
    """Blocks of two kinds in turn, as of a model with a window in every other layer."""
    x = inputs = keras.Input((WIDTH,))
    for k in range(8):
        x = layers.Dense(WIDTH, "tanh" if k % 2 else "relu")(x)
    return keras.Model(inputs, layers.Dense(3)(x))


class Block(layers.Layer):
    """A block of one's own, whose scale stands in no configuration."""

    def __init__(self, scale=1.0, **options):
        super().__init__(**options)
        self.scale = scale
        self.inner = layers.Dense(WIDTH, "tanh")

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return x + self.scale * self.inner(x)


def of_blocks(*made):
    return keras.Sequential([keras.Input((WIDTH,)), *made, layers.Dense(3)])


def with_context():
    """Blocks that all take one more tensor, which is trained too."""
    x = inputs = keras.Input((LENGTH,))
    context = layers.Dense(WIDTH, name="context")(inputs)
    x = layers.Dense(WIDTH)(inputs)
    for _ in range(4):
        x = layers.Dense(WIDTH, "tanh")(layers.Concatenate()([x, context]))
    return keras.Model(inputs, layers.Dense(3)(x))


def half_frozen():
    model = of_blocks(*(Block() for _ in range(8)))
    for layer in model.layers[:4]:
        layer.trainable = False
    return model


def data(model, seed=0):
    generator = np.random.default_rng(seed)
    shape = (ROWS, *model.inputs[0].shape[1:])
    if model.inputs[0].dtype == "int32":
        x = generator.integers(0, VOCABULARY, shape).astype("int32")
    else:
        x = generator.normal(size=shape).astype("float32")
    classes = model.outputs[0].shape[-1]
    y = generator.integers(0, classes, (ROWS, *model.outputs[0].shape[1:-1]))
    return x, y


def made(make, policy="float32"):
    keras.utils.set_random_seed(0)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        return make()
    finally:
        keras.config.set_dtype_policy(before)


def trainer_of(model, scan_layers, **options):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    options = {"gradient_accumulation_steps": 2, "jit_compile": True, **options}
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    return fa.Trainer(model, optimizer, loss, scan_layers=scan_layers, **options)


def trained(make, scan_layers, policy="float32", prepare=lambda model: None, **options):
    """Returns the losses, the variables and what the summary says of loops, after two epochs."""
    model = made(make, policy)
    prepare(model)
    trainer = trainer_of(model, scan_layers, **options)
    x, y = data(model)
    history = trainer.fit(x, y, batch_size=3, epochs=2, shuffle=False, verbose=0).history["loss"]
    losses = [*history, trainer.evaluate(x, y, batch_size=3, verbose=0)]
    variables = [np.asarray(variable) for variable in model.variables]
    return losses, variables, trainer


def loops_of(trainer):
    model = trainer.model
    x, y = data(model)
    return list(trainer.summary(x, y, batch_size=3).loops.values())


def require_equal(scanned, unrolled, tolerance):
    for a, b in zip((*scanned[0], *scanned[1]), (*unrolled[0], *unrolled[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (transformer, [(4, 8)]),
        (dense, [(4, 2)]),
        (alternating, [(4, 2)]),
        (with_context, [(4, 2)]),
        (half_frozen, [(4, 1), (4, 1)]),
        (
            lambda: of_blocks(*(Block(scale) for scale in (1.0, 1.0, 0.5, 0.5, 0.5))),
            [(2, 1), (3, 1)],
        ),
    ],
)
def test_parts_that_repeat_are_found(make, expected):
    found = find_repeats(blocks.graph_of(make()), fewest=2)
    assert [(len(r.parts), len(r.parts[0])) for r in found.repeats] == expected


def test_a_shorter_repeat_of_enough_parts_is_taken():
    made = []
    for _ in range(3):
        made += [*(layers.Dense(WIDTH) for _ in range(4)), layers.LayerNormalization()]
    found = find_repeats(blocks.graph_of(of_blocks(*made)), fewest=4)
    assert [len(r.parts) for r in found.repeats] == [4, 4, 4]


def test_a_difference_is_named():
    scales = [Block(0.1 * k, name=f"block_{k}") for k in range(4)]
    found = find_repeats(blocks.graph_of(of_blocks(*scales)), fewest=2)
    assert not found.repeats
    assert "'block_1' differs from 'block_0': scale is 0.0 and 0.1" in found.reasons


class Named(Block):
    """A block that computes by its name."""

    def call(self, x):
        return x if self.name.endswith("2") else super().call(x)


def test_layers_that_read_their_names_are_told_apart_by_them():
    named = of_blocks(*(Named(name=f"named_{k}") for k in range(4)))
    found = find_repeats(blocks.graph_of(named), fewest=2)
    assert not found.repeats and "name is 'named_0' and 'named_1'" in found.reasons[0]


def test_a_call_set_on_each_layer_is_compared():
    def with_calls(rates):
        model = of_blocks(*(Block() for _ in rates))
        for layer, rate in zip(model.layers, rates, strict=False):
            layer.call = lambda x, layer=layer, rate=rate: x + rate * layer.inner(x)
        return find_repeats(blocks.graph_of(model), fewest=2).repeats

    assert [len(repeat.parts) for repeat in with_calls([1.0] * 4)] == [4]
    assert not with_calls([0.1, 0.2, 0.3, 0.4])


def residual_of_equal_layers():
    """Blocks of which a part repeats too."""
    x = inputs = keras.Input((WIDTH,))
    for _ in range(5):
        x = layers.Add()([x, layers.Dense(WIDTH)(layers.Dense(WIDTH)(x))])
    return keras.Model(inputs, layers.Dense(3)(x))


def test_the_parts_of_most_nodes_are_taken():
    found = find_repeats(blocks.graph_of(residual_of_equal_layers()), fewest=4)
    assert [(len(repeat.parts), len(repeat.parts[0])) for repeat in found.repeats] == [(5, 3)]


class Scaled(keras.Model):
    """A functional model with code of its own."""

    def __init__(self, scale):
        inputs = keras.Input((WIDTH,))
        super().__init__(inputs, layers.Dense(WIDTH, "tanh")(inputs))
        self.factor = scale

    def call(self, x):
        return super().call(x) * self.factor


@pytest.mark.parametrize(
    "make",
    [
        lambda: of_blocks(*(Scaled(0.2 * k) for k in range(4))),
        lambda: of_blocks(*(holding(tf.TensorShape([k, 4])) for k in range(4))),
        lambda: of_blocks(*(holding({k}) for k in range(4))),
        lambda: of_blocks(*(holding(np.array(["a", str(k)])) for k in range(4))),
        lambda: of_blocks(*(holding(keras.constraints.MaxNorm(k + 1)) for k in range(4))),
    ],
)
def test_what_layers_hold_tells_them_apart(make):
    assert not find_repeats(blocks.graph_of(make()), fewest=2).repeats


def holding(value):
    block = Block()
    block.held = value
    return block


def test_equal_seeds_and_empty_cells_do_not_tell_layers_apart():
    def empty():
        return later  # noqa: F821

    later = 1
    del later
    blocks_of_seeds = []
    for k in range(4):
        block = holding(empty)
        block.drop = layers.Dropout(0.1, seed=k)
        blocks_of_seeds.append(block)
    found = find_repeats(blocks.graph_of(of_blocks(*blocks_of_seeds)), fewest=2)
    assert [len(repeat.parts) for repeat in found.repeats] == [4]


@pytest.mark.parametrize("policy", ["nothing_saveable", "auto"])
def test_repeats_inside_of_a_layer_that_is_recomputed(policy):
    def make():
        inner = [layers.Dense(WIDTH, "tanh") for _ in range(4)]
        encoder = keras.Sequential([keras.Input((WIDTH,)), *inner], name="encoder")
        return keras.Sequential([keras.Input((WIDTH,)), encoder, layers.Dense(3)])

    def prepare(model):
        fa.remat(model, policy, layer_names=["encoder"])

    scanned = trained(make, True, prepare=prepare)
    require_equal(scanned, trained(make, False), 2e-5)


def test_layers_that_share_weights_do_not_repeat():
    block = Block(name="shared")
    x = inputs = keras.Input((WIDTH,))
    for _ in range(4):
        x = block(x)
    found = find_repeats(blocks.graph_of(keras.Model(inputs, x)), fewest=2)
    assert not found.repeats
    assert found.reasons == ["'shared' shares weights with layers before it"]


def test_an_output_in_the_middle_ends_a_repeat():
    x = inputs = keras.Input((WIDTH,))
    outputs = []
    for _ in range(6):
        x = Block()(x)
        outputs.append(x)
    model = keras.Model(inputs, [outputs[2], outputs[5]])
    found = find_repeats(blocks.graph_of(model), fewest=2)
    assert [len(repeat.parts) for repeat in found.repeats] == [3, 3]


@pytest.mark.parametrize(
    ("make", "policy", "tolerance"),
    [
        (lambda: transformer(dropout=0.2), "float32", 2e-5),
        (dense, "float32", 2e-5),
        (with_context, "float32", 2e-5),
        (half_frozen, "float32", 2e-5),
        (residual_of_equal_layers, "float32", 2e-5),
        pytest.param(alternating, "float32", 2e-5, marks=pytest.mark.slow),
        pytest.param(transformer, "mixed_bfloat16", 3e-2, marks=pytest.mark.slow),
        pytest.param(transformer, "mixed_float16", 5e-3, marks=pytest.mark.slow),
    ],
)
def test_scanned_layers_train_as_unrolled_ones(make, policy, tolerance):
    scanned = trained(make, True, policy)
    require_equal(scanned, trained(make, False, policy), tolerance)
    assert any(choice.startswith("one loop of ") for choice in loops_of(scanned[2]))


def test_lora_and_regularizers_train_as_unrolled():
    def prepare(model):
        for layer in model.layers[1:7:2]:
            layer.enable_lora(2)

    def make():
        return dense(kernel_regularizer="l2")

    scanned = trained(make, True, prepare=prepare)
    require_equal(scanned, trained(make, False, prepare=prepare), 2e-5)
    assert "one loop of 3" in loops_of(scanned[2])


@pytest.mark.parametrize("policy", ["nothing_saveable", ["projection"]])
def test_the_policy_of_remat_is_that_of_the_loop(policy):
    def prepare(model):
        fa.remat(model, policy, layer_names=[layer.name for layer in model.layers[:4]])

    def make():
        return of_blocks(*(Block() for _ in range(4)))

    scanned = trained(make, True, prepare=prepare)
    require_equal(scanned, trained(make, False), 2e-5)
    assert loops_of(scanned[2]) == ["one loop of 4"]


class Penalised(Block):
    def call(self, x):
        self.add_loss(1e-2 * tf.reduce_mean(tf.square(x)))
        return super().call(x)


class Drawing(Block):
    def call(self, x):
        return super().call(x) + 0.0 * tf.random.normal(tf.shape(x))


class Counting(Block):
    """A block that counts its calls in a variable that Keras does not know."""

    def build(self, shape):
        super().build(shape)
        variable = tf.Variable(0.0, trainable=False)
        self.hidden = lambda: variable

    def call(self, x):
        self.hidden().assign_add(1.0)
        return super().call(x)


class Unmasking(Block):
    def __init__(self, **options):
        super().__init__(**options)
        self.supports_masking = True

    def compute_mask(self, x, mask=None):
        return None if mask is None else ~mask


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Penalised, "adds losses"),
        (Drawing, "draw random numbers"),
        (Counting, "which are not among their weights"),
        (lambda: layers.Dense(WIDTH, activity_regularizer="l2"), "activity regularizer"),
    ],
)
def test_layers_that_no_loop_can_run_are_named_and_run_one_by_one(kind, reason):
    def make():
        return of_blocks(*(kind() for _ in range(4)))

    with pytest.warns(UserWarning, match=f"scan_layers=True: .*{reason}"):
        scanned = trained(make, True)
    require_equal(scanned, trained(make, False), 1e-6)
    (choice,) = loops_of(scanned[2])
    assert choice.startswith("unrolled: ") and reason in choice


def test_a_mask_that_layers_change_is_seen_by_each():
    def make():
        x = inputs = keras.Input((LENGTH, WIDTH))
        x = layers.Masking()(x)
        for _ in range(4):
            x = Unmasking()(x)
        return keras.Model(inputs, layers.Dense(3)(x))

    with pytest.warns(UserWarning, match="input's mask"):
        scanned = trained(make, True)
    require_equal(scanned, trained(make, False), 1e-6)
    assert "input's mask" in loops_of(scanned[2])[0]


def test_a_program_has_one_body_for_all_layers():
    def products(depth, scan_layers):
        model = made(lambda: transformer(depth))
        trainer = trainer_of(model, scan_layers)
        x, y = data(model)
        stack = x.reshape(2, 6, LENGTH), y.reshape(2, 6, LENGTH)
        return trainer.compiler_ir(stack, "hlo").count(" dot(")

    assert products(4, True) == products(8, True) < products(4, False) < products(8, False)


def test_a_training_is_resumed_with_another_choice(tmp_path):
    def run(scan_layers, epochs, folder):
        model = made(transformer)
        x, y = data(model)
        trainer = trainer_of(model, scan_layers)
        trainer.fit(x, y, batch_size=3, epochs=epochs, verbose=0, checkpoint_dir=folder)
        return [np.asarray(variable) for variable in model.variables]

    expected = run(False, 2, tmp_path / "unrolled")
    run(True, 1, tmp_path / "both")
    for a, b in zip(run(False, 2, tmp_path / "both"), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_a_wrong_choice_is_refused():
    with pytest.raises(TypeError, match=r"scan_layers=2\.0"):
        trainer_of(made(dense), 2.0)


def test_the_layer_that_gave_no_finite_number_is_named():
    model = made(lambda: of_blocks(*(Block(name=f"block_{k}") for k in range(6))))
    model.layers[3].inner.kernel.assign(np.full((WIDTH, WIDTH), np.inf, "float32"))
    trainer = trainer_of(model, True, on_nonfinite="raise")
    x, y = data(model)
    with pytest.raises(fa.NonFiniteError, match="block_3"):
        trainer.fit(x, y, batch_size=3, verbose=0)


def test_predictions_and_a_saved_model_are_those_of_the_model(tmp_path):
    model = made(transformer)
    trainer = trainer_of(model, True)
    x, y = data(model)
    trainer.fit(x, y, batch_size=3, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    expected = trainer.predict(x, batch_size=3, verbose=0)
    np.testing.assert_allclose(loaded.predict(x, verbose=0), expected, rtol=1e-5, atol=1e-6)
    assert len(trainer_of(loaded, True).summary(x, y, batch_size=3).loops) == 1


def test_auto_loops_over_layers_of_keras_alone():
    assert loops_of(trained(dense, "auto")[2]) == ["one loop of 4"]
    of_user = trained(lambda: of_blocks(*(Block() for _ in range(4))), "auto")
    assert "code of your own" in loops_of(of_user[2])[0]
    activated = trained(lambda: dense_of(lambda x: tf.tanh(x)), "auto")
    assert "code of your own" in loops_of(activated[2])[0]


def dense_of(activation):
    inner = [layers.Dense(WIDTH, activation) for _ in range(4)]
    return keras.Sequential([keras.Input((WIDTH,)), *inner, layers.Dense(3)])


class Calling(layers.Layer):
    """A layer that calls a model of layers that repeat, in a function of its own."""

    def __init__(self):
        super().__init__()
        self.net = dense_of("tanh")

    def call(self, x):
        return tf.function(self.net, autograph=False)(x)


@pytest.mark.parametrize("scan_layers", ["auto", True])
def test_a_graph_that_a_layer_calls_as_it_likes_is_left_to_it(scan_layers):
    def make():
        inputs = keras.Input((WIDTH,))
        return keras.Model(inputs, Calling()(inputs))

    scanned = trained(make, scan_layers)
    require_equal(scanned, trained(make, False), 1e-6)
    assert not loops_of(scanned[2])


class Unused(Block):
    """A block with a weight that it does not use."""

    def build(self, shape):
        super().build(shape)
        self.unused = self.add_weight(shape=(3,), initializer="ones")


def test_a_weight_without_a_gradient_does_not_decay():
    model = made(lambda: of_blocks(*(Unused() for _ in range(4))))
    x, y = data(model)
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    trainer = fa.Trainer(
        model,
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        gradient_accumulation_steps=2,
        jit_compile=True,
        scan_layers=True,
    )
    with pytest.warns(UserWarning, match="No gradient of the loss reaches"):
        trainer.fit(x, y, batch_size=3, verbose=0)
    assert loops_of(trainer) == ["one loop of 4"]
    for layer in model.layers[:-1]:
        np.testing.assert_array_equal(layer.unused, np.ones(3))


class PenalisedLast(Block):
    def call(self, x):
        y = super().call(x)
        if self.name.endswith("3"):
            self.add_loss(tf.reduce_mean(tf.square(y)))
        return y


def test_a_loss_that_one_layer_adds_counts():
    def losses(kind):
        model = made(lambda: of_blocks(*(kind(name=f"block_{k}") for k in range(4))))
        x, y = data(model)
        return trainer_of(model, "auto").fit(x, y, batch_size=3, verbose=0).history["loss"][0]

    assert losses(PenalisedLast) > losses(Block) + 0.1
