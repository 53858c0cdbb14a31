"""Slots and weights that are stored in fewer bytes, and updated in float32."""

import itertools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from every_optimizer import KERAS

import fastaccum as fa
from fastaccum.adapters import storage as storages
from fastaccum.adapters.storage import Storage
from fastaccum.basics.attributes import raw
from fastaccum.families import adapt_optimizer
from fastaccum.kernels.block_code import BLOCK, Blocks, decode

ELEMENTWISE = (
    "SGD",
    "momentum",
    "Adam",
    "AdamW",
    "Adamax",
    "Nadam",
    "Adagrad",
    "Adadelta",
    "RMSprop, not centered",
    "Lion",
)
SHAPES = {"kernel": (64, 72), "same": (64, 72), "odd": (65, 67), "bias": (72,)}


def make_variables(dtype="float32"):
    rng = np.random.default_rng(0)
    return [
        keras.Variable(rng.normal(size=shape).astype("float32"), dtype=dtype, name=name)
        for name, shape in SHAPES.items()
    ]


def make_gradients(step):
    rng = np.random.default_rng(step)
    scale = np.exp(rng.normal())
    return [tf.constant(rng.normal(size=shape) * scale, tf.float32) for shape in SHAPES.values()]


MAKERS = {
    **KERAS,
    "RMSprop, not centered": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5),
}


def built(make_optimizer, storage, dtype="float32", jit=True):
    variables = make_variables(dtype)
    optimizer = adapt_optimizer(make_optimizer())
    optimizer.build(variables, storage)

    @tf.function(jit_compile=jit, autograph=False)
    def step(gradients, ok):
        optimizer.apply(gradients, variables, ok)

    return optimizer, variables, step


def everything(optimizer, variables):
    return [raw(v).numpy().tobytes() for v in [*variables, *optimizer.variables]]


def slots_of(optimizer):
    """Returns the slots as float32 arrays, in the order in which Keras makes them."""
    without_scales = storages.without_scales(optimizer.optimizer)
    return [tf.cast(storages.read(v), tf.float32).numpy() for v in without_scales]


def set_slots(optimizer, values):
    for variable, value in zip(storages.without_scales(optimizer.optimizer), values, strict=True):
        storages.assign(variable, tf.constant(value))


def assert_rounded(rounded, exact, dtype):
    """Asserts that each number is as near as its format allows: its own place, or its block's."""
    if dtype == "int8" and exact.ndim > 1 and exact.size >= storages.MIN_CODED:
        blocks = np.pad(exact.ravel(), (0, -exact.size % BLOCK)).reshape(-1, BLOCK)
        largest = np.abs(blocks).max(1, keepdims=True)
        allowed = 0.0069 * np.broadcast_to(largest, blocks.shape).ravel()[: exact.size]
        allowed = allowed.reshape(exact.shape)
    elif dtype == "bfloat16":
        allowed = 2**-7 * np.abs(exact)
    else:
        allowed = 1e-5 * np.abs(exact)
    assert np.all(np.abs(rounded - exact) <= allowed + 1e-6 * np.abs(exact).max() + 1e-30)


# The update.


ALWAYS = {
    ("AdamW", "int8", True),
    ("Nadam", "bfloat16", True),
    ("RMSprop, not centered", "int8", False),
}
UPDATES = [
    pytest.param(*case, marks=[] if case in ALWAYS else [pytest.mark.slow])
    for case in itertools.product(ELEMENTWISE, ("bfloat16", "int8"), (True, False))
]


@pytest.mark.parametrize(("name", "dtype", "jit"), UPDATES)
def test_an_update_is_that_of_float32_slots_with_the_stored_values(name, dtype, jit):
    stored, variables, step = built(MAKERS[name], Storage(dtype, True), jit=jit)
    plain, copies, plain_step = built(MAKERS[name], Storage(), jit=jit)
    for number in range(3):
        set_slots(plain, slots_of(stored))
        for copy, variable in zip(copies, variables, strict=True):
            copy.assign(variable)
        before = [v.numpy() for v in variables]
        step(make_gradients(number), tf.constant(True))
        plain_step(make_gradients(number), tf.constant(True))

        for variable, copy, old in zip(variables, copies, before, strict=True):
            size = np.abs(copy.numpy() - old).max()
            np.testing.assert_allclose(
                variable.numpy(), copy.numpy(), rtol=2.5e-7, atol=3e-6 * size
            )
        # And the slots are the new float32 ones, rounded.
        for rounded, exact in zip(slots_of(stored), slots_of(plain), strict=True):
            assert_rounded(rounded, exact, dtype)


def test_sums_in_int8_are_warned_of():
    with pytest.warns(UserWarning, match="Adagrad adds up squared gradients"):
        built(KERAS["Adagrad"], Storage("int8", True))


@pytest.mark.filterwarnings("ignore:Adagrad adds up")
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_slots_begin_as_keras_makes_them(dtype):
    """Adagrad's begin at 0.1."""
    stored, _, _ = built(KERAS["Adagrad"], Storage(dtype, True))
    plain, _, _ = built(KERAS["Adagrad"], Storage())
    begun = slots_of(plain)
    assert any(np.all(slot == np.float32(0.1)) for slot in begun)
    for rounded, exact in zip(slots_of(stored), begun, strict=True):
        assert_rounded(rounded, exact, dtype)


def test_bfloat16_weights_with_int8_slots_are_rounded_to_nearest_if_told():
    _, variables, step = built(KERAS["AdamW"], Storage("int8", False), "bfloat16")
    _, copies, plain_step = built(KERAS["AdamW"], Storage())
    for copy, variable in zip(copies, variables, strict=True):
        copy.assign(tf.cast(variable, tf.float32))
    gradients = make_gradients(0)
    step([tf.cast(tf.cast(g, tf.bfloat16), tf.float32) for g in gradients], tf.constant(True))
    plain_step([tf.cast(tf.cast(g, tf.bfloat16), tf.float32) for g in gradients], tf.constant(True))
    for variable, copy in zip(variables, copies, strict=True):
        nearest = tf.cast(tf.cast(copy, tf.bfloat16), tf.float32).numpy()
        found = tf.cast(variable, tf.float32).numpy()
        assert np.mean(found != nearest) < 1e-3  # where float32 rounding crosses a middle


@pytest.mark.parametrize(
    "name", ["Lamb", *(pytest.param(n, marks=pytest.mark.slow) for n in ("Muon", "Adafactor"))]
)
def test_other_optimizers_of_keras_train_bfloat16_weights(name):
    optimizer, variables, step = built(KERAS[name], Storage("float32", True), "bfloat16")
    assert optimizer.rounds_weights
    before = [raw(v).numpy() for v in variables]
    step(make_gradients(0), tf.constant(True))
    assert all(not np.array_equal(raw(v), old) for v, old in zip(variables, before, strict=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_slots_are_stored_in_the_dtype(dtype):
    optimizer, _, _ = built(KERAS["AdamW"], Storage(dtype, True))
    kept = {}
    for slot in optimizer.optimizer.variables:
        kept[slot.name] = (keras.backend.standardize_dtype(slot.dtype), tuple(slot.shape))
    coded = {
        "kernel_momentum": (64, 72),
        "odd_momentum": (65, 67),
        "kernel_velocity": (64, 72),
    }
    for name, shape in coded.items():
        assert kept[name] == (dtype, shape)
    if dtype == "bfloat16":
        assert kept["bias_momentum"] == ("bfloat16", (72,))
    else:
        assert kept["kernel_momentum_scales"] == ("float32", (18,))
        assert kept["odd_velocity_scales"] == ("float32", (18,))
        assert kept["bias_momentum"] == ("float32", (72,))


@pytest.mark.parametrize(
    "name", ["AdamW", *(pytest.param(n, marks=pytest.mark.slow) for n in ("Adam, EMA", "Nadam"))]
)
@pytest.mark.parametrize(
    ("storage", "dtype"),
    [
        (Storage("bfloat16", True), "float32"),
        (Storage("int8", True), "float32"),
        (Storage("float32", True), "bfloat16"),
        (Storage("int8", True), "bfloat16"),
    ],
)
def test_a_skipped_step_moves_no_byte(name, storage, dtype):
    make = KERAS[name]
    if dtype == "bfloat16" and "EMA" in name:
        make = KERAS["momentum"]
    optimizer, variables, step = built(make, storage, dtype)
    step(make_gradients(0), tf.constant(True))
    before = everything(optimizer, variables)
    nan = [g * np.nan for g in make_gradients(1)]
    step(nan, tf.constant(False))
    assert everything(optimizer, variables) == before
    step(make_gradients(1), tf.constant(True))
    after = everything(optimizer, variables)
    assert after != before
    # The same step from the same state has the same bits: the random numbers are the step's.
    again, copies, again_step = built(make, storage, dtype)
    for number in range(2):
        again_step(make_gradients(number), tf.constant(True))
    assert everything(again, copies) == after


def test_each_slot_and_weight_is_rounded_by_numbers_of_its_own():
    """Two weights of one shape with the same gradient, and two steps, are rounded apart."""
    optimizer, variables, step = built(KERAS["AdamW"], Storage("bfloat16", True), "bfloat16")
    variables[1].assign(variables[0])
    gradients = make_gradients(0)
    gradients[1] = gradients[0]
    step(gradients, tf.constant(True))
    first, second = (raw(v).numpy().astype("float32") for v in variables[:2])
    assert 0.2 < np.mean(first != second) < 0.8
    m, v = (raw(s[0]).numpy().astype("float32") for s in _moments(optimizer))
    other_m, _ = (raw(s[1]).numpy().astype("float32") for s in _moments(optimizer))
    assert 0.2 < np.mean(m != other_m) < 0.8
    # m is 0.1 g and v 0.001 g**2: up or down by coins of their own.
    g = gradients[0].numpy()
    m_up = np.abs(m) > np.abs(0.1 * g)
    v_up = v > 0.001 * g**2
    w_up = np.abs(first) > np.abs(second)
    assert abs(np.corrcoef(m_up.ravel(), v_up.ravel())[0, 1]) < 0.08
    assert abs(np.corrcoef(m_up.ravel(), w_up.ravel())[0, 1]) < 0.08
    # The same update as the second step, from the same state.
    for slot in itertools.chain(*_moments(optimizer)):
        slot.assign(tf.zeros_like(slot))
    step(gradients, tf.constant(True))
    again = raw(_moments(optimizer)[0][0]).numpy().astype("float32")
    assert 0.2 < np.mean(again != m) < 0.8


def _moments(optimizer):
    return vars(optimizer.optimizer)["_momentums"], vars(optimizer.optimizer)["_velocities"]


# What cannot be stored so.


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Lamb", "Lamb computes Sum of a weight or a slot"),
        ("Adafactor", "Adafactor computes Mean of a weight or a slot"),
        ("Muon", "Muon computes "),
        ("Multi", "MultiOptimizer has several optimizers"),
        ("RMSprop", "RMSprop has centered=True"),
        ("Ftrl", "Ftrl computes weights from its slots"),
        ("ScheduleFreeAdamW", "ScheduleFreeAdamW computes weights from its slots"),
    ],
)
def test_other_optimizers_are_refused_by_name_before_a_weight_moves(name, message):
    with pytest.raises(ValueError, match=message):
        _, variables, step = built(KERAS[name], Storage("int8", True))
        before = [v.numpy() for v in variables]
        try:
            step(make_gradients(0), tf.constant(True))
        finally:
            for variable, value in zip(variables, before, strict=True):
                assert np.array_equal(variable, value)


def test_an_optimizer_is_refused_on_weights_that_are_too_small_for_int8_as_well():
    """What a small model says holds for the large one."""
    small = [keras.Variable(tf.ones([8, 8]), name="small")]
    optimizer = adapt_optimizer(KERAS["Lamb"]())
    optimizer.build(small, Storage("int8", True))
    with pytest.raises(ValueError, match="Lamb computes Sum of a weight or a slot"):
        tf.function(lambda: optimizer.apply([tf.ones([8, 8])], small, tf.constant(True)))()


def test_what_was_refused_once_is_refused_again():
    optimizer = adapt_optimizer(KERAS["Ftrl"]())
    for _ in range(2):
        with pytest.raises(ValueError, match="Ftrl computes weights from its slots"):
            optimizer.build(make_variables(), Storage("int8", True))
    assert not optimizer.trained


def test_float64_weights_are_refused():
    optimizer = adapt_optimizer(KERAS["AdamW"]())
    with pytest.raises(ValueError, match=r"optimizer_state_dtype='int8': variable .* is float64"):
        optimizer.build(make_variables("float64"), Storage("int8", True))
    assert not optimizer.optimizer.built


class Own(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, gradient * learning_rate)


class Plain(keras.optimizers.SGD):
    """A class of the user's own that overrides nothing."""


class Float32Slots(keras.optimizers.SGD):
    """Keeps float32 slots of weights in fewer bytes, as Keras would not."""

    def add_variable(self, *args, **options):
        return super().add_variable(*args, **(options | {"dtype": "float32"}))


def test_slots_that_the_user_made_stay_as_they_are():
    optimizer = Float32Slots(0.1, momentum=0.9)
    variables = make_variables("bfloat16")
    optimizer.build(variables)
    before = list(optimizer.momentums)
    adapt_optimizer(optimizer).build(variables)
    assert all(new is old for new, old in zip(optimizer.momentums, before, strict=True))


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Plain(0.1, momentum=0.9), "Plain is of a class of your own"),
        (lambda: Own(0.1), "Own overrides update_step"),
        (lambda: keras.optimizers.SGD(lambda: 0.1), "has a function as learning_rate"),
        (lambda: __import__("tf_keras").optimizers.Adam(), "is none of keras.optimizers"),
    ],
)
def test_an_optimizer_of_another_kind(make, problem):
    with pytest.raises(ValueError, match=f"optimizer_state_dtype='int8'.*{problem}"):
        adapt_optimizer(make()).build(make_variables(), Storage("int8", True))
    # Weights that are bfloat16 anyway are rounded as by Keras, with a warning.
    with pytest.warns(UserWarning, match=f"{problem}.*rounded to nearest"):
        optimizer = adapt_optimizer(make())
        optimizer.build(make_variables("bfloat16"), Storage("float32", True))
    assert optimizer.storage == Storage()


@pytest.mark.parametrize(("name", "warned"), [("AdamW", 1), ("Nadam", 1), ("Adamax", 0)])
def test_a_beta_that_is_1_in_bfloat16_is_warned_of(name, warned):
    """Keras's bias correction is 0 then."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, variables, step = built(KERAS[name], Storage("float32", False), "bfloat16")
        step(make_gradients(0), tf.constant(True))
    told = [w for w in caught if "beta_2=0.999 is 1" in str(w.message)]
    assert len(told) == warned
    moved = [
        np.any(raw(v).numpy() != raw(w).numpy())
        for v, w in zip(variables, make_variables("bfloat16"), strict=True)
    ]
    finite = all(np.isfinite(raw(v).numpy().astype("float32")).all() for v in variables)
    assert (all(moved) and finite) == (not warned)


@pytest.mark.parametrize("name", ["RMSprop, not centered", "Lion"])
def test_weights_of_one_row_are_stored_too(name):
    """Keras adds such tensors by a squeeze and BiasAdd."""
    row = [keras.Variable(tf.ones([1, 40]), name="row")]
    optimizer = adapt_optimizer(MAKERS[name]())
    optimizer.build(row, Storage("bfloat16", True))
    tf.function(lambda: optimizer.apply([tf.ones([1, 40])], row, tf.constant(True)))()
    assert np.all(row[0].numpy() < 1.0)


def dense_trainer(optimizer, policy="float32", **options):
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(72, activation="tanh", dtype=policy),
        keras.layers.Dense(64, activation="tanh", dtype=policy),
        keras.layers.Dense(1, dtype=policy),
    ]
    model = keras.Sequential([keras.Input((64,)), *layers])
    return fa.Trainer(model, optimizer, "mse", gradient_accumulation_steps=2, **options)


X = np.random.default_rng(0).normal(size=(128, 64)).astype("float32")
Y = np.sin(X[:, :4].sum(1, keepdims=True))


def fit(trainer, epochs=1, **options):
    return trainer.fit(X, Y, batch_size=16, epochs=epochs, verbose=0, shuffle=False, **options)


def test_float16_weights_are_refused():
    trainer = dense_trainer("adamw", "float16")
    with pytest.raises(ValueError, match=r'trained weights are float16.*"mixed_float16"'):
        fit(trainer)


# Quality.


def test_bfloat16_weights_train_where_rounding_to_nearest_does_not():
    make = lambda: keras.optimizers.AdamW(1e-3)  # noqa: E731
    exact = fit(dense_trainer(make()), epochs=12).history["loss"][-1]
    stochastic = fit(dense_trainer(make(), "bfloat16"), epochs=12).history["loss"][-1]
    nearest = fit(dense_trainer(make(), "bfloat16", stochastic_rounding=False), epochs=12).history[
        "loss"
    ][-1]
    assert stochastic < 1.1 * exact + 0.01
    assert nearest > 1.5 * stochastic


def test_bfloat16_slots_follow_where_rounding_to_nearest_stands_still():
    """The second moment of a gradient that shrinks: 0.999 v is nearest to v."""

    def velocity(storage):
        optimizer, _, step = built(lambda: keras.optimizers.Adam(1e-6), storage)
        ones = [tf.ones_like(g) for g in make_gradients(0)]
        step(ones, tf.constant(True))
        for _ in range(300):
            step([g * 1e-3 for g in ones], tf.constant(True))
        return raw(_moments(optimizer)[1][0]).numpy().astype("float64").mean()

    exact = 0.001 * 0.999**300
    assert velocity(Storage("bfloat16", True)) == pytest.approx(exact, rel=0.01)
    assert velocity(Storage("bfloat16", False)) > 1.2 * exact


# Keras's files, and Keras's own fit.


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_saved_model_is_one_that_keras_loads(dtype, tmp_path):
    trainer = dense_trainer(keras.optimizers.AdamW(1e-3), optimizer_state_dtype=dtype)
    fit(trainer)
    saved = slots_of(trainer._optimizer)
    trainer.model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert [v.dtype for v in loaded.optimizer.variables[2:]] == ["float32"] * 12
    for ours, theirs in zip(saved, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(ours, np.asarray(theirs, "float32"))
    loaded.fit(X, Y, verbose=0)

    # From the file into a Trainer of the same storage: the slots are converted once.
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    again = fa.Trainer(
        loaded, gradient_accumulation_steps=2, optimizer_state_dtype=dtype, jit_compile=True
    )
    more = fit(trainer)
    np.testing.assert_allclose(fit(again).history["loss"], more.history["loss"], rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_keras_own_fit_does_not_misread_the_slots(dtype):
    trainer = dense_trainer(keras.optimizers.AdamW(1e-3), optimizer_state_dtype=dtype)
    fit(trainer)
    with pytest.raises(ValueError, match="stores its slots in few bytes"):
        trainer.model.fit(X, Y, verbose=0)
    # A Trainer with float32 slots converts them, and Keras goes on from there.
    back = fa.Trainer(trainer.model, trainer.optimizer, "mse")
    fit(back)
    assert {v.dtype for v in trainer.optimizer.variables[2:]} == {"float32"}
    trainer.model.fit(X, Y, verbose=0)


def test_keras_own_fit_takes_an_optimizer_whose_slots_are_as_keras_makes_them():
    trainer = dense_trainer(keras.optimizers.SGD(0.01), optimizer_state_dtype="int8")
    fit(trainer)
    trainer.model.fit(X, Y, verbose=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_an_optimizer_loads_what_it_saves(dtype):
    optimizer, _, step = built(KERAS["AdamW"], Storage(dtype, True))
    step(make_gradients(0), tf.constant(True))
    store = {}
    optimizer.optimizer.save_own_variables(store)
    saved = slots_of(optimizer)
    set_slots(optimizer, [np.zeros_like(slot) for slot in saved])
    optimizer.optimizer.load_own_variables(store)
    for loaded, slot in zip(slots_of(optimizer), saved, strict=True):
        np.testing.assert_array_equal(loaded, slot)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_slots_that_are_there_are_converted_one_by_one(dtype):
    optimizer, variables, step = built(KERAS["Adam, EMA"], Storage())
    step(make_gradients(0), tf.constant(True))
    before = slots_of(optimizer)
    names = [v.name for v in optimizer.optimizer.variables]
    again = adapt_optimizer(optimizer.optimizer)
    again.build(variables, Storage(dtype, True))
    for old, new in zip(before, slots_of(again), strict=True):
        assert np.all(np.abs(old - new) <= 0.0069 * np.abs(old).max())
    averages = vars(optimizer.optimizer)["_model_variables_moving_average"]
    assert {v.dtype for v in averages} == {"float32"}
    adapt_optimizer(optimizer.optimizer).build(variables, Storage())
    assert [v.name for v in optimizer.optimizer.variables] == names


def test_codes_have_the_scales_that_their_numbers_need():
    optimizer, _, step = built(KERAS["AdamW"], Storage("int8", True))
    step(make_gradients(0), tf.constant(True))
    for slot in optimizer.optimizer.variables:
        scales = storages.scales_of(slot)
        if scales is not None:
            numbers = decode(Blocks(raw(slot), raw(scales))).numpy()
            flat = np.pad(numbers.ravel(), (0, -numbers.size % 256)).reshape(-1, 256)
            np.testing.assert_allclose(np.abs(raw(scales)), np.abs(flat).max(1), rtol=1e-6)


def test_a_trainer_whose_slots_were_converted_since_is_told():
    optimizer = keras.optimizers.AdamW(1e-3)
    first = dense_trainer(optimizer)
    fit(first)
    fit(fa.Trainer(first.model, optimizer, "mse", optimizer_state_dtype="int8"))
    with pytest.raises(ValueError, match=r"slots have moved .*\(optimizer_state_dtype\)"):
        fit(first)


def test_adapters_of_lora_have_their_slots_in_blocks_and_frozen_weights_none():
    x = np.random.default_rng(0).normal(size=(128, 600)).astype("float32")
    losses = {}
    for dtype in ("float32", "int8"):
        keras.utils.set_random_seed(0)
        dense = keras.layers.Dense(64)
        model = keras.Sequential([keras.Input((600,)), dense, keras.layers.Dense(1)])
        dense.enable_lora(8)
        frozen = raw(dense._kernel).numpy()
        trainer = fa.Trainer(
            model, "adam", "mse", gradient_accumulation_steps=2, optimizer_state_dtype=dtype
        )
        history = trainer.fit(x, Y, batch_size=16, epochs=8, shuffle=False, verbose=0)
        losses[dtype] = history.history["loss"]
        assert np.array_equal(raw(dense._kernel), frozen)
    slots = {tuple(v.shape): v.dtype for v in trainer.optimizer.variables}
    assert slots[600, 8] == "int8" and slots[8, 64] == "float32" and (600, 64) not in slots
    assert losses["int8"][-1] < 0.5 * losses["int8"][0]
    np.testing.assert_allclose(losses["int8"], losses["float32"], rtol=0.05)


def test_fit_says_that_weights_are_rounded_stochastically(capsys):
    for policy, said in (("bfloat16", 1), ("mixed_bfloat16", 0)):
        trainer = dense_trainer("sgd", policy)
        trainer.fit(X, Y, batch_size=16, verbose=2)
        trainer.fit(X, Y, batch_size=16, verbose=2)
        assert capsys.readouterr().out.count("rounded stochastically") == said


def test_gradients_of_bfloat16_weights_are_summed_without_rounding():
    """255 + 2 takes a bit more than a bfloat16 has: rounded, the sum would be 256."""
    dense = keras.layers.Dense(1, use_bias=False, dtype="bfloat16")
    model = keras.Sequential([keras.Input((1,)), dense])

    def prediction(y_true, y_pred):
        return tf.cast(y_pred[:, 0], tf.float32)

    for switch, gradient in ((True, 258 / 4), (False, 257 / 4)):
        trainer = fa.Trainer(
            model,
            keras.optimizers.SGD(0.0),
            prediction,
            gradient_accumulation_steps=2,
            fp32_weight_gradients=switch,
        )
        x = tf.constant([[[255.0], [2.0]], [[1.0], [0.0]]])
        assert float(trainer.train_step((x, x)).grad_norm) == gradient
