"""`Trainer.fit`, `evaluate` and `predict` behave as Keras's, with train steps where Keras has
batches.
"""

import inspect
import itertools
import re
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa
from fastaccum.adapters import callbacks as fa_callbacks

pytestmark = pytest.mark.long

ROWS, BATCH, ACCUMULATION = 44, 4, 3
STEPS = 4  # ceil(44 / 12): the last has 8 rows, two thirds of a step

RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 4)).astype("float32")
Y = (X.sum(1, keepdims=True) + 1.0).astype("float32")
LABELS = RNG.integers(0, 3, size=ROWS)


def regressor(K=keras):
    K.utils.set_random_seed(1)
    return K.Sequential([K.Input((4,)), K.layers.Dense(3, activation="tanh"), K.layers.Dense(1)])


def classifier(*hidden, K=keras):
    K.utils.set_random_seed(1)
    return K.Sequential([K.Input((4,)), K.layers.Dense(6), *hidden, K.layers.Dense(3)])


def cross_entropy(K=keras):
    return K.losses.SparseCategoricalCrossentropy(from_logits=True)


def variables(trainer):
    optimizer = trainer.optimizer.variables
    return [*trainer.model.variables, *(optimizer() if callable(optimizer) else optimizer)]


def values(trainer):
    return [v.numpy() for v in variables(trainer)]


def assert_equal(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def assert_close(actual, expected, rtol=2e-5, atol=1e-6):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def updates(trainer):
    return int(trainer.optimizer.iterations.numpy())


def traces(trainer):
    return trainer._engine.compiled_execute.function.experimental_get_tracing_count()


def trainer_of(K, **options):
    optimizer = K.optimizers.SGD(0.05, momentum=0.9)
    return fa.Trainer(
        regressor(K), optimizer, "mse", ["mae"], gradient_accumulation_steps=ACCUMULATION, **options
    )


@pytest.fixture(scope="module")
def shared(K):
    """Returns one compiled Trainer for all tests, with its variables' values before training."""
    trainer = trainer_of(K, jit_compile=K is keras)
    trainer.evaluate(X[:BATCH], Y[:BATCH], batch_size=BATCH, verbose=0)  # builds it
    return trainer, values(trainer)


@pytest.fixture
def trainer(shared):
    trainer, start = shared
    for variable, value in zip(variables(trainer), start, strict=True):
        variable.assign(value)
    return trainer


def fit(trainer, x=X, y=Y, **options):
    return trainer.fit(x, y, **{"batch_size": BATCH, "verbose": 0, "shuffle": False, **options})


# fit


def test_history_has_every_log_once_an_epoch(trainer):
    history = fit(trainer, epochs=3, validation_data=(X[:8], Y[:8]))
    names = {"loss", "mae", "grad_norm", "loss_scale", "skipped_steps"}
    assert set(history.history) == names | {"val_loss", "val_mae"}
    assert all(len(log) == 3 for log in history.history.values())
    assert history.epoch == [0, 1, 2]
    assert trainer.model.history is history
    assert updates(trainer) == 3 * STEPS
    assert history.history["loss_scale"] == [1.0] * 3
    assert history.history["skipped_steps"] == [0] * 3


def test_fit_equals_keras_on_batches_of_a_whole_step(K, trainer):
    model = regressor(K)
    model.compile(K.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"], run_eagerly=True)
    expected = model.fit(X, Y, batch_size=ACCUMULATION * BATCH, epochs=2, verbose=0, shuffle=False)
    history = fit(trainer, epochs=2)
    assert_close(trainer.model.get_weights(), model.get_weights())
    for name in ("loss", "mae"):
        np.testing.assert_allclose(history.history[name], expected.history[name], rtol=1e-5)


def test_initial_epoch_is_where_counting_starts(trainer):
    assert fit(trainer, epochs=5, initial_epoch=3).epoch == [3, 4]
    assert updates(trainer) == 2 * STEPS


def test_nothing_is_left_to_do_after_the_last_epoch(trainer):
    before = values(trainer)
    assert fit(trainer, epochs=2, initial_epoch=2).history == {}
    assert_equal(values(trainer), before)


def test_a_second_fit_continues(K, trainer):
    fit(trainer, epochs=2)
    at_once, start = values(trainer), updates(trainer)
    for variable, value in zip(variables(trainer), [v * 0 for v in at_once], strict=True):
        variable.assign(value)
    trainer.model.set_weights(regressor(K).get_weights())
    trainer.optimizer.learning_rate = 0.05
    fit(trainer, epochs=1)
    fit(trainer, epochs=2, initial_epoch=1)
    assert updates(trainer) == start
    assert_equal(trainer.model.get_weights(), at_once[: len(trainer.model.weights)])


@pytest.mark.filterwarnings("ignore:.*ran out of data")
@pytest.mark.parametrize("steps_per_epoch", [1, 3, 6])
def test_steps_per_epoch_counts_train_steps_and_goes_on_where_it_stopped(
    K, trainer, steps_per_epoch
):
    """Ends an epoch with the data, as Keras does. Keras's batches are whole steps here."""
    if K is not keras and steps_per_epoch != 1:
        pytest.skip(
            "tf_keras begins the rows again in mid-epoch, Keras 3 ends the epoch, as a Trainer does"
        )
    model = regressor(K)
    model.compile(K.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"], run_eagerly=True)
    options = {"epochs": 3, "verbose": 0, "shuffle": False, "steps_per_epoch": steps_per_epoch}
    expected = model.fit(X, Y, batch_size=ACCUMULATION * BATCH, **options)
    history = fit(trainer, **{k: v for k, v in options.items() if k not in ("verbose", "shuffle")})
    assert updates(trainer) == int(model.optimizer.iterations)
    assert_close(trainer.model.get_weights(), model.get_weights())
    np.testing.assert_allclose(history.history["loss"], expected.history["loss"], rtol=1e-5)


def test_epochs_and_steps_are_limited_as_keras_config_says(trainer):
    keras.config.set_max_epochs(2)
    keras.config.set_max_steps_per_epoch(1)
    try:
        with pytest.warns(UserWarning) as said:
            history = fit(trainer, epochs=5, validation_data=(X, Y), validation_steps=3)
            loss, _ = trainer.evaluate(X, Y, BATCH, verbose=0)
    finally:
        keras.config.set_max_epochs(None)
        keras.config.set_max_steps_per_epoch(None)
    assert history.epoch == [0, 1]
    assert updates(trainer) == 2
    limited = [str(w.message).partition(",")[0] for w in said if "Limiting" in str(w.message)]
    assert limited == [
        f"Limiting {name}"
        for name in ("epochs to 2", "steps_per_epoch to 1", "steps to 1", "steps to 1")
    ]
    assert (
        history.history["val_loss"][-1]
        == loss
        == pytest.approx(trainer.evaluate(X[:BATCH], Y[:BATCH], verbose=0)[0])
    )


@pytest.mark.parametrize(
    ("steps_per_execution", "numbers"), [(1, [0, 2, 3, 5, 6, 8, 9, 11]), (2, [0, 5, 6, 11])]
)
def test_evaluate_numbers_batches(K, trainer, steps_per_execution, numbers):
    """11 batches in dispatches of 3 or 6: the first of each and, as in Keras, the last if it is
    full.
    """
    seen = []
    watch = K.callbacks.LambdaCallback()
    watch.on_test_batch_begin = watch.on_test_batch_end = lambda batch, logs: seen.append(batch)
    trainer.steps_per_execution = steps_per_execution
    try:
        at_once = trainer.evaluate(X, Y, BATCH, verbose=0, callbacks=[watch])
    finally:
        trainer.steps_per_execution = 1
    assert seen == numbers
    np.testing.assert_allclose(at_once, trainer.evaluate(X, Y, BATCH, verbose=0), rtol=1e-6)


def test_validation_split_holds_out_the_last_rows(K, trainer):
    split = fit(trainer, epochs=2, validation_split=0.25)
    weights = trainer.model.get_weights()
    other = trainer_of(K, jit_compile=K is keras)
    given = fit(other, X[:33], Y[:33], epochs=2, validation_data=(X[33:], Y[33:]))
    assert_equal(weights, other.model.get_weights())
    assert split.history == given.history


def test_validation_leaves_training_alone(K, trainer):
    fit(trainer, epochs=2)
    alone = trainer.model.get_weights()
    trainer.model.set_weights(regressor(K).get_weights())
    for slot in trainer.optimizer.variables:
        slot.assign(np.zeros(slot.shape))
    trainer.optimizer.learning_rate = 0.05
    fit(trainer, epochs=2, validation_data=(X[:9], Y[:9]))
    assert_equal(alone, trainer.model.get_weights())


@pytest.mark.parametrize("freq, epochs", [(2, [1, 3]), ([1, 4], [0, 3]), (3, [2])])
def test_validation_freq_picks_epochs(K, trainer, freq, epochs):
    seen = []
    watch = K.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: "val_loss" in logs and seen.append(epoch)
    )
    history = fit(
        trainer, epochs=4, validation_data=(X[:8], Y[:8]), validation_freq=freq, callbacks=[watch]
    )
    assert seen == epochs
    assert len(history.history["val_loss"]) == len(epochs)


def test_validation_steps_and_batch_size(trainer):
    history = fit(trainer, validation_data=(X, Y), validation_steps=2, validation_batch_size=4)
    expected = trainer.evaluate(X[:8], Y[:8], batch_size=8, verbose=0)
    np.testing.assert_allclose(history.history["val_loss"][0], expected[0], rtol=1e-6)


def test_validation_data_as_a_dataset_with_weights(trainer):
    weight = np.linspace(0.0, 2.0, ROWS).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((X, Y, weight)).batch(7)
    history = fit(trainer, validation_data=dataset)
    errors = (trainer.predict(X, verbose=0) - Y)[:, 0] ** 2
    np.testing.assert_allclose(history.history["val_loss"][0], np.mean(weight * errors), rtol=1e-5)


def test_shuffling_follows_the_global_seed(K, trainer):
    def trained(seed, **options):
        trainer.model.set_weights(regressor(K).get_weights())
        for slot in trainer.optimizer.variables:
            slot.assign(np.zeros(slot.shape))
        trainer.optimizer.learning_rate = 0.05
        K.utils.set_random_seed(seed)
        fit(trainer, epochs=2, **options)
        return trainer.model.get_weights()

    first = trained(5, shuffle=True)
    assert_equal(trained(5, shuffle=True), first)
    assert not np.array_equal(trained(6, shuffle=True)[0], first[0])
    in_order = trained(5, shuffle=False)
    assert not np.array_equal(in_order[0], first[0])
    assert_equal(trained(6, shuffle=False), in_order)


@pytest.mark.parametrize(
    "verbose, shown",
    [
        (0, "^$"),
        (1, r"Epoch 1/2\n(.|\n)*4/4.*loss: (.|\n)*Epoch 2/2"),
        (2, r"Epoch 1/2\n4/4 - .*loss: .*val_mae: "),
    ],
)
def test_verbose(trainer, capsys, verbose, shown):
    fit(trainer, epochs=2, verbose=verbose, validation_data=(X[:8], Y[:8]))
    output = capsys.readouterr().out
    assert re.search(shown, output), output
    if verbose == 2:
        assert output.count("4/4") == 2  # a line an epoch


def test_the_bar_ends_on_the_values_of_the_history(trainer, capsys):
    history = fit(trainer, verbose=1)
    shown = re.findall(r" loss: ([\d.]+)", capsys.readouterr().out)[-1]
    assert float(shown) == pytest.approx(history.history["loss"][0], abs=1e-4)


# class_weight


@pytest.fixture(scope="module")
def classifying(K):
    options = {"gradient_accumulation_steps": ACCUMULATION, "jit_compile": K is keras}
    return fa.Trainer(classifier(K=K), K.optimizers.SGD(0.1), cross_entropy(K), **options)


@pytest.mark.parametrize("labels", [LABELS, LABELS[:, None]], ids=["[rows]", "[rows, 1]"])
@pytest.mark.parametrize(
    "weight", [None, np.linspace(0.5, 2.0, ROWS).astype("float32")], ids=["alone", "weighted"]
)
def test_class_weight_multiplies_the_sample_weight(K, classifying, labels, weight):
    factors = {0: 0.5, 2: 3.0}  # class 1 keeps a factor of 1
    per_row = np.array([0.5, 1.0, 3.0])[LABELS] * (1.0 if weight is None else weight)
    classifying.model.set_weights(classifier(K=K).get_weights())
    fit(classifying, X, labels, class_weight=factors, sample_weight=weight)
    by_class = classifying.model.get_weights()
    classifying.model.set_weights(classifier(K=K).get_weights())
    fit(classifying, X, labels, sample_weight=per_row.astype("float32"))
    assert_close(by_class, classifying.model.get_weights())


def test_class_weight_of_tokens_counts_from_the_first_fit(K):
    model = K.Sequential([K.Input((5, 2)), K.layers.Dense(3)])
    start = model.get_weights()
    x, y = RNG.normal(size=(6, 5, 2)).astype("float32"), RNG.integers(0, 3, size=(6, 5))
    trainer = fa.Trainer(
        model, K.optimizers.SGD(0.01), "sparse_categorical_crossentropy", jit_compile=False
    )
    trainer.fit(x, y, class_weight={0: 5.0, 1: 0.25}, verbose=0)
    by_class = model.get_weights()
    model.set_weights(start)
    trainer.fit(x, y, sample_weight=np.array([5.0, 0.25, 1.0], "float32")[y], verbose=0)
    assert_close(by_class, model.get_weights())


# evaluate and predict


TOKENS = RNG.integers(0, 3, size=(ROWS, 2))


@pytest.mark.parametrize(
    "loss", [lambda loss: [loss], lambda loss: {"head": loss}], ids=["list", "dict"]
)
@pytest.mark.parametrize("nest", [lambda y: y, lambda y: [y]], ids=["y", "[y]"])
def test_class_weight_of_tokens_whatever_nest_the_loss_is_in(K, loss, nest):
    """Compares with token weights in Keras, whose own class_weight takes the class of the larger
    index.
    """

    def tagger():
        K.utils.set_random_seed(1)
        head = K.layers.Dense(3, name="head")
        return K.Sequential([K.Input((4,)), K.layers.Reshape((2, 2)), head])

    class_weight = {0: 0.5, 1: 2.0, 2: 3.0}
    sgd, losses = K.optimizers.SGD(0.01), loss(cross_entropy(K))
    trainer = fa.Trainer(tagger(), sgd, losses, gradient_accumulation_steps=11, jit_compile=False)
    trainer.fit(X, nest(TOKENS), batch_size=BATCH, class_weight=class_weight, verbose=0)
    full = tagger()
    full.compile("sgd", cross_entropy(K), run_eagerly=True)
    full.train_on_batch(
        X, TOKENS, sample_weight=np.vectorize(class_weight.get)(TOKENS).astype("float32")
    )
    assert_close(trainer.model.get_weights(), full.get_weights())


def test_class_weight_for_ambiguous_labels_asks_for_a_named_loss():
    trainer = fa.Trainer(classifier(), "sgd", "crossentropy", jit_compile=False)
    with pytest.raises(
        ValueError, match=r"y of shape \(44, 2\) holds class indices: name the loss"
    ):
        trainer.fit(X, TOKENS, class_weight={0: 2.0}, verbose=0)


@pytest.mark.parametrize("return_dict", [False, True])
def test_evaluate_returns_what_keras_does(K, trainer, return_dict):
    model = trainer.model
    if K is not keras:  # whose metrics a Trainer leaves as they are
        model = regressor(K)
        model.set_weights(trainer.model.get_weights())
        model.compile("sgd", "mse", metrics=["mae"])
    weight = np.linspace(0.0, 2.0, ROWS).astype("float32")
    options = {"batch_size": 11, "sample_weight": weight, "return_dict": return_dict, "verbose": 0}
    ours, keras_own = trainer.evaluate(X, Y, **options), model.evaluate(X, Y, **options)
    assert type(ours) is type(keras_own)
    if return_dict:
        assert set(ours) == set(keras_own)
        ours, keras_own = ([logs[name] for name in sorted(logs)] for logs in (ours, keras_own))
    np.testing.assert_allclose(ours, keras_own, rtol=1e-5)


def test_evaluate_is_exact_over_unequal_batches(trainer):
    whole = trainer.evaluate(X, Y, batch_size=ROWS, verbose=0)
    np.testing.assert_allclose(trainer.evaluate(X, Y, batch_size=10, verbose=0), whole, rtol=1e-5)


def test_evaluate_steps_count_batches(trainer):
    ours = trainer.evaluate(X, Y, batch_size=BATCH, steps=3, verbose=0)
    np.testing.assert_allclose(
        ours, trainer.evaluate(X[:12], Y[:12], batch_size=BATCH, verbose=0), rtol=1e-6
    )


def test_evaluate_moves_nothing(trainer):
    before = values(trainer)
    trainer.evaluate(X, Y, batch_size=BATCH, verbose=0)
    assert_equal(values(trainer), before)


def test_evaluate_shows_running_values(K, trainer, capsys):
    seen = []
    watch = K.callbacks.LambdaCallback(
        on_test_batch_end=lambda batch, logs: seen.append(dict(logs))
    )
    result = trainer.evaluate(X, Y, batch_size=BATCH, steps=2, callbacks=[watch])
    assert seen[1] == dict(zip(("loss", "mae"), result, strict=True))
    assert seen[0]["mae"] == pytest.approx(trainer.evaluate(X[:BATCH], Y[:BATCH], verbose=0)[1])
    shown = re.findall(r" mae: ([\d.]+)", capsys.readouterr().out)
    assert float(shown[-1]) == pytest.approx(result[1], abs=1e-4)


def test_evaluate_without_metrics_is_a_number(classifying):
    ours = classifying.evaluate(X, LABELS, batch_size=11, verbose=0)
    assert isinstance(ours, float)
    assert ours == pytest.approx(
        classifying.model.evaluate(X, LABELS, batch_size=11, verbose=0), rel=1e-5
    )


def test_several_outputs_are_listed_as_keras_lists_them(K):
    inputs = K.Input((4,))
    outputs = {"b": K.layers.Dense(1, name="b")(inputs), "a": K.layers.Dense(3, name="a")(inputs)}
    model = K.Model(inputs, outputs)
    losses, metrics = {"a": cross_entropy(K), "b": "mse"}, {"b": ["mae"], "a": ["accuracy"]}
    compiled = {"loss_weights": {"a": 2.0, "b": 0.5}, "jit_compile": False}
    trainer = fa.Trainer(model, K.optimizers.SGD(), losses, metrics, **compiled)
    y = {"a": LABELS, "b": Y}
    ours = trainer.evaluate(X, y, batch_size=11, verbose=0)
    as_dict = trainer.evaluate(X, y, batch_size=11, verbose=0, return_dict=True)
    model.compile("sgd", losses, metrics=metrics, **compiled, run_eagerly=True)
    np.testing.assert_allclose(ours, model.evaluate(X, y, batch_size=11, verbose=0), rtol=1e-5)
    expected = model.evaluate(X, y, batch_size=11, verbose=0, return_dict=True)
    assert as_dict == pytest.approx(expected, rel=1e-5)


def test_predict_is_the_models_own(trainer):
    predicted = trainer.predict(X, batch_size=5, verbose=0)
    assert isinstance(predicted, np.ndarray)
    assert_equal([predicted], [trainer.model.predict(X, batch_size=5, verbose=0)])
    assert trainer.predict(
        tf.data.Dataset.from_tensor_slices(X).batch(4), steps=2, verbose=0
    ).shape == (8, 1)


# Programs


def varying(sizes):
    """A dataset whose batches have these sizes."""
    starts = np.cumsum([0, *sizes])
    batches = [(X[a:b], Y[a:b]) for a, b in itertools.pairwise(starts)]
    spec = (tf.TensorSpec([None, 4]), tf.TensorSpec([None, 1]))
    return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)


def test_one_trace_for_a_tail_varying_batches_and_a_learning_rate_callback(K):
    trainer = trainer_of(K, jit_compile=K is keras)
    schedule = K.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
    fit(trainer, epochs=2, callbacks=[schedule])
    trainer.fit(varying([4, 2, 3, 4, 4, 4, 1]), epochs=2, verbose=0, callbacks=[schedule])
    fit(trainer, X[:30], Y[:30], shuffle=True)
    assert traces(trainer) == 1
    assert updates(trainer) == 2 * STEPS + 2 * 3 + 3


def test_two_traces_with_batch_statistics(K):
    model, options = classifier(K.layers.BatchNormalization(), K=K), {"jit_compile": K is keras}
    adam = K.optimizers.Adam()
    trainer = fa.Trainer(
        model, adam, cross_entropy(K), gradient_accumulation_steps=ACCUMULATION, **options
    )
    fit(trainer, X, LABELS, epochs=2)  # 44 rows: three steps of 12 and one of 8
    assert traces(trainer) == 2
    assert updates(trainer) == 2 * STEPS


@pytest.mark.parametrize("steps_per_execution", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_steps_per_execution_changes_no_weight(K, trainer, steps_per_execution):
    """3 does not divide the 4 steps of an epoch, and 8 is more than all of them."""
    expected = fit(trainer, epochs=2)
    many = trainer_of(K, steps_per_execution=steps_per_execution, jit_compile=K is keras)
    seen = []
    watch = K.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    history = fit(many, epochs=2, callbacks=[watch])
    assert updates(many) == 2 * STEPS
    # what a full dispatch would end with, as in Keras
    ends = {3: [2, 5], 8: [7]}[steps_per_execution]
    assert seen == 2 * ends
    assert_close(many.model.get_weights(), trainer.model.get_weights(), rtol=1e-6)
    for log in ("loss", "grad_norm"):
        np.testing.assert_allclose(history.history[log], expected.history[log], rtol=1e-6)


def test_without_xla_the_results_are_the_same(K, trainer):
    expected = fit(trainer, epochs=2, validation_data=(X[:8], Y[:8]))
    plain = trainer_of(K, jit_compile=K is not keras)
    history = fit(plain, epochs=2, validation_data=(X[:8], Y[:8]))
    assert_close(plain.model.get_weights(), trainer.model.get_weights())
    for name, log in expected.history.items():
        np.testing.assert_allclose(history.history[name], log, rtol=1e-5)


def test_no_result_is_read_before_the_next_step_is_dispatched(K, trainer, monkeypatch, tmp_path):
    """Every way from an eager tensor to a number goes through `_numpy`: watch it, and the
    dispatches.
    """
    epochs, origin, events = 2, {}, []
    step, base = trainer._engine, type(tf.constant(0)).__mro__[1]
    dispatch, numpy = step.compiled_execute, base._numpy

    def dispatching(*stacks):
        executed = dispatch(*stacks)
        events.append("dispatch")
        for tensor in tf.nest.flatten(executed):
            # held, so that no id is used twice
            origin[id(tensor)] = events.count("dispatch"), tensor
        return executed

    def reading(tensor):
        if id(tensor) in origin:
            events.append(origin[id(tensor)][0])
        return numpy(tensor)

    dispatching.seconds = dispatch.seconds  # which tell the epoch's clock what was compiled
    monkeypatch.setattr(step, "compiled_execute", dispatching)
    monkeypatch.setattr(base, "_numpy", reading)
    monkeypatch.setattr(fa_callbacks, "REDRAW_SECONDS", -1.0)  # draw the bar in every step
    stock = [
        K.callbacks.EarlyStopping("loss"),
        K.callbacks.CSVLogger(str(tmp_path / "log.csv")),
        K.callbacks.ModelCheckpoint(str(tmp_path / "model.keras")),
    ]
    if K is keras:  # tf_keras's reads the logs of every batch
        stock.append(K.callbacks.TensorBoard(str(tmp_path), write_graph=False))
    fit(trainer, epochs=epochs, verbose=1, callbacks=stock)

    dispatched, read = 0, set()
    for event in events:
        if event == "dispatch":
            dispatched += 1
            continue
        read.add(event)
        assert event < dispatched or event % STEPS == 0, (
            f"step {event} was waited for before the next"
        )
    assert dispatched == epochs * STEPS
    # none goes unread: each may hold a label out of range
    assert read == set(range(1, dispatched + 1))


def test_the_watch_above_sees_a_callback_that_reads(trainer, monkeypatch):
    read, base = [], type(tf.constant(0)).__mro__[1]
    numpy = base._numpy
    monkeypatch.setattr(base, "_numpy", lambda tensor: read.append(tensor) or numpy(tensor))
    logs = fa_callbacks.LateLogs({"loss": tf.constant(1.0)})
    assert "loss" in logs and not read
    assert float(logs["loss"]) == 1.0 and len(read) == 1


# Precision and loss scale


@pytest.fixture
def policy(K):
    """Sets the dtype policy of a family, for one test."""
    set_policy = K.config.set_dtype_policy if K is keras else K.mixed_precision.set_global_policy
    yield set_policy
    set_policy("float32")


def test_mixed_float16_counts_the_steps_that_it_skips(K, policy):
    policy("mixed_float16")
    loss_scale = fa.DynamicLossScale(init_scale=2.0**24, backoff_factor=2.0**-10)
    options = {
        "gradient_accumulation_steps": ACCUMULATION,
        "loss_scale": loss_scale,
        "jit_compile": K is keras,
    }
    trainer = fa.Trainer(classifier(K=K), K.optimizers.Adam(), cross_entropy(K), **options)
    history = fit(trainer, X, LABELS, epochs=2)
    assert history.history["skipped_steps"] == [1, 0]  # counted anew in every epoch
    assert history.history["loss_scale"] == [2.0**14] * 2
    assert updates(trainer) == 2 * STEPS - 1
    assert trainer.model.layers[0].kernel.dtype == "float32"
    assert np.isfinite(history.history["loss"]).all()


def test_loss_scaling_is_on_for_float16_only(K, policy):
    for name, kind in (("mixed_float16", fa.DynamicLossScale), ("mixed_bfloat16", fa.NoLossScale)):
        policy(name)
        assert type(fa.Trainer(regressor(K), K.optimizers.SGD(), "mse").loss_scale) is kind


# The model afterwards


def test_a_saved_model_loads_and_predicts_the_same(K, trainer, tmp_path):
    fit(trainer)
    trainer.model.save(tmp_path / "model.keras")
    loaded = K.models.load_model(tmp_path / "model.keras")
    assert_equal([loaded.predict(X, verbose=0)], [trainer.predict(X, verbose=0)])
    assert_equal(
        [v.numpy() for v in loaded.optimizer.variables],
        [v.numpy() for v in trainer.optimizer.variables],
    )
    # The loaded model goes on as the first one does.
    options = {"gradient_accumulation_steps": ACCUMULATION, "jit_compile": K is keras}
    again = fa.Trainer(loaded, loaded.optimizer, "mse", ["mae"], **options)
    fit(again)
    fit(trainer)
    assert_close(again.model.get_weights(), trainer.model.get_weights(), rtol=1e-6)


def test_averaged_weights_are_in_the_model_at_the_end(K):
    model = regressor(K)
    optimizer = K.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9)
    trainer = fa.Trainer(
        model, optimizer, "mse", gradient_accumulation_steps=ACCUMULATION, jit_compile=False
    )
    own = regressor(K)
    own.compile(K.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9), "mse", run_eagerly=True)
    own.fit(X, Y, batch_size=ACCUMULATION * BATCH, shuffle=False, verbose=0)
    fit(trainer)
    assert_close(model.get_weights(), own.get_weights())
    assert_equal(
        model.get_weights(), [v.numpy() for v in optimizer._model_variables_moving_average]
    )


def test_a_fit_without_a_step_overwrites_nothing_with_averages(K):
    model = regressor(K)
    trainer = fa.Trainer(model, K.optimizers.SGD(0.05, use_ema=True), "mse", jit_compile=False)
    before = model.get_weights()
    with pytest.warns(UserWarning, match="skipped"):
        trainer.fit(X * np.nan, Y, batch_size=len(X), verbose=0)
    assert_equal(model.get_weights(), before)


STACK = X[:16].reshape(2, 8, -1), Y[:16].reshape(2, 8)


@pytest.mark.parametrize(
    "convert", [np.asarray, tf.constant, tf.Variable], ids=["array", "tensor", "variable"]
)
class TestAStackLikeOneBefore:
    def test_is_checked_once(self, trainer, convert, monkeypatch):
        stack, checked, check = tuple(map(convert, STACK)), [], trainer._builder.get_or_build
        trainer.train_step(stack)
        monkeypatch.setattr(
            trainer._builder, "get_or_build", lambda *args: checked.append(args) or check(*args)
        )
        trainer.train_step(stack)
        trainer.train_step(list(stack))
        trainer.train_step((*stack, None))
        assert not checked
        rows = {np.asarray: 5, tf.constant: 6, tf.Variable: 7}[convert]
        trainer.train_step(tuple(convert(array[:, :rows]) for array in STACK))
        assert len(checked) == 1

    def test_is_trained_on_as_it_is(self, trainer, convert):
        """The second one comes by the short way: equal to the first, from the same weights."""
        stack, back, losses = tuple(map(convert, STACK)), trainer.model.get_weights(), []
        trainer._step_inputs._known.clear()
        for _ in range(2):
            trainer.model.set_weights(back)
            losses.append(float(trainer.train_step(stack).loss))
        assert losses[0] == losses[1]

    def test_is_read_once(self, trainer, convert, monkeypatch):
        """Reading takes longer than the arithmetic of a small model: one flag says that there is
        nothing to say.
        """
        stack, base, read = tuple(map(convert, STACK)), type(tf.constant(0)).__mro__[1], []
        trainer.train_step(stack)
        numpy = base._numpy
        monkeypatch.setattr(base, "_numpy", lambda tensor: read.append(tensor) or numpy(tensor))
        trainer.train_step(stack)
        assert [tensor.dtype for tensor in read] == [tf.bool]

    def test_is_refused_after_a_change(self, trainer, convert):
        stack = tuple(map(convert, STACK))
        trainer.train_step(stack)
        layer, before = trainer.model.layers[0], trainer.model.get_weights()
        layer.trainable = False
        try:
            with pytest.raises(ValueError, match=r"trainable variables have changed.*new Trainer"):
                trainer.train_step(stack)
        finally:
            layer.trainable = True
        clip_norm = trainer.clip_norm
        with pytest.raises(
            ValueError, match=r"clip_norm=1e-09 cannot be set: the train step was built with"
        ):
            trainer.clip_norm = 1e-9
        assert trainer.clip_norm == clip_norm
        trainer.loss_scale = "auto"  # what it is
        for now, then in zip(trainer.model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(now, then)
        trainer.train_step(stack)


def test_a_stack_of_four_is_refused_after_a_batch(trainer):
    _, batch = trainer._step_inputs.prepare(STACK)
    batch = batch._replace(sample_weight=tf.ones([2, 8]), valid=tf.ones([2, 8], tf.bool))
    trainer.train_step(batch)
    with pytest.raises(ValueError, match="tuple of 4 entries"):
        trainer.train_step(tuple(batch)[:4])


def test_changed_trainable_variables_are_refused(trainer):
    layer = trainer.model.layers[0]
    layer.trainable = False
    try:
        with pytest.raises(
            ValueError,
            match=r"changed.*: \[.*/bias(:0)?', '.*/kernel(:0)?'\]. .*switch it back; .*make a new Trainer",
        ):
            fit(trainer)
    finally:
        layer.trainable = True
    fit(trainer)


def test_an_option_that_a_subclass_defines_counts(K):
    class Clipped(fa.Trainer):
        clip_norm = property(lambda self: 1e-6, lambda self, value: None)

    model = K.Sequential([K.Input((8,)), K.layers.Dense(1)])
    before = model.get_weights()
    Clipped(model, K.optimizers.SGD(1.0), "mse", jit_compile=False).train_step(
        (np.ones((2, 4, 8), "float32"), np.ones((2, 4, 1), "float32"))
    )
    moved = [
        np.abs(now - then).max() for now, then in zip(model.get_weights(), before, strict=True)
    ]
    assert 0 < max(moved) <= 2e-6


def test_the_batch_size_that_is_wrong_is_named(trainer):
    with pytest.raises(ValueError, match=r"^batch_size=0 must"):
        trainer.fit(X, Y, batch_size=0)
    with pytest.raises(TypeError, match=r"^validation_freq=array"):
        trainer.fit(X, Y, validation_freq=np.array([1, 2]))


@pytest.mark.parametrize(
    ("name", "meant"),
    [("clip_nrom", "clip_norm"), ("accumulation_steps", "gradient_accumulation_steps")],
)
def test_an_attribute_that_is_nearly_an_option_is_refused(name, meant):
    trainer = fa.Trainer(regressor(), "sgd", "mse", jit_compile=False)
    with pytest.raises(AttributeError, match=f"'{name}': did you mean {meant}"):
        setattr(trainer, name, 1)


def test_a_wrong_value_of_an_option_is_refused_and_the_option_stays():
    trainer = fa.Trainer(regressor(), "sgd", "mse", clip_norm=2.0, jit_compile=False)
    with pytest.raises(ValueError, match=r"^clip_norm=-1.0 must"):
        trainer.clip_norm = -1.0
    assert trainer.clip_norm == 2.0


@pytest.mark.parametrize("name", ["model", "loss", "metrics"])
def test_an_argument_that_is_no_option_cannot_be_set(name):
    trainer = fa.Trainer(regressor(), "sgd", "mse", jit_compile=False)
    with pytest.raises(AttributeError, match=f"{name} cannot be set"):
        setattr(trainer, name, None)


def test_a_subclass_has_attributes_of_its_own():
    class Own(fa.Trainer):
        clip_norms = ()

        def __init__(self, *args, **options):
            self.losses = []
            super().__init__(*args, **options)
            self._loss_scale, self.clip_norms, self.loss, self.steps = 1.0, [2.0], "mse", 3

    trainer = Own(regressor(), "sgd", "mse", jit_compile=False)
    trainer.notes, trainer.clip_norm = "a user's own", 0.5
    assert (trainer.clip_norms, trainer.loss, trainer._present_options.clip_norm) == (
        [2.0],
        "mse",
        0.5,
    )


@pytest.mark.parametrize(
    "function",
    [
        fa.Trainer,
        fa.Trainer.fit,
        fa.plan,
        fa.gpt,
        fa.remat,
        fa.TrainStep,
        fa.LinearCrossEntropy,
        fa.DynamicLossScale,
    ],
)
def test_signatures_stay_as_they_are_written(function):
    written = inspect.signature(function)
    assert not {p.kind for p in written.parameters.values()} & {inspect.Parameter.VAR_KEYWORD}
    assert len(written.parameters) > 1 and function.__doc__


class Beside(keras.callbacks.Callback):
    """Calls a function within the first batch of `fit`, in another thread or in this one."""

    def __init__(self, call, threaded):
        super().__init__()
        self.call, self.threaded, self.came_of_it = call, threaded, None

    def on_train_batch_end(self, batch, logs=None):
        if self.came_of_it is None:
            thread = threading.Thread(target=self.try_it)
            if self.threaded:
                thread.start()
                thread.join()
            else:
                self.try_it()

    def try_it(self):
        try:
            self.came_of_it = self.call()
        except BaseException as error:
            self.came_of_it = error


THREADED = {
    "fit": lambda t: t.fit(X, Y, verbose=0),
    "evaluate": lambda t: t.evaluate(X, Y, verbose=0),
    "predict": lambda t: t.predict(X, verbose=0),
    "train_step": lambda t: t.train_step((X[None], Y[None])),
    "summary": lambda t: t.summary(X, Y, batch_size=4, verbose=False),
    "plan": lambda t: fa.plan(t, (X, Y), global_batch_size=4),
}


def test_a_second_thread_in_a_trainer_is_refused():
    """Checks also that the running fit ends as without the second thread."""
    alone, trainer = (fa.Trainer(regressor(), "sgd", "mse", jit_compile=False) for _ in range(2))
    alone.fit(X, Y, verbose=0, shuffle=False)
    refused = [Beside(lambda call=call: call(trainer), threaded=True) for call in THREADED.values()]
    trainer.fit(X, Y, verbose=0, shuffle=False, callbacks=refused)
    for name, beside in zip(THREADED, refused, strict=True):
        assert isinstance(beside.came_of_it, RuntimeError), beside.came_of_it
        assert str(beside.came_of_it).startswith(
            f"{name}: this Trainer is in use by fit in the thread 'MainThread'"
        )
    assert_equal(trainer.model.get_weights(), alone.model.get_weights())
    called = threading.Thread(target=THREADED["evaluate"], args=[trainer])  # once it is free again
    called.start()
    called.join()
    THREADED["fit"](trainer)


def test_what_may_be_called_within_a_fit():
    """Calls the same Trainer in the fit's own thread, and another Trainer in any thread."""
    trainer, other = (fa.Trainer(regressor(), "sgd", "mse", jit_compile=False) for _ in range(2))
    same = [
        Beside(lambda name=name: THREADED[name](trainer), threaded=False)
        for name in ("evaluate", "predict")
    ]
    others = [
        Beside(lambda name=name: THREADED[name](other), threaded=True)
        for name in ("fit", "evaluate", "predict")
    ]
    after = Beside(lambda: THREADED["evaluate"](trainer), threaded=True)
    trainer.fit(X, Y, verbose=0, callbacks=[*same, *others, after])
    for beside in same + others:
        assert not isinstance(beside.came_of_it, BaseException), beside.came_of_it
    assert "in use by fit" in str(after.came_of_it)


def test_two_threads_may_predict():
    trainer = fa.Trainer(regressor(), "sgd", "mse", jit_compile=False)
    found, both = [], threading.Barrier(2)

    class Together(keras.callbacks.Callback):
        def on_predict_batch_end(self, batch, logs=None):
            if batch == 0:
                both.wait(60)

    def predict():
        found.append(trainer.predict(X, verbose=0, callbacks=[Together()]))

    threads = [threading.Thread(target=predict) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert_equal(found[0], found[1])
    trainer.fit(X, Y, verbose=0)


def test_a_trainer_is_free_once_the_last_of_its_threads_has_predicted():
    trainer = fa.Trainer(regressor(), "sgd", "mse", jit_compile=False)
    within = [threading.Event() for _ in range(2)]
    may_end = [threading.Event() for _ in range(2)]

    class Holds(keras.callbacks.Callback):
        def __init__(self, i):
            super().__init__()
            self.i = i

        def on_predict_end(self, logs=None):
            within[self.i].set()
            may_end[self.i].wait(60)

    threads = [
        threading.Thread(
            target=trainer.predict, args=[X], kwargs={"verbose": 0, "callbacks": [Holds(i)]}
        )
        for i in range(2)
    ]
    for thread, came in zip(threads, within, strict=True):
        thread.start()
        assert came.wait(60)
    for thread, end in zip(threads, may_end, strict=True):  # the first to come is the first to go
        with pytest.raises(RuntimeError, match="in use by predict in the thread"):
            trainer.fit(X, Y, verbose=0)
        end.set()
        thread.join()
    trainer.fit(X, Y, verbose=0)
