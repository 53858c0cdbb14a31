"""`scan_layers`: layers that code calls one after the other run as one loop, where nothing tells."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa
from fastaccum.families import adapt_model
from fastaccum.layers import scan

layers = keras.layers
WIDTH, ROWS = 8, 12


class Block(layers.Layer):
    """A residual block; what it adds is scaled by an argument of the call."""

    def __init__(self, dropout=0.0, **options):
        super().__init__(**options)
        self.supports_masking = True
        self.inner = layers.Dense(WIDTH, "tanh")
        self.dropout = layers.Dropout(dropout)

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x, context=None, scale=1.0, training=None):
        h = self.dropout(self.inner(x), training=training)
        if context is not None:
            h = h + context
        return x + scale * h


class Stacked(keras.Model):
    """Blocks in a list, called in a Python loop."""

    def __init__(self, depth=4, dropout=0.0):
        super().__init__()
        self.first = layers.Dense(WIDTH)
        self.blocks = [Block(dropout) for _ in range(depth)]
        self.head = layers.Dense(3)

    def call(self, x, training=None):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, training=training)
        return self.head(x)


class WithContext(Stacked):
    """All blocks take one more tensor, which is trained too."""

    def call(self, x, training=None):
        x = self.first(x)
        context = keras.ops.tanh(x)
        for block in self.blocks:
            x = block(x, context=context, scale=0.5, training=training)
        return self.head(x)


class Encoder(layers.Layer):
    """A layer with blocks of its own, in a functional model."""

    def __init__(self, depth, **options):
        super().__init__(**options)
        self.blocks = [Block() for _ in range(depth)]

    def build(self, shape):
        for block in self.blocks:
            block.build(shape)

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def functional():
    inputs = keras.Input((WIDTH,))
    return keras.Model(inputs, layers.Dense(3)(Encoder(4)(layers.Dense(WIDTH)(inputs))))


class Collecting(Stacked):
    """The head takes what all blocks give."""

    def call(self, x, training=None):
        x = self.first(x)
        outputs = []
        for block in self.blocks:
            x = block(x, training=training)
            outputs.append(x)
        return self.head(keras.ops.concatenate(outputs, -1))


class Numbered(Stacked):
    """The scale of a block is another for each."""

    def call(self, x, training=None):
        x = self.first(x)
        for k, block in enumerate(self.blocks):
            x = block(x, scale=1.0 / (k + 1), training=training)
        return self.head(x)


class Residual(Stacked):
    """Something is computed between the blocks."""

    def call(self, x, training=None):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x, training=training)
        return self.head(x)


class Twice(Stacked):
    """Each block is called two times."""

    def call(self, x, training=None):
        x = self.first(x)
        for block in [*self.blocks, *self.blocks]:
            x = block(x, training=training)
        return self.head(x)


@dataclasses.dataclass
class Held:
    tensor: tf.Tensor


class Taking(Block):
    def call(self, x, held=None, training=None):
        return x + self.inner(x) * held.tensor


class Holding(Stacked):
    """Blocks take a trained tensor that an object holds."""

    def __init__(self):
        super().__init__()
        self.blocks = [Taking() for _ in range(4)]

    def call(self, x, training=None):
        x = self.first(x)
        held = Held(x)
        for block in self.blocks:
            x = block(x, held=held)
        return self.head(x)


class Telling(Block):
    def call(self, x, training=None):
        h = self.inner(x)
        self.told = keras.ops.mean(h * h)
        return x + h


class Told(Stacked):
    """The model takes what blocks leave in an attribute."""

    def __init__(self):
        super().__init__()
        self.blocks = [Telling() for _ in range(4)]

    def call(self, x, training=None):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) + sum(block.told for block in self.blocks)


class Around(layers.Layer):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def build(self, shape):
        if not self.inner.built:
            self.inner.build(shape)

    def call(self, x, training=None):
        return x + self.inner(x)


class Sharing(Stacked):
    """Every other block has the same layer in it."""

    def __init__(self):
        super().__init__()
        inner = [layers.Dense(WIDTH, "tanh") for _ in range(2)]
        self.blocks = [Around(inner[k % 2]) for k in range(4)]


class Switching(Stacked):
    """Blocks take a tensor under other names."""

    def __init__(self):
        super().__init__()
        self.blocks = [Named() for _ in range(4)]

    def call(self, x, training=None):
        given = x = self.first(x)
        for k, block in enumerate(self.blocks):
            x = block(x, given={"add" if k % 2 else "times": given})
        return self.head(x)


class Named(Block):
    def call(self, x, given=None, training=None):
        if "add" in given:
            return x + self.inner(x) + given["add"]
        return x + self.inner(x) * given["times"]


class Remembering(Block):
    """A block that reads what it has just assigned."""

    def __init__(self):
        super().__init__()
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x, training=None):
        if training:
            self.seen.assign_add(keras.ops.mean(x))
        return x + self.inner(x) * (1 + self.seen)


class WithState(Stacked):
    def __init__(self):
        super().__init__()
        self.blocks = [Remembering() for _ in range(4)]


COUNTED = []


class ByGlobal(Block):
    """A block that computes by how often blocks were called before."""

    def call(self, x, training=None):
        COUNTED.append(self)
        return x + self.inner(x) / float(COUNTED.index(self) + 1)


class Counting(Stacked):
    def __init__(self):
        super().__init__()
        COUNTED.clear()
        self.blocks = [ByGlobal() for _ in range(4)]


class InTraining(Stacked):
    """The blocks are followed by others in training."""

    def call(self, x, training=None):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, training=training)
            if training:
                x = 2.0 * x
        return self.head(x)


class HalfWay(Stacked):
    """The head takes what the fourth of eight blocks gives, too."""

    def call(self, x, training=None):
        x = self.first(x)
        for k, block in enumerate(self.blocks):
            x = block(x, training=training)
            if k == 3:
                middle = x
        return self.head(x + middle)


def trainer_of(make, scan_layers, shape=(WIDTH,), prepare=lambda model: None, **options):
    keras.utils.set_random_seed(0)
    model = make()
    model(np.zeros((ROWS, *shape), "float32"))
    prepare(model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    options = {"gradient_accumulation_steps": 2, "jit_compile": True, **options}
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    return fa.Trainer(model, optimizer, loss, scan_layers=scan_layers, **options)


def data():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(ROWS, WIDTH)).astype("float32")
    return x, generator.integers(0, 3, ROWS)


def chains_of(make):
    """Returns how many layers each chain of a model has."""
    trainer = trainer_of(make, True)
    model = adapt_model(trainer.model)
    model.symbolic_call(tf.TensorSpec([ROWS, WIDTH]), training=True)
    return [len(chain.layers) for chain in model.chains]


def trained(make, scan_layers, **options):
    """Returns the losses and the variables after two epochs."""
    trainer = trainer_of(make, scan_layers, **options)
    x, y = data()
    history = trainer.fit(x, y, batch_size=3, epochs=2, shuffle=False, verbose=0).history["loss"]
    losses = [*history, trainer.evaluate(x, y, batch_size=3, verbose=0)]
    loops = trainer._builder.engine.objective.scanned.choices
    return losses, [np.asarray(v) for v in trainer.model.variables], list(loops.values())


def require_equal(make, loops, **options):
    """Requires that a model trains as it does unrolled, in these loops."""
    losses, variables, found = trained(make, True, **options)
    assert found == [f"one loop of {depth}" for depth in loops]
    expected_losses, expected, _ = trained(make, False, **options)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for got, want in zip(variables, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(
    "make",
    [Stacked, WithContext, functional, lambda: Stacked(dropout=0.5), WithState],
    ids=["model", "context", "layer", "dropout", "state"],
)
def test_layers_in_a_python_loop_train_as_unrolled_ones(make):
    require_equal(make, [4])


@pytest.mark.parametrize(
    "make",
    [
        Collecting,
        Numbered,
        Residual,
        Twice,
        InTraining,
        Holding,
        Told,
        Counting,
        Switching,
    ],
)
def test_layers_that_are_called_otherwise_are_no_chain(make):
    assert chains_of(make) == []


def test_layers_that_share_a_weight_are_no_chain():
    assert chains_of(Sharing) == [2, 2]


def of_models():
    """Blocks that are functional models."""
    inputs = keras.Input((WIDTH,))
    x = inputs
    for _ in range(4):
        block_input = keras.Input((WIDTH,))
        x = keras.Model(block_input, block_input + layers.Dense(WIDTH, "tanh")(block_input))(x)
    return keras.Model(inputs, layers.Dense(3)(x))


def test_a_block_may_be_a_functional_model():
    trainer = trainer_of(of_models, True)
    x, y = data()
    summary = trainer.summary(x, y, batch_size=3)
    assert list(summary.loops.values()) == ["one loop of 4"]


def test_layers_that_came_to_differ_run_one_by_one():
    class Scaled(Block):
        factor = 1.0

        def call(self, x, training=None):
            return x + self.factor * self.inner(x)

    class OfScaled(Stacked):
        def __init__(self):
            super().__init__()
            self.blocks = [Scaled() for _ in range(4)]

    def refit(scan_layers):
        trainer = trainer_of(OfScaled, scan_layers)
        x, y = data()
        trainer.fit(x, y, batch_size=3, shuffle=False, verbose=0)
        trainer.model.blocks[1].factor = 0.5
        trainer.fit(x[:8], y[:8], batch_size=2, shuffle=False, verbose=0)
        return trainer.model.get_weights()

    with pytest.warns(UserWarning, match="They differ by now"):
        changed = refit(True)
    for got, want in zip(changed, refit(False), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-6)


def test_a_chain_ends_at_what_something_else_takes():
    require_equal(lambda: HalfWay(8), [4, 4])


def test_the_policy_of_remat_is_that_of_the_loop(monkeypatch):
    policies = set()
    run_loops = scan.run_loops

    def watching(body, depth, options, *arguments):
        policies.add(options.policy)
        return run_loops(body, depth, options, *arguments)

    def recompute(model):
        fa.remat(model, "nothing_saveable", layer_names=[block.name for block in model.blocks])

    monkeypatch.setattr(scan, "run_loops", watching)
    require_equal(Stacked, [4], prepare=recompute)
    assert policies == {"nothing_saveable"}


def test_frozen_layers_and_others_are_two_chains():
    def make():
        model = Stacked(8)
        for block in model.blocks[:4]:
            block.trainable = False
        return model

    require_equal(make, [4, 4])


class OfAnotherMind(Stacked):
    """Calls its blocks otherwise once it is trained."""

    swapped = False

    def call(self, x, training=None):
        x = self.first(x)
        for k, block in enumerate(self.blocks):
            x = block(x, training=training)
            if self.swapped and k == 1:
                x = 2.0 * x
        return self.head(x)


def test_calls_that_change_after_the_model_was_looked_at_are_refused():
    trainer = trainer_of(OfAnotherMind, True)
    x, y = data()
    trainer.fit(x, y, batch_size=3, verbose=0)
    before = trainer.model.get_weights()
    trainer.model.swapped = True
    with pytest.raises(ValueError, match="scan_layers=False"):
        trainer.fit(x[:8], y[:8], batch_size=2, verbose=0)
    for got, want in zip(trainer.model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_program_has_one_body_for_all_layers():
    def products(depth, scan_layers):
        trainer = trainer_of(lambda: Stacked(depth), scan_layers)
        x, y = data()
        stack = x.reshape(2, 6, WIDTH), y.reshape(2, 6)
        return trainer.compiler_ir(stack, "hlo").count(" dot(")

    unrolled = products(4, False)
    assert products(4, True) == products(6, True)
    assert products(4, True) < unrolled
    assert products(4, "auto") == unrolled  # which leaves code of the user's as it is


class Attending(layers.Layer):
    """A block whose attention takes the mask from its input."""

    def __init__(self, scale=None):
        super().__init__()
        self.supports_masking = True
        self.attention = layers.MultiHeadAttention(2, 4)
        self.scale = scale

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x):
        h = self.attention(x, x)
        return x + (h if self.scale is None else h * self.scale)


class Masked(keras.Model):
    def __init__(self, scale=None):
        super().__init__()
        self.mask = layers.Masking()
        self.first = layers.Dense(WIDTH)
        self.blocks = [Attending(scale) for _ in range(4)]
        self.head = layers.Dense(3)

    def call(self, x):
        x = self.first(self.mask(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("loops", [True, False], ids=["loop", "refused"])
def test_masks_reach_every_layer(loops):
    x = np.random.default_rng(0).normal(size=(ROWS, 5, WIDTH)).astype("float32")
    x[:, 3:] = 0
    y = np.zeros((ROWS, 5), "int64")

    def make():
        # A loop takes no variable that is not the layers' own.
        return Masked(scale=None if loops else Hidden(tf.Variable(0.5)))

    weights = []
    for scan_layers in (True, False):
        trainer = trainer_of(make, scan_layers, shape=(5, WIDTH))
        trainer.fit(x, y, batch_size=6, shuffle=False, verbose=0)
        weights.append(trainer.model.get_weights())
        if scan_layers:
            (choice,) = trainer._builder.engine.objective.scanned.choices.values()
            assert choice.startswith("one loop") == loops
    for got, want in zip(*weights, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-6)


class Hidden:
    """A variable that Keras does not find."""

    def __init__(self, variable):
        self.held = {"variable": variable}

    def __rmul__(self, other):
        return other * self.held["variable"]
