"""Batches of sizes that vary, in models that mix rows: a program for each size, and one that ends
the update.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from listed_batches import ListedBatches
from oracle import assert_same
from resuming import assert_same as assert_resumes

import fastaccum as fa
from fastaccum.data import sizes as of_sizes

SIZES = [7, 3, 5, 2, 7, 4, 6, 3, 5, 1]
ACCUMULATION = 3


def data(sizes=SIZES, weighted=False, outputs=1, seed=0):
    random = np.random.default_rng(seed)
    for size in sizes:
        x = random.normal(size=(size, 4)).astype("float32")
        y = tuple(random.normal(size=(size, 2)).astype("float32") for _ in range(outputs))
        weights = tuple(random.uniform(0.2, 2, size).astype("float32") for _ in range(outputs))
        y, weights = (y, weights) if outputs > 1 else (y[0], weights[0])
        yield (x, y, weights) if weighted else (x, y)


class Batches(ListedBatches):
    """Batches of these sizes, in another order in each epoch if `shuffled`."""

    def __init__(self, shuffled=False, **options):
        super().__init__(data(**options), shuffled)


def normalized(outputs=1, dtype=None):
    keras.utils.set_random_seed(1)
    x = keras.Input([4])
    h = keras.layers.Dense(8, kernel_regularizer=keras.regularizers.L2(0.01), dtype=dtype)(x)
    h = keras.layers.BatchNormalization(dtype=dtype)(h)
    made = [
        keras.layers.Dense(2, name=f"out{i}", dtype=dtype)(keras.ops.tanh(h))
        for i in range(outputs)
    ]
    return keras.Model(x, made if outputs > 1 else made[0])


def loss_sum(y, outputs, weights):
    """The squared error, a mean over the last axis, added up over rows, weighted, and over
    outputs.
    """
    if isinstance(y, tuple):
        each = weights or [1.0] * len(y)
        return tf.add_n([loss_sum(*parts) for parts in zip(y, outputs, each, strict=True)])
    return tf.reduce_sum(
        tf.reduce_mean((y - outputs) ** 2, -1) * (1.0 if weights is None else weights)
    )


def train_by_hand(model, batches, optimizer, clip_norm=None):
    """Adds up the gradients of the updates' micro-batches, as people write it; each sum is divided
    by all rows.
    """
    variables = model.trainable_variables
    for start in range(0, len(batches), ACCUMULATION):
        update = batches[start : start + ACCUMULATION]
        rows = sum(len(x) for x, *_ in update)
        totals = [tf.zeros_like(v) for v in variables]
        for batch in update:
            x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
            with tf.GradientTape() as tape:
                loss = loss_sum(y, model(x, training=True), weights) / rows
            totals = [a + g for a, g in zip(totals, tape.gradient(loss, variables), strict=True)]
        with tf.GradientTape() as tape:
            penalty = tf.add_n(model.losses)
        of_penalty = tape.gradient(penalty, variables)
        totals = [a if g is None else a + g for a, g in zip(totals, of_penalty, strict=True)]
        if clip_norm is not None:
            totals, _ = tf.clip_by_global_norm(totals, clip_norm)
        optimizer.apply(totals, variables)


def programs(trainer):
    return {
        name: len(program.seconds) for name, program in trainer._builder.engine.programs.items()
    }


CASES = {
    "one loss": {},
    "weights": {"weighted": True},
    "two losses, weighted": {"outputs": 2, "weighted": True},
    "clipped": {"clip_norm": 0.05},
}


@pytest.mark.parametrize("jit_compile", [True, False], ids=["XLA", "no XLA"])
@pytest.mark.parametrize("case", CASES)
def test_updates_are_those_of_a_loop_by_hand(case, jit_compile):
    options = dict(CASES[case])
    clip_norm = options.pop("clip_norm", None)
    theirs, ours = (normalized(options.get("outputs", 1)) for _ in range(2))
    train_by_hand(theirs, list(data(**options)), keras.optimizers.SGD(0.5), clip_norm)
    optimizer = keras.optimizers.SGD(0.5, global_clipnorm=clip_norm)
    trainer = fa.Trainer(
        ours,
        optimizer,
        "mse",
        gradient_accumulation_steps=ACCUMULATION,
        jit_compile=jit_compile,
        loss_scale=None,
    )
    trainer.fit(Batches(**options), shuffle=False, verbose=0)
    assert_same(ours.get_weights(), theirs.get_weights(), 1e-5)
    assert programs(trainer)["micro-batch of an update"] == (len({*SIZES}) if jit_compile else 1)


def test_shuffled_sizes_compile_once_for_each_size():
    trainer = fa.Trainer(
        normalized(), "adam", "mse", gradient_accumulation_steps=ACCUMULATION, jit_compile=True
    )
    with pytest.warns(
        RuntimeWarning, match=r"3 programs were made so far.* What differs: rows.*unbatch\(\)"
    ):
        history = trainer.fit(Batches(shuffled=True), shuffle=False, epochs=8, verbose=0)
    used = {name: count for name, count in programs(trainer).items() if count}
    assert {name: count for name, (count, _) in history.programs.items()} == used
    assert used.pop("train step", 0) <= 1  # a last update of one batch, of the largest size
    assert used == {"micro-batch of an update": len({*SIZES}), "end of an update": 1}


def test_on_a_cpu_one_trace_is_for_all_sizes_unless_xla_is_asked_for():
    trainer = fa.Trainer(normalized(), "adam", "mse", gradient_accumulation_steps=ACCUMULATION)
    with pytest.warns(UserWarning, match=r"each as it is, op by op.*\(jit_compile=True\)"):
        trainer.fit(Batches(shuffled=True), shuffle=False, epochs=8, verbose=0)
    assert trainer._builder.engine.objective.options.uses_xla
    used = {name: count for name, count in programs(trainer).items() if count}
    assert used == {"micro-batch of an update": 1, "end of an update": 1}


def test_full_updates_and_a_short_last_batch_are_programs_of_their_own():
    trainer = fa.Trainer(
        normalized(), "adam", "mse", gradient_accumulation_steps=ACCUMULATION, jit_compile=False
    )
    trainer.fit(Batches(sizes=[4, 4, 4, 4, 4, 4, 4, 4, 2]), epochs=2, shuffle=False, verbose=0)
    used = {name: count for name, count in programs(trainer).items() if count}
    assert used == {"train step": 2}


def test_a_skipped_update_moves_nothing_but_the_loss_scale():
    model = normalized(dtype="mixed_float16")
    trainer = fa.Trainer(
        model, keras.optimizers.SGD(0.1), "mse", gradient_accumulation_steps=ACCUMULATION
    )
    trainer.fit(Batches(), verbose=0)
    before, scale = model.get_weights(), float(trainer.loss_scale.scale())
    batches = Batches(sizes=[3, 7, 5])
    batches.batches[1][0][0, 0] = 1e6  # infinite in float16
    history = trainer.fit(batches, verbose=0).history
    assert history["skipped_steps"] == [1]
    for then, now in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(then, now)
    assert float(trainer.loss_scale.scale()) < scale


def test_an_error_at_the_end_of_an_update_leaves_the_statistics(monkeypatch):
    model = normalized()
    trainer = fa.Trainer(
        model, "sgd", "mse", gradient_accumulation_steps=ACCUMULATION, jit_compile=False
    )
    trainer.fit(Batches(), verbose=0)
    before = model.get_weights()

    class Failing(dict):
        def get(self, signature):
            return self.fail

        def fail(self, leaves):
            raise tf.errors.InternalError(None, None, "lost")

    monkeypatch.setattr(trainer._builder.engine.programs["end of an update"], "_calls", Failing())
    with pytest.raises(tf.errors.InternalError, match="lost"):
        trainer.fit(Batches(), verbose=0)
    for then, now in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(then, now)


def test_an_error_in_the_second_micro_batch_leaves_the_statistics():
    model = normalized()
    trainer = fa.Trainer(model, "sgd", "mse", gradient_accumulation_steps=2, jit_compile=False)
    trainer.fit(Batches(), verbose=0)
    before = model.get_weights()
    batches = Batches(sizes=[2, 5])
    x, y = batches.batches[1]
    batches.batches[1] = x, y[:, :1]  # of another width
    with pytest.raises(ValueError):
        trainer.fit(batches, shuffle=False, verbose=0)
    for then, now in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(then, now)


@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_a_resumed_training_ends_bit_for_bit(tmp_path, steps_per_execution):
    def make():
        return fa.Trainer(
            normalized(outputs=2),
            "adam",
            "mse",
            gradient_accumulation_steps=ACCUMULATION,
            steps_per_execution=steps_per_execution,
            jit_compile=False,
        )

    def batches():  # those that Keras shuffles have an order of the process's seed
        return {"x": Batches(shuffled=True, outputs=2), "shuffle": False}

    assert_resumes(make, batches, [1, 4, 2], tmp_path, epochs=3)


def plain():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [keras.Input([4]), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)]
    )


def test_rows_that_vary_go_over_to_xla_after_some_updates(tmp_path, monkeypatch):
    """Goes over to XLA, as long trainings on a CPU do after 512 updates.

    Updates are exact before and after, and a resumed training is bit-identical.
    """
    monkeypatch.setattr(of_sizes, "STEPS_TO_LEARN", 3)
    monkeypatch.setattr(of_sizes, "STEPS_TO_EARN", 5)

    def make():
        return fa.Trainer(
            plain(),
            keras.optimizers.SGD(0.5),
            "mse",
            gradient_accumulation_steps=ACCUMULATION,
            loss_scale=None,
        )

    trainer = assert_resumes(
        make, lambda: {"x": Batches(), "shuffle": False}, [2, 4, 3], tmp_path, epochs=3
    )
    used = {name: count for name, count in programs(trainer).items() if count}
    # The train step is of 5 rows, which the first three updates needed.
    assert used == {"train step": 1, "micro-batch of an update": 1, "end of an update": 1}

    theirs = plain()
    theirs.compile(keras.optimizers.SGD(0.5), "mse", jit_compile=False)
    for _ in range(3):
        batches = list(data())
        for start in range(0, len(batches), ACCUMULATION):
            update = batches[start : start + ACCUMULATION]
            theirs.train_on_batch(*(np.concatenate(parts) for parts in zip(*update, strict=True)))
    assert_same(trainer.model.get_weights(), theirs.get_weights(), 1e-5)


def test_steps_read_ahead_of_a_checkpoint_do_not_change_what_comes_before_them(tmp_path):
    """Reads a dispatch of three steps, of which the last shows that sizes vary.

    A resumed training has not seen it yet.
    """
    sizes = [4, 4, 2, 4, 4, 2, 3, 3, 2] * 2

    def make():
        keras.utils.set_random_seed(1)
        return fa.Trainer(
            normalized(),
            "adam",
            "mse",
            gradient_accumulation_steps=ACCUMULATION,
            steps_per_execution=3,
            jit_compile=False,
        )

    assert_resumes(
        make, lambda: {"x": Batches(sizes=sizes), "shuffle": False}, [1, 2], tmp_path, epochs=2
    )


class Centred(keras.layers.Layer):
    def call(self, x):
        return x - keras.ops.mean(x, 0, keepdims=True)


def test_an_evaluation_of_a_layer_that_mixes_rows_has_one_trace_for_all_sizes():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input([4]), Centred(), keras.layers.Dense(2)])
    trainer = fa.Trainer(
        model, "sgd", "mse", gradient_accumulation_steps=ACCUMULATION, jit_compile=False
    )
    batches = list(data())
    found = trainer.evaluate(Batches(), verbose=0)
    errors = [(y - model(x).numpy()) ** 2 for x, y in batches]
    np.testing.assert_allclose(found, np.concatenate(errors).mean(), rtol=1e-6)
    trainer.evaluate(Batches(sizes=SIZES[::-1]), verbose=0)
    assert programs(trainer)["evaluation"] <= 1
    assert programs(trainer)["micro-batch of an evaluation"] == 1


def test_a_small_micro_batch_overflows_no_sooner_than_the_whole_update():
    """The loss scale is divided by the rows of all of the update, so that float16 holds as much for
    each size.
    """
    skipped = {}
    for sizes in ([50, 50, 50], [2, 50, 98]):
        model = normalized(dtype="mixed_float16")
        trainer = fa.Trainer(
            model,
            keras.optimizers.SGD(0.0),
            "mse",
            gradient_accumulation_steps=ACCUMULATION,
            loss_scale=2.0**17,
        )
        skipped[len({*sizes})] = trainer.fit(
            Batches(sizes=sizes), shuffle=False, verbose=0
        ).history["skipped_steps"]
    assert skipped == {1: [0], 3: [0]}
