"""One worker of several: `python worker.py PORTS INDEX MODE FOLDER`; `test_workers.py` starts them.

With MODE "train" it trains 20 steps, evaluates, predicts, then is given data that workers may not
be given, and leaves what came of it in FOLDER; with "forever" it trains until something ends it;
with "saved" it trains with checkpoints in FOLDER and goes on from them, and leaves its weights
there, with "plain" the same without dropout, with "packed" a language model on a mix of packed
rows; with "differ" it tries what DIFFERENT lists, one after
the other; with "absent" the second worker never trains; with "stuck" it is held up in the fourth
step, as data or a callback may hold it up; with "slow" a step takes long on both, and the chief
alone reads its logs; with "other's label" it alone is given one that is out of range; with "shares"
it trains with the optimizer's slots on all workers and shared out; with "saved shares" as with
"plain", with shares; with "killed in share INDEX" likewise, and that worker kills itself while it
writes its share of the second checkpoint.
"""

import itertools
import json
import os
import pathlib
import sys
import time
import warnings

import numpy as np

STEPS, EPOCHS = 20, 12


def data():
    rng = np.random.default_rng(0)
    return [rng.normal(size=(45, width)).astype("float32") for width in (6, 3)]


def trained(model, optimizer, fa, x, y):
    """The trainer after STEPS steps: three of 2 micro-batches of 5 rows, then one of a single one,
    and so on.
    """
    trainer = fa.Trainer(
        model, optimizer, "mse", ["mae"], gradient_accumulation_steps=2, clip_norm=0.5
    )
    history = trainer.fit(x[:35], y[:35], batch_size=5, epochs=STEPS // 4, verbose=0)
    return trainer, history.history["loss"]


def make(keras, seed):
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(3)]
    )


def with_dropout(keras, seed):
    model = make(keras, seed)
    return keras.Sequential([keras.Input((6,)), keras.layers.Dropout(0.2), *model.layers])


def language_model(keras, seed):
    keras.utils.set_random_seed(seed)
    ids = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(17, 8)(ids)
    # The bias of keys has no gradient but rounding, of which Adam makes steps.
    attention = keras.layers.MultiHeadAttention(2, 4, use_bias=False)
    x = x + attention(x, x, use_causal_mask=True)
    return keras.Model(ids, keras.layers.Dense(17)(x))


def packed(fa):
    """Batches of a mix of packed rows; the last batch is short."""
    rng = np.random.default_rng(1)

    def rows(low, high):
        texts = [rng.integers(low, high, n).astype("int32") for n in rng.integers(2, 14, 90)]
        return fa.pack(texts, 16, buffer_size=20, seed=0)

    mixed = fa.mix({"low": rows(1, 9), "high": rows(9, 17)}, {"low": 1, "high": 1})
    return mixed.take(43).batch(5)


def refusals(trainer, x, y, worker, tf):
    """The errors of data that differ between workers, by name."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF

    def own_batches():
        for i in range(4 + 4 * worker):
            yield x[i : i + 4], y[i : i + 4]

    specs = tf.TensorSpec([None, 6]), tf.TensorSpec([None, 3])
    apart = tf.data.Dataset.from_generator(own_batches, output_signature=specs).with_options(
        options
    )
    tf.random.set_seed(worker)
    shuffled = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(45).batch(5)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
    by_file = tf.data.Dataset.from_tensor_slices((x, y)).batch(5).with_options(options)
    errors = {}
    for name, dataset in (("apart", apart), ("shuffled", shuffled), ("by_file", by_file)):
        before = trainer.model.get_weights()
        applied = int(trainer.optimizer.iterations.numpy())
        try:
            trainer.fit(dataset, epochs=1, verbose=0)
            errors[name] = None
        except ValueError as error:
            moved = any(
                (a != b).any() for a, b in zip(trainer.model.get_weights(), before, strict=True)
            )
            errors[name] = [str(error), int(trainer.optimizer.iterations.numpy()) - applied, moved]
    return errors


def code_of(worker):
    """A function of one name, whose code is another on every worker."""
    if worker:

        def cubes(y_true, y_pred):
            return abs(y_true - y_pred) ** 2

    else:

        def cubes(y_true, y_pred):
            return abs(y_true - y_pred) ** 3

    return cubes


# What two workers are given that must be the same: by name, what `differing` takes, its value on
# each, and words of the error, "{}" being that value.
DIFFERENT = {
    "activation": ("activation", ["tanh", "relu"], "model.layers.dense.activation: {} on"),
    "policy": ("policy", ["float32", "mixed_bfloat16"], "model.layers.dense.policy: {} on"),
    "a layer's option": ("dropout", [0.1, 0.2], "model.layers.dropout.rate: {} on"),
    "weights": ("bias", [0.0, 0.5], "checksums.model/sequential/dense/bias: "),
    "updates": ("updates", [2, 3], "checksums.optimizer/"),
    "optimizer": ("optimizer", ["Adam", "SGD"], "optimizer.class: {} on"),
    "learning rate": ("learning_rate", [0.25, 0.5], "optimizer.learning_rate: {} on"),
    "a callback's learning rate": ("callbacks", [None, 0.5], "differ in learning rate: "),
    "loss": ("loss", ["mse", "mae"], "loss.loss: {} on"),
    "loss's code": ("loss", [code_of(0), code_of(1)], "loss.loss.code: "),
    "metric": ("metrics", [["mae"], ["mse"]], "loss.metrics: "),
    "clip_norm": ("clip_norm", [0.5, None], "clip_norm: {} on"),
    "loss_scale": ("loss_scale", [8.0, 16.0], "loss_scale.loss_scale: {} on"),
    "kind of loss_scale": ("loss_scale", [None, 16.0], "loss_scale.class: "),
    "accumulation": (
        "gradient_accumulation_steps",
        [2, 3],
        "options.gradient_accumulation_steps: {} on",
    ),
    "jit_compile": ("jit_compile", [False, True], "jit_compile: {} on"),
    "steps_per_execution": ("steps_per_execution", [1, 2], "steps_per_execution: {} on"),
    "on_nonfinite": ("on_nonfinite", ["skip", "raise"], "on_nonfinite: {} on"),
    "batch_size": ("batch_size", [5, 4], "cut.batch_size: {} on"),
    "epochs": ("epochs", [1, 2], "epochs: {} on"),
    "class_weight": ("class_weight", [None, {0: 2.0}], "class_weight"),
    "validation": ("validation_data", [False, True], "validation_data: {} on"),
    "shape of the data": ("width", [6, 5], "batch plan.data: "),
    "data": ("shift", [0.0, 1.0], "differ in data: "),
    "call": ("call", ["fit", "evaluate"], "is in {}"),
    "hand-written loop": ("call", ["fit", "train_step"], "in fit"),
}
FIT = ("batch_size", "epochs", "class_weight", "validation_data", "callbacks")


def differing(keras, fa, strategy, x, y, **own):
    """Makes a model and a Trainer, calls it, and returns what it raises, with whether a weight was
    moved.
    """
    given = {
        "activation": "tanh",
        "policy": "float32",
        "dropout": 0.1,
        "bias": 0.0,
        "width": None,
        "shift": 0.0,
    }
    given |= {
        "optimizer": "Adam",
        "learning_rate": 0.01,
        "call": "fit",
        "batch_size": 5,
        "jit_compile": False,
    }
    given |= {"updates": 0, **own}
    keras.utils.set_random_seed(0)
    names = ("activation", "policy", "dropout", "bias", "width", "shift", "call", "updates")
    made = {name: given.pop(name) for name in names}
    optimizer = getattr(keras.optimizers, given.pop("optimizer"))(given.pop("learning_rate"))
    fit = {name: given.pop(name) for name in FIT if name in given}
    x = x[:, : made["width"]] + made["shift"]
    with strategy.scope():
        hidden = keras.layers.Dense(
            4, activation=made["activation"], dtype=made["policy"], name="dense"
        )
        layers = [hidden, keras.layers.Dropout(made["dropout"]), keras.layers.Dense(3)]
        # Without an Input it is the data that say how many weights there are.
        first = [] if made["width"] else [keras.Input((6,))]
        model = keras.Sequential([*first, *layers], name="sequential")
    if made["bias"]:
        hidden.bias.assign(hidden.bias + made["bias"])
    if fit.pop("validation_data", False):
        fit["validation_data"] = x, y
    if fit.get("callbacks"):
        rate = fit["callbacks"]
        fit["callbacks"] = [keras.callbacks.LearningRateScheduler(lambda epoch: rate)]
    trainer = fa.Trainer(model, optimizer, **{"loss": "mse", **given})
    if made["updates"]:  # once there are variables, which the workers begin alike
        trainer.fit(x, y, verbose=0)
        optimizer.iterations.assign(made["updates"])
    before = model.get_weights()
    try:
        if made["call"] == "train_step":
            trainer.train_step((x[None], y[None]))
        elif made["call"] == "evaluate":
            trainer.evaluate(x, y, verbose=0)
        else:
            trainer.fit(x, y, verbose=0, **fit)
        error = None
    except ValueError as raised:
        error = f"{type(raised).__name__}: {raised}"
    return error, any(
        (a != b).any() for a, b in zip(model.get_weights(), before, strict=bool(first))
    )


def adamw(keras):
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def with_shares(model, optimizer, fa, shard=True):
    options = {
        "gradient_accumulation_steps": 2,
        "clip_norm": 0.5,
        "loss_scale": fa.DynamicLossScale(4.0, 2),
    }
    return fa.Trainer(
        model, optimizer, "mse", ["mae"], **options, shard_optimizer=shard, jit_compile=False
    )


def refused(trainer, x, y):
    """Returns the error of a `fit` before a weight is moved.

    All workers raise it alike, so it need not end their cluster.
    """
    before = trainer.model.get_weights()
    try:
        type(trainer).fit.__wrapped__(trainer, x, y, batch_size=None if y is None else 5, verbose=0)
    except ValueError as error:
        assert all(map(np.array_equal, before, trainer.model.get_weights()))
        return str(error)


def shares(keras, tf, fa, strategy, x, y, folder, index):
    """Trains with slots on all workers and shared out, by each optimizer, and tells what came of
    it.
    """
    optimizers = {
        "adamw": lambda: adamw(keras),
        "lamb": lambda: keras.optimizers.Lamb(0.01, weight_decay=0.01),
        "muon": lambda: keras.optimizers.Muon(0.01),
        "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    }
    x[11] = np.inf  # a step in each epoch that all skip
    outcome = {"differences": {}, "steps": {}, "here": {}}
    for name, make_optimizer in optimizers.items():
        found = []
        for shard in (False, True):
            with strategy.scope():
                model = make(keras, seed=1)
            trainer = with_shares(model, make_optimizer(), fa, shard)
            keras.utils.set_random_seed(3)
            history = trainer.fit(
                x[:33], y[:33], batch_size=5, epochs=STEPS // 4, verbose=0
            ).history
            found.append((model.get_weights(), history, trainer))
            outcome["steps"][name] = (
                int(trainer.optimizer.iterations.numpy()),
                history["skipped_steps"],
            )
        (plain, logs, of_all), (sharded, sharded_logs, trainer) = found
        here = [bool(v.value.is_initialized()) for v in trainer.optimizer.variables]
        slots = zip(trainer.optimizer.variables, of_all.optimizer.variables, here, strict=True)
        pairs = [
            *zip(sharded, plain, strict=True),
            *((a.numpy(), b.numpy()) for a, b, held in slots if held),
        ]
        outcome["differences"][name] = [float(np.abs(a - b).max()) for a, b in pairs]
        np.testing.assert_equal(sharded_logs, logs)
        outcome["here"][name] = here
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.model.save(f"{folder}/model{index}.keras")
    outcome["warned"] = [str(each.message) for each in caught]
    again = with_shares(trainer.model, trainer.optimizer, fa, shard=False)
    outcome["taken back"] = refused(again, x, y)
    with strategy.scope():
        model = make(keras, seed=1)
    outcome["averages"] = refused(with_shares(model, keras.optimizers.Adam(use_ema=True), fa), x, y)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(5).filter(lambda *batch: True)
    outcome["length"] = refused(with_shares(model, adamw(keras), fa), batches, None)
    return outcome


def reading(keras):
    """A callback that waits for each step."""
    return keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: float(logs["loss"])
    )


def out_of_range(keras, fa, strategy, index):
    """Returns each worker's error, its number of updates and whether a weight has moved, when a
    label of the second worker alone is out of range. The chief reads each step's logs, so it learns
    of it first.
    """
    x, labels = data()[0][:40], np.arange(40) % 3
    labels[7] = 5  # of a micro-batch of 4 the second worker has the last two
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trainer = fa.Trainer(
        model, keras.optimizers.Adam(), loss, gradient_accumulation_steps=2, jit_compile=False
    )
    before = model.get_weights()
    try:
        trainer.fit(
            x,
            labels,
            batch_size=4,
            shuffle=False,
            verbose=0,
            callbacks=[] if index else [reading(keras)],
        )
        error = None
    except ValueError as raised:
        error = str(raised)
    moved = any((a != b).any() for a, b in zip(model.get_weights(), before, strict=True))
    return [error, int(trainer.optimizer.iterations.numpy()), moved]


def main(ports, index, mode, folder):
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports.split(",")]}
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": cluster, "task": {"type": "worker", "index": index}}
    )
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    import fastaccum as fa

    x, y = data()
    with strategy.scope():
        make_model = {"saved": with_dropout, "packed": language_model}.get(mode, make)
        # the chief's initial weights and shuffling are everyone's
        model = make_model(keras, seed=index)
    if mode == "differ":
        outcome = {
            name: differing(keras, fa, strategy, x, y, **{what: values[index]})
            for name, (what, values, _) in DIFFERENT.items()
        }
        outcome["nothing"] = differing(keras, fa, strategy, x, y)
        (pathlib.Path(folder) / f"outcome{index}.json").write_text(json.dumps(outcome))
        return
    if mode == "other's label":
        (pathlib.Path(folder) / f"outcome{index}.json").write_text(
            json.dumps(out_of_range(keras, fa, strategy, index))
        )
        return
    if mode == "shares":
        outcome = shares(keras, tf, fa, strategy, x, y, folder, index)
        (pathlib.Path(folder) / f"outcome{index}.json").write_text(json.dumps(outcome))
        return
    if mode == "absent" and index:
        time.sleep(600)
    if mode in ("forever", "absent", "stuck"):
        trainer = fa.Trainer(model, "adam", "mse", gradient_accumulation_steps=2, jit_compile=False)

        def told(batch, logs):
            print("step", flush=True)
            time.sleep(600 if mode == "stuck" and index and batch == 3 else 0.05)

        callback = keras.callbacks.LambdaCallback(on_train_batch_end=told)
        trainer.fit(x, y, batch_size=5, epochs=10**6, verbose=0, callbacks=[callback])
        return
    if mode == "slow":
        calls = itertools.count()

        def loss(y_true, y_pred):
            waited = tf.py_function(
                lambda: time.sleep(12 if next(calls) == 7 else 0) or 0.0, [], tf.float32
            )
            return keras.losses.mean_squared_error(y_true, y_pred) + tf.ensure_shape(waited, [])

        trainer = fa.Trainer(model, "adam", loss, gradient_accumulation_steps=2, jit_compile=False)
        trainer.fit(
            x[:40],
            y[:40],
            batch_size=4,
            epochs=2,
            verbose=0,
            callbacks=[] if index else [reading(keras)],
        )
        return
    if mode in ("saved", "plain", "packed", "saved shares") or mode.startswith("killed in share"):
        if mode == f"killed in share {index}":
            import killed

            killed.kill_self_at("open", 1, f"{folder}/checkpoints", named="step-00000014.writing-")
        if mode in ("saved", "plain", "packed"):
            adam = keras.optimizers.Adam(0.01)
            loss = "mse"
            if mode == "packed":
                loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            trainer = fa.Trainer(
                model, adam, loss, gradient_accumulation_steps=2, jit_compile=False
            )
        else:
            trainer = with_shares(model, adamw(keras), fa)
        slow = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: time.sleep(0.03)
        )
        saved = {"checkpoint_dir": f"{folder}/checkpoints", "checkpoint_every": 7}
        fitted = {"x": x, "y": y, "batch_size": 5}
        if mode == "packed":
            fitted = {"x": packed(fa)}
        trainer.fit(**fitted, epochs=EPOCHS, callbacks=[slow], verbose=2, **saved)
        held = [v for v in trainer.optimizer.variables if v.value.is_initialized()]
        arrays = [*model.get_weights(), *(v.numpy() for v in held)]
        np.savez(pathlib.Path(folder) / f"weights{index}.npz", *arrays)
        return
    trainer, losses = trained(model, keras.optimizers.Adam(0.01), fa, x, y)
    weights = model.get_weights()
    outcome = {
        "losses": losses,
        "evaluated": trainer.evaluate(x, y, batch_size=6, verbose=0),
        "chief": trainer._replicas.is_chief,
        "broadcast": trainer._replicas.gather([index + 7])[0],
    }
    predicted = trainer.predict(x, batch_size=6, verbose=0)
    trainer._replicas.gather([])
    outcome["refused"] = refusals(trainer, x, y, index, tf)
    os.environ["FASTACCUM_MEMORY_LIMIT"] = f"{index + 1} MiB"  # the first worker has less
    plan = fa.plan(trainer, (x[:1], y[:1]), global_batch_size=2)
    outcome["planned"] = plan.batch_size, plan.memory_limit, plan.peak_bytes
    try:
        fa.plan(trainer, (x[:1], y[:1]), global_batch_size=2, memory_limit=2 ** (20 + index))
    except ValueError as error:
        outcome["plans differ"] = str(error)
    np.savez(pathlib.Path(folder) / f"weights{index}.npz", *weights, predicted)
    (pathlib.Path(folder) / f"outcome{index}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
