"""`fa.plan` and `fit(batch_size="auto")`: the choice, what it leaves as it was, and what it
refuses.
"""

import gc
import traceback

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa
from fastaccum.data.datasets import DatasetSource
from fastaccum.data.stacks import Dispatch
from fastaccum.layers.remat import installed
from fastaccum.memory import plan, planner
from fastaccum.memory.analysis import IN_FLIGHT, dispatch_memory, specs, stacked

ROWS = 40
X = np.random.default_rng(0).normal(size=(ROWS, 64)).astype("float32")
Y = np.arange(ROWS) % 10
SAMPLE = X[:1], Y[:1]


def dense(**options):
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(512, "relu", name="inner"),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(10),
    ]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = keras.Sequential([keras.Input((64,)), *layers])
    return fa.Trainer(model, "sgd", loss, metrics=["accuracy"], **options)


def state(trainer):
    variables = [
        *trainer.model.variables,
        *trainer.optimizer.variables,
        *trainer._engine.running.variables,
    ]
    return [v.numpy() for v in variables]


def memory(trainer, rows, global_batch):
    sample = specs(
        trainer._setup.make_source(*SAMPLE, None, trainer._present_options, batch_size=None).sample,
        rows,
    )
    sample = sample._replace(valid=tf.TensorSpec([rows], tf.bool))
    with trainer._engine.temporary_retrace():
        return dispatch_memory(trainer._engine, Dispatch((stacked(sample, global_batch // rows),)))


def graphs():
    gc.collect()
    return {id(each) for each in gc.get_objects() if isinstance(each, tf.Graph)}


@pytest.fixture(scope="module")
def planned():
    """A trainer that has trained, what it held before a plan, the plan, and what it holds since."""
    trainer = dense()
    trainer.fit(X, Y, batch_size=8, verbose=0)
    too_large = memory(trainer, 8, 16).peak_bytes
    before, drawn, graphs_before = state(trainer), np.random.get_state()[1], graphs()
    with pytest.MonkeyPatch.context() as few:
        few.setattr(planner, "candidates", lambda *_: [4, 8])
        plan = fa.plan(trainer, SAMPLE, global_batch_size=16, memory_limit=too_large - 1)
    np.testing.assert_array_equal(np.random.get_state()[1], drawn)
    assert graphs() <= graphs_before  # and so are the programs that it had
    return trainer, before, plan, state(trainer), too_large


def test_the_choice_is_the_largest_that_fits(planned):
    _, _, plan, _, too_large = planned
    assert (plan.batch_size, plan.accumulation_steps, plan.memory_limit) == (4, 4, too_large - 1)
    assert plan.recompute is None and plan.compilations == len(plan.considered) == 2
    (larger,) = [c for c in plan.considered if c.batch_size == 8]
    assert (larger.peak_bytes, larger.fits) == (too_large, False) and plan.peak_bytes < too_large


def test_a_plan_leaves_trainer_and_model_as_they_were(planned):
    trainer, before, _, after, _ = planned
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)
    assert trainer.gradient_accumulation_steps == 1
    # that of its fit
    assert trainer._engine.compiled_execute.function.experimental_get_tracing_count() == 1


def test_a_plan_is_a_table(planned):
    _, _, plan, _, _ = planned
    lines = str(plan).splitlines()
    rows = sorted(each.batch_size for each in plan.considered)
    assert [line.split()[0] for line in lines[1:-1]] == [str(each) for each in rows]
    assert [line.split()[0] for line in lines if "chosen" in line] == ["4"]
    assert (
        lines[-1].startswith("batch_size=4 x 4 micro-batches = 16 rows: ")
        and plan.summary == lines[-1]
    )


def test_a_dispatch_of_several_steps_holds_the_data_of_all(planned, monkeypatch):
    trainer, _, plan, _, _ = planned
    monkeypatch.setattr(planner, "candidates", lambda *_: [4])
    monkeypatch.setattr(trainer, "steps_per_execution", 16)
    several = fa.plan(trainer, SAMPLE, global_batch_size=16, memory_limit="1GiB")
    data = memory(trainer, 4, 16).by_kind["data"]
    assert several.peak_bytes == plan.peak_bytes + 15 * data
    assert data >= IN_FLIGHT * 16 * (64 * 4 + 8 + 1)  # rows of x, labels and validity


def test_with_room_for_all_rows_one_program_is_compiled(planned):
    plan = fa.plan(planned[0], SAMPLE, global_batch_size=16, memory_limit="1GiB")
    assert (plan.batch_size, plan.compilations) == (16, 1)
    assert plan.peak_bytes == memory(planned[0], 16, 16).peak_bytes


def test_nothing_fits(planned, monkeypatch):
    trainer = planned[0]
    monkeypatch.setattr(planner, "has_gpu", lambda: True)  # where recomputation saves memory
    with pytest.raises(
        fa.OutOfMemoryError, match=r"micro-batch of 1 row fits: .* 97\.7 KiB are there"
    ) as raised:
        # a whole number, as of a division
        fa.plan(trainer, SAMPLE, global_batch_size=1.0, memory_limit="100 KB")
    assert raised.value.largest[0].layer.endswith("/inner") and raised.value.limit == 100_000
    for each in ("weights  ", "The largest:", "What to change:", "recompute='auto'"):
        assert each in str(raised.value)


@pytest.mark.parametrize("data", ["arrays", pytest.param("dataset", marks=pytest.mark.slow)])
def test_auto_is_the_fit_with_what_it_chose(data, monkeypatch, capsys):
    monkeypatch.setenv("FASTACCUM_MEMORY_LIMIT", "1GiB")
    monkeypatch.setattr(planner, "candidates", lambda *_: [4, 8])
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(10)
    same, auto = dense(gradient_accumulation_steps=2), dense()
    auto.fit(
        *((X, Y) if data == "arrays" else (dataset,)),
        batch_size="auto",
        global_batch_size=16,
        epochs=2,
    )
    assert auto.gradient_accumulation_steps == 2
    said = capsys.readouterr()
    assert (
        "batch_size=8 x 2 micro-batches = 16 rows: at most " in said.out
        and "(0 programs compiled, " in said.out
    )
    # there is plainly room: the program that trains is the only one
    assert "compiling program" not in said.err
    keras.utils.set_random_seed(0)
    same.fit(*((X, Y, 8) if data == "arrays" else (dataset.rebatch(8),)), epochs=2)
    for a, b in zip(state(auto), state(same), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_plan_says_what_recomputation_adds(planned):
    """Compares the smallest micro-batch with and without recomputation.

    Larger ones may recompute less.
    """
    found = planner.Planner(planned[0]._engine, None, 8)
    compiled = [(None, 8, 1000), (None, 1, 1200), ("auto", 1, 1560), ("auto", 4, 1400)]
    found._considered = [
        plan.Considered(rows, 8 // rows, policy, 0, True, n) for policy, rows, n in compiled
    ]
    assert found._planned("auto", 4).extra_flops == pytest.approx(0.3)


def test_a_dataset_is_rebatched():
    data = DatasetSource(tf.data.Dataset.from_tensor_slices((X, Y)).batch(10), "x")
    data.rebatch(16)
    assert data.batch_size == 16 and [len(b.x) for b in data.dataset] == [16, 16, 8]
    np.testing.assert_array_equal(np.concatenate([b.x for b in data.dataset]), X)
    with pytest.raises(ValueError, match="which 2 workers share"):
        data.most_rows(workers=2)


def batches():
    yield X[:4], Y[:4]


REFUSED = [
    (
        lambda t: t.fit(X, Y, batch_size="auto"),
        'batch_size="auto" needs global_batch_size=N, the rows of an update',
    ),
    (
        lambda t: t.fit(X, Y, batch_size=8, global_batch_size=16),
        'global_batch_size=16 needs batch_size="auto", .* and not batch_size=8',
    ),
    (
        lambda t: t.fit(batches(), batch_size="auto", global_batch_size=16),
        "yields batches of its own",
    ),
    (
        lambda t: fa.plan(t, batches(), global_batch_size=16),
        "sample is a generator: pass one of its batches",
    ),
    (
        lambda t: fa.plan(t, SAMPLE, global_batch_size=0),
        "global_batch_size=0 must be a whole number of at least 1",
    ),
    (
        lambda t: fa.plan(t, SAMPLE, global_batch_size=16, memory_limit="much"),
        "memory_limit='much' is not a size",
    ),
    (
        lambda t: fa.plan(t, SAMPLE, global_batch_size=16, memory_limit="24"),
        """memory_limit='24' would be 24 bytes, since it has no unit: pass "24GiB", or "24MiB".""",
    ),
    (
        lambda t: fa.plan(t, SAMPLE, global_batch_size=16, memory_limit=80),
        'pass "80GiB", or "80MiB"',
    ),
    (
        lambda t: fa.plan(t, SAMPLE, global_batch_size=16, recompute="all"),
        "recompute='all' must be 'auto'",
    ),
    (lambda t: fa.plan(t, (X[:1], None), global_batch_size=16), "y=None"),
    (lambda t: fa.plan(t.model, SAMPLE, global_batch_size=16), "is not a fastaccum.Trainer"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_is_refused(call, message, planned, capsys):
    with pytest.raises((ValueError, TypeError), match=message):
        call(planned[0])
    assert "compiling" not in capsys.readouterr().err


def test_a_plan_is_shown_as_its_table(planned):
    """Shows the table when a plan is the last line of a notebook's cell."""
    assert repr(planned[2]) == str(planned[2]) and "Considered(" not in repr(planned[2])


def test_a_mistaken_shape_is_told_in_few_lines():
    trainer = dense()
    with pytest.raises(ValueError) as caught:
        fa.plan(trainer, (np.zeros((1, 63)), Y[:1]), global_batch_size=16)
    message = str(caught.value)
    assert message.startswith("The model, called with x of shape (16, 63): ")
    assert "Input 0 " in message
    assert "layer 'inner'" in message and "to have value 64" in message and "\n" not in message
    said = "".join(traceback.format_exception(caught.value))
    assert said.count("  File ") < 8, said
    keras.config.disable_traceback_filtering()
    try:
        with pytest.raises(ValueError) as caught:
            fa.plan(trainer, (np.zeros((1, 63)), Y[:1]), global_batch_size=16)
    finally:
        keras.config.enable_traceback_filtering()
    assert "".join(traceback.format_exception(caught.value)).count("  File ") > 15


def test_a_line_of_the_users_own_is_shown():
    class Mine(keras.layers.Layer):
        def call(self, x):
            return keras.ops.matmul(x, keras.ops.ones((3, 3)))  # of no use to 64 columns

    trainer = fa.Trainer(keras.Sequential([Mine(), keras.layers.Dense(10)]), "sgd", "mse")
    with pytest.raises(ValueError) as caught:
        fa.plan(trainer, SAMPLE, global_batch_size=16)
    assert "of no use to 64 columns" in "".join(traceback.format_exception(caught.value))


def test_without_xla_there_is_nothing_to_read():
    with pytest.raises(ValueError, match="jit_compile=False"):
        fa.plan(dense(jit_compile=False), SAMPLE, global_batch_size=16)


def test_rows_of_unknown_length():
    model = keras.Sequential(
        [keras.Input((None,)), keras.layers.Embedding(5, 4), keras.layers.Dense(1)]
    )
    signature = tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([None, None, 1], tf.float32)
    data = tf.data.Dataset.from_generator(lambda: iter(()), output_signature=signature)
    with pytest.raises(ValueError, match=r"rows have shape \(None,\)"):
        fa.plan(fa.Trainer(model, "sgd", "mse"), data, global_batch_size=16)


def test_replicas_must_divide_the_global_batch():
    assert planner.candidates(24, replicas=2) == [2, 4, 6, 8, 12, 24]
    assert planner.candidates(24, at_most=7) == [1, 2, 3, 4, 6]
    with pytest.raises(
        ValueError, match="global_batch_size=25 cannot be shared equally by 2 replicas"
    ):
        planner.candidates(25, replicas=2)


@pytest.mark.slow
def test_recomputation_is_turned_on_where_nothing_fits_without():
    stacked = {"layers": 8, "stacked": True, "policy": "everything_saveable"}
    model = fa.gpt(vocabulary_size=16, width=8, heads=2, context=128, **stacked)
    trainer = fa.Trainer(model, "sgd", fa.LinearCrossEntropy())
    ids = np.zeros((1, 128), "int32")
    as_it_is = fa.plan(trainer, (ids, ids), global_batch_size=1, memory_limit="1GiB")
    asked = {"global_batch_size": 1, "memory_limit": as_it_is.peak_bytes - 1, "recompute": "auto"}
    plan = fa.plan(trainer, (ids, ids), **asked)
    assert plan.recompute == ["projection", "attention"] and plan.peak_bytes < as_it_is.peak_bytes
    assert [each.recompute for each in plan.considered] == [None, plan.recompute]
    less = fa.plan(trainer, (ids, ids), **asked | {"memory_limit": plan.peak_bytes - 1})
    least = fa.plan(trainer, (ids, ids), **asked | {"memory_limit": less.peak_bytes - 1})
    assert less.recompute == ["attention"] and least.recompute == "nothing_saveable"
    assert 0.1 < less.extra_flops < least.extra_flops < 0.5
    assert f"recompute='nothing_saveable' ({least.extra_flops:+.0%} arithmetic)" in str(least)
    (stack,) = [layer for layer in model.layers if layer.name == "blocks"]
    assert (stack.policy, stack.unroll) == ("everything_saveable", False)
    with pytest.raises(MemoryError, match=r"nor does it with .*nothing_saveable"):
        fa.plan(trainer, (ids, ids), **asked | {"memory_limit": "10KiB"})


def test_a_model_without_blocks_is_told_that_nothing_fits(planned, capsys):
    with pytest.raises(MemoryError, match="1 row fits: ") as raised:
        fa.plan(
            trainer=planned[0],
            sample=SAMPLE,
            global_batch_size=1,
            memory_limit="100 KB",
            recompute="auto",
        )
    assert "program 1, micro-batches of 1 row\n" in capsys.readouterr().err
    changes = str(raised.value).partition("What to change:")[2]
    assert "has no blocks" in changes and "recompute='auto'" not in changes


class Counting(keras.layers.Layer):
    """Counts its calls in a branch, where what is computed again cannot start from the same
    number.
    """

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.inner = keras.layers.Dense(shape[-1])
        self.inner.build(shape)

    def call(self, x):
        counted = tf.cond(
            tf.reduce_sum(x) > 0, lambda: self.calls.value.assign_add(1.0), lambda: 0.0
        )
        return self.inner(x) + 0.0 * counted

    def compute_output_shape(self, shape):
        return shape


def test_the_error_says_why_a_model_cannot_be_recomputed_if_nothing_fits():
    model = keras.Sequential([keras.Input((8,)), Counting(), Counting(), keras.layers.Dense(1)])
    asked = {"global_batch_size": 1, "memory_limit": "1KB", "recompute": "auto", "verbose": 0}
    with pytest.raises(
        MemoryError, match=r"(?s)1 row fits: .*What is to be computed again assigns .*recomputed\.$"
    ):
        fa.plan(fa.Trainer(model, "sgd", "mse"), (np.zeros((1, 8)), np.zeros((1, 1))), **asked)
    assert not installed(model)


def test_without_xla_no_policy_is_recommended():
    """No block would be computed again, whatever XLA's plan says."""

    def block():
        return keras.Sequential(
            [keras.layers.Conv2D(8, 5, padding="same", activation="tanh") for _ in range(2)]
        )

    model = keras.Sequential([keras.Input((16, 16, 8)), block(), block(), block()])
    sample, asked = (
        (np.zeros((1, 16, 16, 8)),) * 2,
        {"global_batch_size": 1, "recompute": "auto", "verbose": 0},
    )
    with pytest.raises(MemoryError, match=r"(?s)1 row fits: .*The step runs without XLA"):
        fa.plan(fa.Trainer(model, "sgd", "mse"), sample, **asked, memory_limit="1KB")
    with pytest.raises(MemoryError, match="nor does it with recompute="):
        fa.plan(
            fa.Trainer(model, "sgd", "mse", jit_compile=True), sample, **asked, memory_limit="1KB"
        )
