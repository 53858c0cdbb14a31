"""Every optimizer behind the one face: equal to its own eager update, and undone in full by a
select.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from every_optimizer import (
    KERAS,
    SINCE,
    TF_KERAS,
    TFA,
    VERSION,
    make_model,
    own_apply,
    raw,
    tf_keras,
)

import fastaccum as fa
from fastaccum.families import adapt_optimizer

STEPS = 3

ALL = {**KERAS, **TF_KERAS, **TFA}


def make_gradients(variables, steps=STEPS, seed=1):
    rng = np.random.default_rng(seed)
    return [
        [tf.constant(rng.normal(size=v.shape), tf.float32) for v in variables] for _ in range(steps)
    ]


def jitted(optimizer, variables):
    """The train step's use: an update in one XLA program, undone by a select where `ok` is
    false.
    """

    @tf.function(jit_compile=True, autograph=False)
    def step(gradients, ok):
        state = raw(variables) + optimizer.variables
        old = [tf.identity(v) for v in state]
        optimizer.apply(gradients, variables)
        for v, o in zip(state, old, strict=True):
            v.assign(tf.where(ok, v, o))

    return step


def reachable(root):
    """Every tf.Variable that attributes and containers lead to, by another way than the code under
    test.
    """
    found, seen, todo = [], set(), [root]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(
            item, (str, bytes, np.ndarray, tf.Tensor, type(tf), type)
        ):
            continue
        seen.add(id(item))
        if isinstance(item, tf.Variable):
            found.append(item)
        elif isinstance(item, dict):
            todo.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset)):
            todo.extend(item)
        elif type(item).__module__.split(".")[0] in (
            "keras",
            "tf_keras",
            "tensorflow_addons",
            __name__,
        ):
            todo.extend(vars(item).values() if hasattr(item, "__dict__") else ())
    return found


def snapshot(variables):
    return [v.numpy().tobytes() for v in variables]


def close(ours, theirs, **tolerance):
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(
            mine.numpy(), other.numpy(), **(tolerance or {"rtol": 2e-5, "atol": 2e-6})
        )


OF_TF_KERAS = [n for n in TF_KERAS if n not in ("tf_keras Adam, EMA", "legacy Adam")]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in OF_TF_KERAS else ()) for name in ALL],
)
def test_an_update_equals_the_optimizers_own_and_a_skip_leaves_every_bit(name):
    ours, theirs = make_model().trainable_variables, make_model().trainable_variables
    reference = ALL[name]()
    optimizer = adapt_optimizer(ALL[name]())
    optimizer.build(ours)
    held = optimizer.variables
    assert len({id(v) for v in held}) == len(held)
    assert not {id(v) for v in held} & {id(v) for v in raw(ours)}
    assert all(v.dtype != tf.int32 for v in held), "an int32 variable lives on the host"

    step = jitted(optimizer, ours)
    everything = list(
        {id(v): v for v in [*raw(ours), *held, *reachable(optimizer.optimizer)]}.values()
    )
    nan = [tf.fill(v.shape, np.nan) for v in ours]
    for gradients in make_gradients(ours):
        before = snapshot(everything)
        step(nan, tf.constant(False))
        assert snapshot(everything) == before
        step(gradients, tf.constant(True))
        own_apply(reference, gradients, theirs)
        changed = {
            id(v) for v, b in zip(everything, before, strict=True) if v.numpy().tobytes() != b
        }
        assert changed <= {id(v) for v in [*raw(ours), *held]}
    assert int(optimizer.iterations) == STEPS
    close(raw(ours), raw(theirs))

    # What the program captured says the same without a look into the optimizer.
    function = step.get_concrete_function(nan, tf.constant(True))
    known = {id(v.handle) for v in [*raw(ours), *held]}
    captured = [c for c in function.captured_inputs if c.dtype == tf.resource]
    constants = [v for v in function.graph.variables if id(v.handle) not in known]
    assert all(id(c) in known or any(c is v.handle for v in constants) for c in captured)
    assert not constants, f"{[v.name for v in constants]} missing from Optimizer.variables"


def test_the_skip_test_sees_a_variable_left_out():
    """A wrapper's own `variables()` lacks the inner optimizer's slots: a select over it undoes no
    step.
    """
    variables = make_model().trainable_variables
    optimizer = adapt_optimizer(TFA["Lookahead"]())
    optimizer.build(variables)
    listed = {id(v) for v in optimizer.optimizer.variables()}
    missed = [v for v in optimizer.variables if id(v) not in listed]
    before = snapshot(missed)
    optimizer.apply(make_gradients(variables)[0], variables)
    assert snapshot(missed) != before


@pytest.mark.parametrize(
    "name",
    [
        "AdamW",
        "Adam, EMA",
        "tf_keras Adam, EMA",
        "legacy Nadam",
        "LAMB",
        "Lookahead",
        "MovingAverage",
        "SWA",
    ],
)
def test_several_updates_in_one_loop(name):
    ours, theirs = make_model().trainable_variables, make_model().trainable_variables
    reference, optimizer = ALL[name](), adapt_optimizer(ALL[name]())
    optimizer.build(ours)
    gradients = make_gradients(ours)

    @tf.function(jit_compile=True, autograph=False)
    def run(stacked):
        def body(i):
            optimizer.apply([g[i] for g in stacked], ours)
            return i + 1

        tf.while_loop(lambda i: i < STEPS, body, [tf.constant(0)], maximum_iterations=STEPS)

    run([tf.stack(g) for g in zip(*gradients, strict=True)])
    for g in gradients:
        own_apply(reference, g, theirs)
    close(raw(ours), raw(theirs))


@pytest.mark.parametrize(
    "name", ["SGD", "AdamW", "Multi", "tf_keras SGD", "legacy Adam", "LAMB", "MovingAverage"]
)
def test_a_variable_without_a_gradient_is_left_alone(name, recwarn):
    variables = make_model().trainable_variables
    optimizer = adapt_optimizer(ALL[name]())
    optimizer.build(variables)
    (gradients,) = make_gradients(variables, steps=1)
    before = snapshot(raw(variables))
    optimizer.apply([None, gradients[1], None, gradients[3]], variables)
    changed = [b != a for b, a in zip(before, snapshot(raw(variables)), strict=True)]
    assert changed == [False, True, False, True]
    assert int(optimizer.iterations) == 1
    assert not [w for w in recwarn if "Gradients do not exist" in str(w.message)]


def test_no_gradient_at_all():
    variables = make_model().trainable_variables
    optimizer = adapt_optimizer("sgd")
    optimizer.build(variables)
    with pytest.raises(ValueError, match="no variable has a gradient"):
        optimizer.apply([None] * len(variables), variables)


@pytest.mark.parametrize("name", [n for n in KERAS if n != "Multi"] + ["tf_keras RMSprop", "LAMB"])
def test_plain_variables(name):
    """The functional core gives tf.Variables, here with the slashes and the `embedding` of real
    programs' names.
    """
    model = make_model().trainable_variables
    names = ["block/a/kernel", "block/a/bias", "embedding_b/kernel", "b/bias"]
    ours = [tf.Variable(v.value, name=n) for v, n in zip(model, names, strict=True)]
    reference, optimizer = ALL[name](), adapt_optimizer(ALL[name]())
    if name == "Muon":
        # It treats embeddings by AdamW, by their name: the second kernel, which the model calls
        # otherwise.
        reference.exclude_layers = ["b/kernel"]
    optimizer.build(ours)
    for gradients in make_gradients(ours):
        optimizer.apply(gradients, ours)
        own_apply(reference, gradients, model)
    close(ours, raw(model))


@pytest.mark.parametrize("name", ["SGD", "Multi", "tf_keras SGD", "LAMB", "Lookahead"])
def test_constraints_hold(name):
    variables = make_model().trainable_variables
    variables[0].constraint = keras.constraints.NonNeg()
    optimizer = adapt_optimizer(ALL[name]())
    optimizer.build(variables)
    jitted(optimizer, variables)(make_gradients(variables)[0], tf.constant(True))
    assert variables[0].numpy().min() == 0.0
    assert variables[2].numpy().min() < 0.0


def test_the_constraint_of_a_plain_variable_holds():
    variable = tf.Variable([-1.0, 1.0], constraint=tf.nn.relu)
    optimizer = adapt_optimizer("sgd")
    optimizer.build([variable])
    optimizer.apply([tf.zeros(2)], [variable])
    assert variable.numpy().tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    "name, dtype",
    [
        *[(name, "float16") for name in [*KERAS, "tf_keras SGD", "legacy Adam", "LAMB"]],
        *[(name, "bfloat16") for name in ["AdamW", "Muon", "tf_keras SGD", "tfa AdamW"]],
        *[(name, "float64") for name in ["AdamW", "tf_keras SGD", "tfa AdamW"]],
    ],
)
def test_other_variable_dtypes(name, dtype):
    values = [[[0.01, 0.02]] * 3, [0.03, -0.04]]
    variables = [keras.Variable(v, dtype=dtype, name=f"v{i}") for i, v in enumerate(values)]
    optimizer = adapt_optimizer(ALL[name]())
    optimizer.build(variables)
    copies = [keras.Variable(v, dtype=dtype, name=f"c{i}") for i, v in enumerate(values)]
    reference = ALL[name]()
    for gradients in make_gradients(variables):
        optimizer.apply(gradients, variables)
        own_apply(reference, [tf.cast(g, dtype) for g in gradients], copies)
    assert all(np.isfinite(v.numpy().astype("float32")).all() for v in variables)
    # Keras 3 has the float32 gradient here, and rounds later than with the rounded one.
    precision = {"float16": 2**-10, "bfloat16": 2**-7, "float64": 2**-23}[dtype]
    for mine, other in zip(variables, copies, strict=True):
        np.testing.assert_allclose(
            mine.numpy().astype("float64"),
            other.numpy().astype("float64"),
            rtol=8 * precision,
            atol=precision,
        )


def test_a_keras_schedule_drives_an_addons_optimizer():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    for make in (
        lambda rate: fa.addons.optimizers.SGDW(0.0, rate),
        lambda rate: fa.addons.optimizers.Lookahead(tf_keras().legacy.SGD(rate), sync_period=100),
    ):
        variable = tf.Variable(1.0)
        optimizer = adapt_optimizer(make(schedule))
        optimizer.build([variable])
        step = jitted(optimizer, [variable])
        for _ in range(STEPS):
            step([tf.constant(1.0)], tf.constant(True))
        np.testing.assert_allclose(variable.numpy(), 1 - 0.1 - 0.05 - 0.025, rtol=1e-6)


def test_an_integer_hyperparameter_is_no_int32_variable():
    for optimizer in (
        fa.addons.optimizers.SGDW(1, 1),
        tf_keras().legacy.SGD(1),
        fa.addons.optimizers.COCOB(alpha=100),
    ):
        adapter = adapt_optimizer(optimizer)
        adapter.build([tf.Variable(1.0)])
        assert tf.int32 not in {v.dtype for v in reachable(optimizer)}


def test_a_wrapper_in_a_wrapper_counts_every_update():
    """tensorflow-addons links the counters for one level only; Adam would stay in its first step
    for ever.
    """
    ours, theirs = make_model().trainable_variables, make_model().trainable_variables
    adam = keras.optimizers.Adam(0.1)
    optimizer = adapt_optimizer(
        fa.addons.optimizers.MovingAverage(
            fa.addons.optimizers.Lookahead(tf_keras().legacy.Adam(0.1), sync_period=100),
            average_decay=0.5,
        )
    )
    optimizer.build(ours)
    step = jitted(optimizer, ours)
    for gradients in make_gradients(ours):
        step(gradients, tf.constant(True))
        adam.apply(gradients, theirs)
    close(raw(ours), raw(theirs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["Adam, EMA", "tf_keras Adam, EMA", "SGD", "MovingAverage"])
def test_finalize_is_what_keras_does_at_the_end_of_fit(name):
    ours, theirs = make_model().trainable_variables, make_model().trainable_variables
    reference, optimizer = ALL[name](), adapt_optimizer(ALL[name]())
    optimizer.build(ours)
    for gradients in make_gradients(ours):
        optimizer.apply(gradients, ours)
        own_apply(reference, gradients, theirs)
    before = snapshot(raw(ours))
    optimizer.finalize(ours)
    if hasattr(reference, "finalize_variable_values"):
        reference.finalize_variable_values(raw(theirs))
    close(raw(ours), raw(theirs))
    assert (snapshot(raw(ours)) != before) == ("EMA" in name)


@pytest.mark.parametrize("name", ["AdamW", "Multi", "tf_keras SGD", "legacy Adam", "Lookahead"])
def test_build_again(name):
    variables, others = make_model().trainable_variables, make_model(1).trainable_variables
    optimizer = adapt_optimizer(ALL[name]())
    optimizer.build(variables)
    first = optimizer.variables
    optimizer.build(list(variables))
    assert [id(v) for v in optimizer.variables] == [id(v) for v in first]
    again = adapt_optimizer(optimizer.optimizer)  # a second trainer on the same model and optimizer
    again.build(variables)
    assert {id(v) for v in again.variables} == {id(v) for v in first}
    for adapter in (optimizer, adapt_optimizer(optimizer.optimizer)):
        with pytest.raises(ValueError, match="built on other variables"):
            adapter.build(others)


def test_names():
    assert isinstance(adapt_optimizer("AdamW").optimizer, keras.optimizers.AdamW)
    assert isinstance(adapt_optimizer("lamb").optimizer, keras.optimizers.Lamb)
    adapter = adapt_optimizer("sgd")
    assert adapt_optimizer(adapter) is adapter
    with pytest.raises(
        ValueError, match=r"'adamm' is not a name of keras.optimizers\. Did you mean 'adam'"
    ):
        adapt_optimizer("adamm")
    with pytest.raises(ValueError, match=r"'zzz' is not a name of keras.optimizers\. Pass others"):
        adapt_optimizer("zzz")


def test_a_name_for_a_tf_keras_model_is_tf_keras_s(tmp_path):
    import tf_keras as k

    model = make_tf_keras_model()
    trainer = fa.Trainer(model, "adam", "mse", jit_compile=False)
    assert type(trainer.optimizer) is k.optimizers.Adam
    x = np.ones([2, *model.input_shape[1:]])
    # by an attribute that Keras 3 lacks
    rate = k.callbacks.LearningRateScheduler(lambda epoch: 0.5)
    trainer.fit(x, model(x), verbose=0, callbacks=[rate])
    model.save(tmp_path / "model.keras")
    loaded = k.models.load_model(tmp_path / "model.keras").optimizer
    assert (int(loaded.iterations), float(loaded.learning_rate)) == (1, 0.5)
    with pytest.raises(ValueError, match=r"'muon' is not a name of tf_keras\.optimizers"):
        fa.Trainer(model, "muon", "mse")


def test_not_an_optimizer_or_none_that_can_work():
    with pytest.raises(TypeError, match="SGD is a class: call it"):
        adapt_optimizer(keras.optimizers.SGD)
    for thing in (0.1, None, keras.losses.MeanSquaredError(), {"class_name": "Adam"}):
        with pytest.raises(TypeError, match=f"is of type {type(thing).__name__}"):
            adapt_optimizer(thing)
    with pytest.raises(ValueError, match=r"Nadam counts updates in Python.*legacy\.Nadam"):
        adapt_optimizer(tf_keras().Nadam(0.1))


def test_optimizers_that_accumulate_or_scale_by_themselves():
    import tf_keras.mixed_precision

    sgd = keras.optimizers.SGD
    remedy = r"SGD has gradient_accumulation_steps=4.*pass Trainer\(gradient_accumulation_steps=4\)"
    with pytest.raises(ValueError, match=remedy):
        adapt_optimizer(sgd(0.1, gradient_accumulation_steps=4))
    remedy = r"loss_scale_factor=8.*pass Trainer\(loss_scale=fastaccum\.StaticLossScale\(8\.0\)\)"
    with pytest.raises(ValueError, match=remedy):
        adapt_optimizer(sgd(0.1, loss_scale_factor=8.0))
    scaled = tf_keras.mixed_precision.LossScaleOptimizer
    for optimizer in (
        keras.optimizers.LossScaleOptimizer(sgd(0.1)),
        scaled(tf_keras.optimizers.SGD(0.1)),
        scaled(tf_keras.optimizers.legacy.SGD(0.1)),
    ):
        with pytest.raises(
            ValueError, match=r"LossScaleOptimizer\w* scales the loss.*pass the optimizer inside"
        ):
            adapt_optimizer(optimizer)


@pytest.mark.skipif(SINCE["Multi"] > VERSION, reason="of a later Keras")
def test_optimizers_in_a_multi_optimizer_that_accumulate_by_themselves():
    sgd = keras.optimizers.SGD
    inner = sgd(0.1, gradient_accumulation_steps=4)
    accumulating = keras.optimizers.OptimizerMap(sgd(0.1), {".*bias": inner})
    with pytest.raises(ValueError, match="gradient_accumulation_steps=4"):
        adapt_optimizer(keras.optimizers.MultiOptimizer(accumulating))
    late = adapt_optimizer(
        keras.optimizers.MultiOptimizer(lambda v: sgd(0.1, gradient_accumulation_steps=4))
    )
    with pytest.raises(ValueError, match="gradient_accumulation_steps=4"):
        late.build(make_model().trainable_variables)


def test_float8_variables_are_refused():
    variable = keras.Variable(1.0, name="scale")
    variable.overwrite_with_gradient = True
    with pytest.raises(ValueError, match="float8"):
        adapt_optimizer("sgd").build([variable])


def test_the_xla_updates_of_tf_keras_on_a_gpu_compile_inside_the_step():
    """Compiles tf_keras's update of each variable inside the step, as tf_keras does itself on a
    machine with a GPU.
    """
    ours, theirs = make_model().trainable_variables, make_model().trainable_variables
    optimizer, reference = adapt_optimizer(tf_keras().Adam(0.1)), tf_keras().Adam(0.1)
    optimizer.optimizer.jit_compile = True
    optimizer.build(ours)
    step = jitted(optimizer, ours)
    for gradients in make_gradients(ours):
        step(gradients, tf.constant(True))
        own_apply(reference, gradients, theirs)
    close(raw(ours), raw(theirs))


def make_tf_keras_model():
    import tf_keras as k

    model = k.Sequential(
        [k.Input((3,)), k.layers.Dense(5), k.layers.ReLU(), k.layers.Dense(2), k.layers.Dense(1)]
    )
    rng = np.random.default_rng(0)
    for v in model.weights:
        v.assign(rng.normal(size=v.shape))
    return model


def test_the_multi_optimizer_of_tensorflow_addons_is_refused():
    """Refuses it, and trains the same with the optimizer that the error names, on a tf_keras model
    too.
    """
    legacy = tf_keras().legacy
    fused, reference = make_tf_keras_model(), make_tf_keras_model()
    first, _, second, last = reference.layers
    pairs = [(legacy.SGD(0.1), first), (legacy.SGD(0.2), [second, last])]
    theirs = fa.addons.optimizers.MultiOptimizer(pairs)
    for optimizer in (theirs, fa.addons.optimizers.Lookahead(theirs)):
        with pytest.raises(
            ValueError, match=r"MultiOptimizer has .* use keras\.optimizers\.MultiOptimizer, or one"
        ):
            fa.Trainer(reference, optimizer, "mse")
    if SINCE["Multi"] > VERSION:
        return
    x = np.random.default_rng(1).normal(size=(12, 3)).astype("float32")
    reference.compile(theirs, "mse", run_eagerly=True)
    reference.fit(x, x[:, :1], batch_size=12, epochs=3, shuffle=False, verbose=0)
    sgd = keras.optimizers.SGD
    named = keras.optimizers.OptimizerMap(
        sgd(0.2), {fused.layers[0].name + "_(kernel|bias)": sgd(0.1)}
    )
    trainer = fa.Trainer(
        fused, keras.optimizers.MultiOptimizer(named), "mse", gradient_accumulation_steps=3
    )
    trainer.fit(x, x[:, :1], batch_size=4, epochs=3, shuffle=False, verbose=0)
    close(fused.weights, reference.weights)


def test_trainable_switched_after_building():
    """Tells the user to switch `trainable` back, or to make a new optimizer."""
    model = make_model()
    model.layers[0].trainable = False
    optimizer = adapt_optimizer("sgd")
    optimizer.build(model.trainable_variables)
    model.layers[0].trainable = True
    with pytest.raises(
        ValueError,
        match=r"without '.*kernel.*: make a new one; or, if the `trainable` .* switch it back",
    ):
        optimizer.build(model.trainable_variables)
    model.layers[0].trainable = False
    optimizer.build(model.trainable_variables)


def test_slots_have_the_names_that_the_optimizer_gives_them():
    """Compares with the names of `apply_gradients`, which files of weights use."""
    names = []
    for build in (
        lambda o, v: adapt_optimizer(o).build([v]),
        lambda o, v: o.apply_gradients([(tf.ones(2), v)]),
    ):
        optimizer = fa.addons.optimizers.Lookahead(fa.addons.optimizers.LazyAdam(0.1))
        build(optimizer, tf.Variable([1.0, 2.0], name="w"))
        names.append([v.name for v in optimizer.weights])
    assert names[0] == names[1]


def test_what_an_optimizer_of_ones_own_overrides_is_called_or_refused():
    class Twice(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars):
            return super().apply_gradients([(2 * g, v) for g, v in grads_and_vars])

    class Scaled(keras.optimizers.SGD):
        def scale_loss(self, loss):
            return 3 * loss

    class Minimized(tf_keras().SGD):
        def compute_gradients(self, *arguments, **keywords):
            return super().compute_gradients(*arguments, **keywords)

    variable = keras.Variable([1.0])
    optimizer = adapt_optimizer(Twice(0.1))
    optimizer.build([variable])
    optimizer.apply([tf.constant([1.0])], [variable])
    np.testing.assert_allclose(variable, [0.8])
    for refused, method in ((Scaled(), "scale_loss"), (Minimized(), "compute_gradients")):
        with pytest.raises(ValueError, match=f"overrides {method}, which a train step never calls"):
            adapt_optimizer(refused)


def test_schedule_free_adamw_equals_its_formula():
    """Compares with Keras's eager `fit`, since the compiled one loses what `build` assigns to the
    slots.
    """
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(32, n)).astype("float32") for n in (6, 3))
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    weights = [w.astype("float64") for w in model.get_weights()]
    optimizer = KERAS["ScheduleFreeAdamW"]()
    fa.Trainer(model, optimizer, "mse", gradient_accumulation_steps=4, jit_compile=False).fit(
        x, y, batch_size=8, epochs=5, shuffle=False, verbose=0
    )
    rate, beta_1, beta_2 = 0.01, optimizer.beta_1, optimizer.beta_2
    z, v = [w.copy() for w in weights], [0.0, 0.0]
    for step in range(1, 6):
        error = 2.0 * (x @ weights[0] + weights[1] - y) / y.size
        for i, gradient in enumerate((x.T @ error, error.sum(0))):
            v[i] += (1.0 - beta_2) * (gradient**2 - v[i])
            z[i] = z[i] - rate * gradient / (
                np.sqrt(v[i] / (1.0 - beta_2**step)) + optimizer.epsilon
            )
            # with TensorFlow of the z that has moved
            mean = (weights[i] - (1.0 - beta_1) * z[i]) / beta_1
            mean += (z[i] - mean) / step
            weights[i] = z[i] + beta_1 * (mean - z[i])
    for ours, expected in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-6)
