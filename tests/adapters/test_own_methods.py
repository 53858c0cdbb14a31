"""Methods that a model overrides: each is called as Keras calls it, or refused by name with what to
do.
"""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import fastaccum as fa

# CI runs these at every commit, apart from README's command, since they take minutes.
pytestmark = pytest.mark.slow

RNG = np.random.default_rng(0)
# two updates of three micro-batches of four rows, the last of two
X = RNG.normal(size=(22, 5)).astype("float32")
Y = RNG.normal(size=(22, 3)).astype("float32")

# Of Keras's trainer: what `fit` and `evaluate` call and a Trainer calls, what `predict` calls, and
# what is refused.
CALLED = {"compute_loss", "compute_metrics", "get_metrics_result", "metrics", "reset_metrics"}
CALLED_IN_PREDICT = {"predict", "predict_step", "make_predict_function"}
REFUSED = {
    "fit",
    "evaluate",
    "train_step",
    "test_step",
    "make_train_function",
    "make_test_function",
}
REASONS = {
    "compile": "the user calls it",
    "compile_from_config": "for loading",
    "get_compile_config": "for saving",
    "compiled_loss": "nothing of Keras calls it",
    "compiled_metrics": "nothing of Keras calls it",
    "loss": "nothing of Keras calls it",
    "metrics_names": "nothing of Keras calls it",
    "stateless_compute_loss": "for JAX",
    "train_on_batch": "for loops of the user's own",
    "test_on_batch": "for loops of the user's own",
    "predict_on_batch": "for loops of the user's own",
    "jit_compile": "an argument of Trainer",
    "run_eagerly": "warned of: a step is traced",
    "distribute_strategy": "that of the scope in which the model was made",
    "distribute_reduction_method": "read in Keras's own step",
}


def members():
    trainers = [c for c in keras.Model.__mro__[1:] if c not in keras.layers.Layer.__mro__]
    return {name for c in trainers for name in vars(c) if name[:2] != "__"}


def make(family=keras, base=None, prepare=lambda self: None, **methods):
    """Makes a model of a class that has these methods, and always the same weights; `prepare(self)`
    adds to it.
    """
    base = base or family.Model

    def init(self):
        base.__init__(self)
        self.dense = family.layers.Dense(3)
        prepare(self)

    def call(self, x):
        return self.dense(x)

    kind = type("Own", (base,), {"__init__": init, "call": call, **methods})
    family.utils.set_random_seed(1)
    model = kind()
    model(X[:1])
    return model


def keras_fit(model, x=X, y=Y, loss="mse", family=keras, **options):
    """Trains two epochs as Keras does, with the rows of an update in one batch; returns the
    logs.
    """
    compiled = {name: options.pop(name) for name in ("metrics", "run_eagerly") if name in options}
    model.compile(family.optimizers.SGD(0.5), loss, **compiled)
    fitted = {"batch_size": 12, "epochs": 2, "shuffle": False, "verbose": 0}
    return model.fit(x, y, **(fitted | options)).history


def our_fit(model, x=X, y=Y, loss="mse", metrics=(), family=keras, **options):
    trainer = fa.Trainer(
        model,
        family.optimizers.SGD(0.5),
        loss,
        metrics,
        gradient_accumulation_steps=3,
        jit_compile=False,
    )
    fitted = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
    return trainer.fit(x, y, **(fitted | options)).history


def require_same_weights(one, other):
    for a, b in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def recording(name, calls, base=keras.Model):
    def method(self, *args, **kwargs):
        calls.append(name)
        return getattr(base, name)(self, *args, **kwargs)

    def read(self):
        calls.append(name)
        return getattr(base, name).fget(self)

    return property(read) if isinstance(getattr(base, name), property) else method


def test_every_member_of_kerass_trainer_is_called_or_refused_or_has_a_reason():
    private = {name for name in members() if name[0] == "_"} - CALLED
    assert members() <= CALLED | CALLED_IN_PREDICT | REFUSED | REASONS.keys() | private
    for name in sorted(REFUSED | private):
        before = make(**{name: recording(name, [])})
        with pytest.raises(
            ValueError, match=f"Own overrides {name}, which Trainer.* would never call"
        ):
            fa.Trainer(before, "sgd", "mse")
    for name in REASONS.keys() - {"run_eagerly"}:
        fa.Trainer(make(**{name: recording(name, [])}), "sgd", "mse")


@pytest.mark.parametrize("name", sorted(CALLED))
def test_what_is_called(name):
    """Compares the number of calls with Keras's, where it does not depend on tracing."""
    theirs, ours = [], []
    expected = keras_fit(
        make(**{name: recording(name, theirs)}), validation_data=(X, Y), metrics=["mae"]
    )
    logs = our_fit(make(**{name: recording(name, ours)}), validation_data=(X, Y), metrics=["mae"])
    assert name in theirs and name in ours
    if name == "reset_metrics":
        assert len(theirs) == len(ours) == 4  # two epochs, two validations
    for log, values in expected.items():
        np.testing.assert_allclose(logs[log], values, rtol=1e-5, err_msg=log)


@pytest.mark.parametrize("name", sorted(CALLED_IN_PREDICT))
def test_what_predict_calls(name):
    calls = []
    model = make(**{name: recording(name, calls)})
    trainer = fa.Trainer(model, "sgd", "mse", jit_compile=False)
    np.testing.assert_allclose(trainer.predict(X, verbose=0), model(X), rtol=1e-6)
    assert calls


def test_attributes_of_the_object_are_overrides_too():
    model = make()
    model.fit = lambda *args, **kwargs: None
    with pytest.raises(ValueError, match=r"then remove it \(del model\.fit\)"):
        fa.Trainer(model, "sgd", "mse")
    del model.fit
    fa.Trainer(model, "sgd", "mse")


def test_what_tf_keras_calls():
    for name in sorted(REFUSED | {"get_metrics_result"}):
        with pytest.raises(
            ValueError, match=rf"Own overrides {name}, .*Own\.{name} = tf_keras\.Model\.{name}"
        ):
            fa.Trainer(make(tf_keras, **{name: recording(name, [], tf_keras.Model)}), "sgd", "mse")
    calls = []
    model = make(tf_keras, reset_metrics=recording("reset_metrics", calls, tf_keras.Model))
    our_fit(model, family=tf_keras)
    assert len(calls) == 2


@pytest.mark.parametrize("family", [keras, tf_keras])
def test_metrics_that_a_model_lists(family):
    """Lists two metrics and updates one: the other is neither logged nor reset."""

    def prepare(self):
        self.largest, self.count = (
            family.metrics.Mean(name="largest"),
            family.metrics.Sum(name="count"),
        )

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **options):
        self.largest.update_state(tf.reduce_max(tf.abs(y_pred), 1))
        self.count.update_state(tf.ones_like(y_pred[:, 0]))
        return family.Model.compute_loss(self, x, y, y_pred, sample_weight, **options)

    def metrics(self):
        return [each for each in family.Model.metrics.fget(self) if each is not self.count]

    methods = {"prepare": prepare, "compute_loss": compute_loss, "metrics": property(metrics)}
    theirs, ours = make(family, **methods), make(family, **methods)
    expected, logs = keras_fit(theirs, family=family), our_fit(ours, family=family)
    assert "count" not in expected and "count" not in logs
    np.testing.assert_allclose(logs["largest"], expected["largest"], rtol=1e-5)


# Logs that a model makes.


def perplexing(self):
    results = keras.Model.get_metrics_result(self)
    results["perplexity"] = keras.ops.exp(results["loss"])
    results["percent"] = 100 * results.pop("mae")
    return results


def test_get_metrics_result_makes_the_logs():
    theirs, ours = make(get_metrics_result=perplexing), make(get_metrics_result=perplexing)
    expected = keras_fit(theirs, metrics=["mae"], validation_data=(X[:9], Y[:9]))
    logs = our_fit(ours, metrics=["mae"], validation_data=(X[:9], Y[:9]))
    assert set(logs) - set(expected) == {"grad_norm", "loss_scale", "skipped_steps"}
    assert {"perplexity", "val_percent"} <= set(expected) and "mae" not in logs
    for name, values in expected.items():
        np.testing.assert_allclose(logs[name], values, rtol=1e-5, err_msg=name)
    require_same_weights(theirs, ours)


def test_get_metrics_result_of_several_outputs_has_the_loss_of_each():
    def build():
        keras.utils.set_random_seed(2)
        inputs = keras.Input((5,))
        outputs = {name: keras.layers.Dense(3, name=name)(inputs) for name in "ab"}

        class Two(keras.Model):
            def get_metrics_result(self):
                results = super().get_metrics_result()
                results["share"] = results["a_loss"] / results["loss"]
                return results

        return Two(inputs, outputs)

    y, x = {"a": Y[:12], "b": -Y[:12]}, X[:12]
    expected = keras_fit(build(), x, y, {"a": "mse", "b": "mae"}, epochs=1, metrics={"b": ["mse"]})
    logs = our_fit(build(), x, y, {"a": "mse", "b": "mae"}, {"b": ["mse"]}, epochs=1)
    for name, values in expected.items():
        np.testing.assert_allclose(logs[name], values, rtol=1e-5, err_msg=name)


def test_compute_metrics_beside_get_metrics_result():
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return {
            **keras.Model.compute_metrics(self, x, y, y_pred, sample_weight),
            "constant": tf.constant(2.0),
        }

    methods = {"get_metrics_result": perplexing, "compute_metrics": compute_metrics}
    expected = keras_fit(make(**methods), metrics=["mae"], epochs=1)
    logs = our_fit(make(**methods), metrics=["mae"], epochs=1)
    assert set(expected) <= set(logs)
    assert logs["constant"] == [2.0]
    np.testing.assert_allclose(logs["percent"], expected["percent"], rtol=1e-5)


def test_a_plain_number_among_the_metrics_is_told_of():
    """Warns, and checks that the remedy gives Keras's mean over the epoch."""

    def plain(self, x, y, y_pred, sample_weight=None):
        return {
            **keras.Model.compute_metrics(self, x, y, y_pred, sample_weight),
            "mean": tf.reduce_mean(y_pred),
        }

    def kept(self, x, y, y_pred, sample_weight=None):
        self.mean.update_state(y_pred)
        return keras.Model.compute_metrics(self, x, y, y_pred, sample_weight)

    def prepare(self):
        self.mean = keras.metrics.Mean(name="mean")

    with pytest.warns(
        UserWarning,
        match=r"compute_metrics of .* returned \['mean'\] as plain numbers.*keras.metrics.Mean",
    ):
        our_fit(make(compute_metrics=plain), epochs=1)
    expected = keras_fit(make(prepare=prepare, compute_metrics=kept), epochs=1)
    logs = our_fit(make(prepare=prepare, compute_metrics=kept), epochs=1)
    np.testing.assert_allclose(logs["mean"], expected["mean"], rtol=1e-5)


def test_reset_metrics_resets_what_it_will():
    """A count that goes on over the epochs, as in Keras; what it resets beside metrics is reset."""

    def build():
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **options):
            self.seen.update_state(tf.ones_like(y_pred[:, 0]))
            return keras.Model.compute_loss(self, x, y, y_pred, sample_weight, **options)

        def reset_metrics(self):
            self.epochs += 1

        def prepare(self):
            self.seen, self.epochs = keras.metrics.Sum(name="seen"), 0

        return make(prepare=prepare, compute_loss=compute_loss, reset_metrics=reset_metrics)

    theirs, ours = build(), build()
    expected, logs = keras_fit(theirs), our_fit(ours)
    assert logs["seen"] == expected["seen"] == [22, 44]
    assert theirs.epochs == ours.epochs == 2


# What to do about what is refused: each remedy, as the error has it.


def refusal(model, **options):
    before = model.get_weights()
    with pytest.raises(ValueError, match="Own overrides") as caught:
        fa.Trainer(model, "sgd", "mse", **options)
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)
    return str(caught.value)


def undo(message, model):
    """Runs the statements of the error that remove the overrides."""
    (statements,) = re.findall(r"remove it \((.*?)\)", message)[:1]
    exec(statements, {"Own": type(model), "model": model, "keras": keras, "tf_keras": tf_keras})


class Precise(keras.Model):
    """A last layer that sums the products of its inputs, as a Gaussian process's covariance, from
    zero each epoch.
    """

    def __init__(self):
        super().__init__()
        self.precision = self.add_weight(
            shape=(5, 5), initializer="zeros", trainable=False, name="precision"
        )

    def reset_covariance_matrix(self):
        self.precision.assign(tf.zeros([5, 5]))


class ResetCovariance(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch:
            self.model.reset_covariance_matrix()


def sngp():
    def call(self, x, training=False):
        if training:
            self.precision.assign_add(tf.matmul(x, x, transpose_a=True))
        return self.dense(x)

    def fit(self, *args, **kwargs):
        kwargs["callbacks"] = [*(kwargs.get("callbacks") or []), ResetCovariance()]
        return keras.Model.fit(self, *args, **kwargs)

    return make(base=Precise, call=call, fit=fit)


def test_an_overridden_fit_becomes_a_callback():
    theirs, ours, without = sngp(), sngp(), sngp()
    keras_fit(theirs)
    for model, callbacks in ((ours, [ResetCovariance()]), (without, [])):
        message = refusal(model)
        assert "callbacks" in message
        undo(message, model)
        our_fit(model, callbacks=callbacks)
    require_same_weights(theirs, ours)
    assert np.trace(without.precision) > 1.9 * np.trace(ours.precision)  # the negative control


@pytest.mark.parametrize("family", [keras, tf_keras])
def test_a_train_step_like_kerass_is_removed(family):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}

    def test_step(self, data):
        return {}

    theirs, ours = (make(family, train_step=train_step, test_step=test_step) for _ in range(2))
    keras_fit(theirs, family=family)
    undo(refusal(ours), ours)
    our_fit(ours, family=family)
    require_same_weights(theirs, ours)
    only = make(family, test_step=test_step)
    message = refusal(only)
    assert "compute_loss and compute_metrics" in message
    undo(message, only)
    fa.Trainer(only, "sgd", "mse")


def test_data_that_a_train_step_changes_are_a_datasets_map():
    def prepared(x, y):
        return x / 2, y + x[:, :3]  # targets made of what is given

    def train_step(self, data):
        return keras.Model.train_step(self, prepared(*data))

    theirs, ours = make(train_step=train_step), make(train_step=train_step)
    keras_fit(theirs)
    message = refusal(ours)
    assert "dataset.map" in message
    undo(message, ours)
    our_fit(
        ours,
        tf.data.Dataset.from_tensor_slices((X, Y)).batch(4).map(prepared),
        None,
        batch_size=None,
    )
    require_same_weights(theirs, ours)


def test_the_model_inside_a_wrapper_is_passed():
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(
                keras.losses.mean_squared_error(y, self.network(x, training=True))
            )
        gradients = tape.gradient(loss, self.network.trainable_variables)
        self.optimizer.apply_gradients(
            zip(gradients, self.network.trainable_variables, strict=True)
        )
        return {"loss": loss}

    def prepare(self):
        self.network = make()

    def wrap():
        return make(prepare=prepare, train_step=train_step, call=lambda self, x: self.network(x))

    theirs, ours = wrap(), wrap()
    keras_fit(theirs)
    assert "one of the models inside (network), pass that to Trainer" in refusal(ours)
    our_fit(ours.network)
    require_same_weights(theirs.network, ours.network)


def test_another_loss_and_further_logs_are_methods():
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = keras.ops.mean(keras.ops.abs(y - y_pred) ** 1.5)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss, "bias": tf.reduce_mean(self.dense.bias)}

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.abs(y - y_pred) ** 1.5)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return {"bias": tf.reduce_mean(self.dense.bias)}

    theirs = make(train_step=train_step)
    keras_fit(theirs)
    message = refusal(theirs)
    assert "override compute_loss(x, y, y_pred, sample_weight)" in message
    ours = make(compute_loss=compute_loss, compute_metrics=compute_metrics)
    logs = our_fit(ours, loss=None)
    require_same_weights(theirs, ours)
    assert len(logs["bias"]) == 2 and np.isfinite(logs["bias"]).all()


def test_updates_of_its_own_are_a_train_steps():
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(y - self(x, training=True)))
        self.optimizer.apply_gradients(
            [(tape.gradient(loss, self.dense.kernel), self.dense.kernel)]
        )
        return {"loss": loss}

    theirs, ours = make(train_step=train_step), make(train_step=train_step)
    keras_fit(theirs, X[:12], Y[:12], epochs=1)
    assert "fastaccum.TrainStep(loss_fn, variables, optimizer)" in refusal(ours)

    def loss_fn(micro_batch):
        x, y = micro_batch
        losses = keras.ops.square(y - ours(x, training=True))
        return tf.reduce_sum(losses), tf.size(losses)

    step = fa.TrainStep(
        loss_fn, [ours.dense.kernel.value], keras.optimizers.SGD(0.5), jit_compile=False
    )
    step((tf.reshape(X[:12], [3, 4, 5]), tf.reshape(Y[:12], [3, 4, 3])))
    require_same_weights(theirs, ours)


def test_run_eagerly_is_named():
    def eager(self, x):
        return self.dense(x) + np.mean(x.numpy())

    def traced(self, x):
        return self.dense(x) + tf.ensure_shape(tf.numpy_function(np.mean, [x], tf.float32), [])

    theirs, ours = make(call=eager), make(call=traced)
    keras_fit(theirs, X[:4], Y[:4], batch_size=4, run_eagerly=True)
    ours.compile("sgd", "mse", run_eagerly=True)
    with pytest.warns(
        UserWarning,
        match=r"run_eagerly=True.*tf\.numpy_function, with Trainer\(jit_compile=False\)",
    ):
        trainer = fa.Trainer(ours, keras.optimizers.SGD(0.5), "mse", jit_compile=False)
    trainer.fit(X[:4], Y[:4], batch_size=4, epochs=2, shuffle=False, verbose=0)
    require_same_weights(theirs, ours)
    assert ours.run_eagerly  # as before, for `predict`
    stepping = make(train_step=lambda self, data: {})
    stepping.compile("sgd", "mse", run_eagerly=True)
    assert "run_eagerly=True is not taken over" in refusal(stepping)


# Targets and metrics of a loss of the model's own.


def test_one_target_of_several_outputs_is_the_first_ones_for_metrics():
    class Deep(keras.Model):
        def compute_loss(self, x, y_true, y_pred, sample_weight=None, training=True):
            return sum(keras.ops.mean(keras.ops.square(y_true - each)) for each in y_pred)

    def build():
        keras.utils.set_random_seed(2)
        inputs = keras.Input((5,))
        return Deep(inputs, [keras.layers.Dense(3, name=name)(inputs) for name in "ab"])

    def metrics():
        return [[keras.metrics.MeanAbsoluteError(name="mae")] for _ in "ab"]

    theirs, ours = build(), build()
    validation = {"validation_data": (X[:9], Y[:9])}
    expected = keras_fit(theirs, loss=None, metrics=metrics(), **validation)
    logs = our_fit(ours, loss=None, metrics=metrics(), **validation)
    require_same_weights(theirs, ours)
    assert "a_mae" in expected and not any("b_mae" in name for name in logs)
    for name, values in expected.items():
        np.testing.assert_allclose(logs[name], values, rtol=1e-5, err_msg=name)


def test_a_loss_that_mixes_rows_is_not_warned_of_where_no_rows_are_split(recwarn):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.matmul(y_pred, keras.ops.transpose(y_pred)))

    def root(y_true, y_pred):
        return keras.ops.sqrt(keras.ops.mean(keras.ops.square(y_true - y_pred))) + 0 * y_pred[:, 0]

    for methods, loss in (({"compute_loss": compute_loss}, None), ({}, root)):
        theirs, ours = make(**methods), make(**methods)
        keras_fit(theirs, X[:20], Y[:20], loss=loss)
        trainer = fa.Trainer(ours, keras.optimizers.SGD(0.5), loss, jit_compile=False)
        trainer.fit(X[:20], Y[:20], batch_size=12, epochs=2, shuffle=False, verbose=0)
        require_same_weights(theirs, ours)
        assert not [each for each in recwarn if "no sum or mean over the rows" in str(each.message)]
        with pytest.warns(UserWarning, match="no sum or mean over the rows"):
            our_fit(make(**methods), loss=loss, epochs=1)


@pytest.mark.parametrize(
    "class_weight", [{"a": {0: 1.0, 1: 3.0}, "b": {0: 2.0, 1: 1.0}}, {0: 1.0, 1: 3.0}]
)
def test_class_weights_of_several_outputs_are_sample_weights(class_weight):
    def build():
        keras.utils.set_random_seed(2)
        inputs = keras.Input((5,))
        return keras.Model(
            inputs, {name: keras.layers.Dense(1, "sigmoid", name=name)(inputs) for name in "ab"}
        )

    labels_a, labels_b = (X[:12, :1] > 0).astype(int), (X[:12, 1:2] > 0).astype(int)
    y = {"a": labels_a, "b": labels_b}
    with pytest.raises(
        (TypeError, ValueError), match=r"sample_weight=\{'a': weights_a\[labels_a\], 'b': weights_b"
    ):
        our_fit(build(), X[:12], y, "binary_crossentropy", class_weight=class_weight)
    weights_a, weights_b = np.array([1.0, 3.0]), np.array([2.0, 1.0])
    sample_weight = {"a": weights_a[labels_a], "b": weights_b[labels_b]}
    theirs, ours = build(), build()
    keras_fit(theirs, X[:12], y, "binary_crossentropy", sample_weight=sample_weight)
    our_fit(ours, X[:12], y, "binary_crossentropy", sample_weight=sample_weight)
    require_same_weights(theirs, ours)


# Methods of an optimizer, a loss and a metric.


def deriving(base, calls, *names):
    """Makes a class derived from `base` that records the calls of these methods, and does what they
    do.
    """

    def make_recorder(name):
        def method(self, *args, **kwargs):
            calls.append(name)
            return getattr(base, name)(self, *args, **kwargs)

        return method

    return type("Derived", (base,), {name: make_recorder(name) for name in names})


OF_OPTIMIZERS = (
    "build",
    "apply_gradients",
    "apply",
    "update_step",
    "assign",
    "assign_add",
    "assign_sub",
)


@pytest.mark.parametrize("name", [*OF_OPTIMIZERS, "finalize_variable_values", "scale_loss"])
def test_what_an_optimizer_overrides_is_called_or_refused(name):
    theirs, ours = [], []

    def train(fit, calls):
        model = make()
        optimizer = deriving(keras.optimizers.SGD, calls, name)(0.5, momentum=0.9, use_ema=True)
        fit(model, optimizer)
        return model

    def by_keras(model, optimizer):
        model.compile(optimizer, "mse")
        model.fit(X, Y, batch_size=12, epochs=2, shuffle=False, verbose=0)

    def by_fastaccum(model, optimizer):
        trainer = fa.Trainer(
            model, optimizer, "mse", gradient_accumulation_steps=3, jit_compile=False
        )
        trainer.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)

    expected = train(by_keras, theirs)
    if name == "scale_loss":
        with pytest.raises(ValueError, match="overrides scale_loss"):
            train(by_fastaccum, ours)
        return
    require_same_weights(expected, train(by_fastaccum, ours))
    assert bool(theirs) == bool(ours)


def test_an_assign_of_an_optimizers_own_reaches_its_slots():
    """Overrides `assign` to round slots. The train step calls it for slots, and only for slots."""

    class Coarse(keras.optimizers.SGD):
        def assign(self, variable, value):
            super().assign(variable, keras.ops.round(8 * value) / 8)

    def train(fit):
        model, optimizer = make(), Coarse(0.5, momentum=0.9)
        fit(model, optimizer)
        return model, optimizer

    def by_keras(model, optimizer):
        model.compile(optimizer, "mse")
        model.fit(X, Y, batch_size=12, epochs=1, shuffle=False, verbose=0)

    def by_fastaccum(model, optimizer):
        trainer = fa.Trainer(
            model, optimizer, "mse", gradient_accumulation_steps=3, jit_compile=False
        )
        trainer.fit(X, Y, batch_size=4, epochs=1, shuffle=False, verbose=0)

    (theirs, of_theirs), (ours, of_ours) = train(by_keras), train(by_fastaccum)
    for a, b in zip(of_theirs.momentums, of_ours.momentums, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    require_same_weights(theirs, ours)


@pytest.mark.parametrize("name", ["apply", "apply_gradients"])
def test_a_multi_optimizer_that_overrides_what_its_parts_do_is_refused(name):
    calls = []
    kind = deriving(keras.optimizers.MultiOptimizer, calls, name)
    optimizer = kind(keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.5)))
    with pytest.raises(ValueError, match=f"overrides {name}"):
        fa.Trainer(make(), optimizer, "mse")


@pytest.mark.parametrize("name", ["update_state", "result", "reset_state"])
def test_what_a_metric_overrides_is_called(name):
    theirs, ours = [], []
    expected, logs = (
        fit(make(), metrics=[deriving(keras.metrics.MeanAbsoluteError, calls, name)(name="mae")])
        for fit, calls in ((keras_fit, theirs), (our_fit, ours))
    )
    assert theirs and ours
    np.testing.assert_allclose(logs["mae"], expected["mae"], rtol=1e-5)


@pytest.mark.parametrize("name", ["call", "__call__"])
def test_what_a_loss_overrides_is_called_or_refused(name):
    theirs, ours = [], []
    expected, model = make(), make()
    keras_fit(expected, loss=deriving(keras.losses.MeanSquaredError, theirs, name)())
    if name == "__call__":
        with pytest.raises(ValueError, match="__call__"):
            our_fit(model, loss=deriving(keras.losses.MeanSquaredError, ours, name)())
        return
    our_fit(model, loss=deriving(keras.losses.MeanSquaredError, ours, name)())
    assert theirs and ours
    require_same_weights(expected, model)
