"""`scan_layers`: layers that code calls one after the other run as one loop, where nothing tells."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa
from fastaccum.families import adapt_model

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
        context = x = self.first(x)
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


def trainer_of(make, scan_layers, rows=ROWS, prepare=lambda model: None, **options):
    keras.utils.set_random_seed(0)
    model = make()
    model(np.zeros((rows, WIDTH), "float32"))
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
    return losses, [np.asarray(v) for v in trainer.model.variables]


def require_equal(make, **options):
    """Requires that a model trains as it does unrolled."""
    losses, variables = trained(make, True, **options)
    expected_losses, expected = trained(make, False, **options)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for got, want in zip(variables, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(
    "make",
    [Stacked, WithContext, functional, lambda: Stacked(dropout=0.5)],
    ids=["model", "context", "layer", "dropout"],
)
def test_layers_in_a_python_loop_train_as_unrolled_ones(make):
    assert chains_of(make) == [4]
    require_equal(make)


@pytest.mark.parametrize("make", [Collecting, Numbered, Residual, Twice, InTraining])
def test_layers_that_are_called_otherwise_are_no_chain(make):
    assert chains_of(make) == []


def test_a_chain_ends_at_what_something_else_takes():
    assert chains_of(lambda: HalfWay(8)) == [4, 4]
    require_equal(lambda: HalfWay(8))


def test_the_policy_of_remat_is_that_of_the_loop():
    def recompute(model):
        fa.remat(model, layer_names=[block.name for block in model.blocks])

    require_equal(Stacked, prepare=recompute)


def test_frozen_layers_and_others_are_two_chains():
    def make():
        model = Stacked(8)
        for block in model.blocks[:4]:
            block.trainable = False
        return model

    assert chains_of(make) == [4, 4]
    require_equal(make)


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
    assert products(4, True) == products(6, True) < unrolled == products(4, "auto")


def test_masks_reach_every_layer():
    class Masked(Stacked):
        def __init__(self):
            super().__init__()
            self.mask = layers.Masking()

        def call(self, x, training=None):
            x = self.first(self.mask(x))
            for block in self.blocks:
                x = block(x, training=training)
            return self.head(x)

    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(ROWS, 5, WIDTH)).astype("float32")
    x[:, 3:] = 0
    y = np.zeros((ROWS, 5), "int64")
    weights = []
    for scan_layers in (True, False):
        keras.utils.set_random_seed(0)
        model = Masked()
        model(x)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        trainer = fa.Trainer(
            model,
            keras.optimizers.SGD(0.05),
            loss,
            gradient_accumulation_steps=2,
            scan_layers=scan_layers,
            jit_compile=True,
        )
        trainer.fit(x, y, batch_size=6, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for got, want in zip(*weights, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-6)
