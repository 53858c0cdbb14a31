"""Refuses what cannot fit before a weight moves. Running out of memory leaves all variables alone."""

import math
import os
import re
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf

import fastaccum as fa
from fastaccum.adapters.losses import OutputLoss
from fastaccum.memory import admission, analysis, buffers, device, errors
from fastaccum.step.compiler_ir import MemoryAnalysis

ROWS, LIMIT = 512, 2**20


@pytest.fixture(scope="module")
def trainer():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(256, activation="gelu", name="wide"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((16,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return fa.Trainer(model, "adam", loss, gradient_accumulation_steps=2)


X, Y = np.ones([2 * ROWS, 16], "float32"), np.zeros(2 * ROWS, int)


def fit(trainer, batch_size=ROWS, **arguments):
    return trainer.fit(X, Y, batch_size=batch_size, verbose=0, **arguments)


@pytest.fixture(scope="module")
def refused(trainer, tmp_path_factory):
    """The error of a fit that cannot fit, and the weights before it."""
    before = [w.numpy() for w in trainer.model.weights]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(fa.OutOfMemoryError) as error:
        patch.setenv(device.LIMIT, str(LIMIT))
        fit(trainer, checkpoint_dir=tmp_path_factory.mktemp("refused"))
    return error.value.with_traceback(None), before


def test_what_cannot_fit_is_refused_before_a_weight_moves(trainer, refused):
    error, before = refused
    assert isinstance(error, MemoryError)
    assert error.limit == LIMIT < error.memory.peak_bytes == sum(error.by_kind.values())
    assert [b.kind for b in error.largest[:2]] == ["activations"] * 2 and error.largest[
        0
    ].layer.endswith("wide")
    for before_it, weight in zip(before, trainer.model.weights, strict=True):
        np.testing.assert_array_equal(before_it, weight.numpy())


def test_the_error_says_where_the_bytes_are_and_what_to_change(refused):
    message = str(refused[0])
    assert re.search(
        r"A train step of 2 x 512 rows takes \d\.\d+ MiB, and 1(\.0)? MiB are there", message
    )
    assert all(
        re.search(rf"^  {kind} +\d.* +\d+%$", message, re.MULTILINE) for kind in refused[0].by_kind
    )
    assert len(re.findall(r"^ +\d\S* \S+  \w+( \w+)?: .*\]$", message, re.MULTILINE)) == 5
    assert "/wide MatMul [512, 256]" in message and device.LIMIT in message
    assert (
        f"batch_size={refused[0].fits} with "
        f"gradient_accumulation_steps={2 * ROWS // refused[0].fits}" in message
    )


def test_the_batch_size_that_it_says_fits_and_twice_that_does_not(
    trainer, refused, monkeypatch, tmp_path
):
    fits = refused[0].fits
    monkeypatch.setenv(device.LIMIT, str(LIMIT))
    monkeypatch.setattr(trainer, "gradient_accumulation_steps", ROWS // fits)
    assert trainer.summary(X, Y, batch_size=2 * fits, verbose=False).memory.peak_bytes > LIMIT
    monkeypatch.setattr(trainer, "gradient_accumulation_steps", 2 * ROWS // fits)
    assert np.isfinite(fit(trainer, fits, checkpoint_dir=tmp_path).history["loss"]).all()


def test_steps_that_clearly_fit_are_not_compiled_to_find_out(trainer, monkeypatch):
    monkeypatch.setattr(analysis, "hlo_proto", lambda concrete: pytest.fail("compiled"))
    fit(trainer, 64)


@pytest.mark.parametrize(
    "run", ["evaluate", pytest.param("train_step", marks=[pytest.mark.slow, pytest.mark.sample])]
)
def test_other_programs(trainer, monkeypatch, run):
    # less than the weights; of 7 rows only 1 divides them
    monkeypatch.setenv(device.LIMIT, str(LIMIT // 64))
    with pytest.raises(
        fa.OutOfMemoryError,
        match=f"{'An eval' if run == 'evaluate' else 'A train '}.* of . x 7 rows",
    ):
        if run == "evaluate":
            trainer.evaluate(X[:7], Y[:7], batch_size=7, verbose=0)
        else:
            trainer.train_step((X[None, :7], Y[None, :7]))


def test_memory_that_runs_out_in_a_callback_is_not_the_train_steps(trainer):
    def run_out(epoch, logs):
        raise MemoryError("of a callback")

    with pytest.raises(MemoryError, match="of a callback") as error:
        fit(trainer, 64, callbacks=[keras.callbacks.LambdaCallback(on_epoch_begin=run_out)])
    assert not isinstance(error.value, fa.OutOfMemoryError)


def test_later_runs_write_over_the_variables(trainer):
    def places():
        return [
            np.asarray(memoryview(v.value.read_value())).ctypes.data
            for v in trainer.model.trainable_variables
        ]

    fit(trainer, 64)
    before = places()
    fit(trainer, 64)
    assert places() == before


def test_the_first_run_is_rehearsed_if_copies_of_variables_do_not_fit(monkeypatch):
    """Allocates the memory of a run before it, since the run writes over the variables."""
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(64, use_bias=False)])
    trainer, x, y = (
        fa.Trainer(model, "sgd", "mse"),
        np.ones([8, 16], "float32"),
        np.ones([8, 64], "float32"),
    )
    peak, rehearsed = trainer.summary(x, y, batch_size=8, verbose=False).memory.peak_bytes, []
    monkeypatch.setenv(device.LIMIT, str(peak))
    monkeypatch.setattr(
        admission, "preserve_variables", lambda captured: pytest.fail("more than there is")
    )
    monkeypatch.setattr(admission, "_rehearse", rehearsed.append)
    trainer.train_step((x[None], y[None]))
    assert [memory.peak_bytes for memory in rehearsed] == [pytest.approx(peak, rel=0.01)]


def output(classes, from_logits=True, **options):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=from_logits, **options)
    return OutputLoss(0, "head", loss, 1.0, classes)


def test_advice(monkeypatch):
    held = {"weights": 10, "optimizer slots": 40, "activations": 50, "data": 50}
    found = [buffers.Buffer(size, kind, "", "", (8, 50_000)) for kind, size in held.items()]
    memory = buffers.StepMemory(MemoryAnalysis(0, 0, 0, 0), tuple(found))
    for has_gpu, says in (
        (True, "batch_size=8.*LinearCross.*remat.*Lion.*steps_per"),
        (False, "^(?!.*remat)"),
    ):
        monkeypatch.setattr(errors, "has_gpu", lambda has_gpu=has_gpu: has_gpu)
        assert re.search(says, " ".join(errors.advice(memory, (8, 4), [output(50_000)])))
    (line,) = errors.head_advice(memory, [output(50_000, ignore_class=-1)])
    assert line == "loss=fastaccum.LinearCrossEntropy(ignore_index=-1)"
    for other in (
        output(10),
        output(50_000, from_logits=False),
        output(50_000)._replace(loss=keras.losses.Hinge()),
    ):
        assert not re.search("Linear", " ".join(errors.advice(memory, None, [other])))
    # data alone is beyond the limit
    small = [found[0], *found[2:], buffers.Buffer(1000, "activations", "", "", (8,))]
    of_small = buffers.StepMemory(MemoryAnalysis(0, 0, 0, 0), tuple(small))
    assert "Fewer rows an update" in errors.advice(of_small, None, limit=40)[0]
    told = str(errors.explain("", of_small, 40, (), training=False)).partition("What to change:\n")[
        2
    ]
    assert told == "  - Evaluate with a smaller batch_size."
    assert not errors.advice(of_small, None, limit=10**5)
    assert errors._ELSE in str(errors.explain("", of_small, 10**5, (), note="More."))
    assert errors._ELSE not in str(errors.explain("", of_small, 10**5, (), more=["recompute"]))


def test_advice_to_store_the_state_in_fewer_bytes(monkeypatch):
    """It says what is saved beside what is stored now, on a GPU, by large matrices."""

    def advised(bytes_of_number, shape, has_gpu=True):
        monkeypatch.setattr(errors, "has_gpu", lambda: has_gpu)
        numbers = math.prod(shape)
        slots = buffers.Buffer(bytes_of_number * numbers, "optimizer slots", "", "", shape)
        weights = buffers.Buffer(4 * numbers, "weights", "", "", shape)
        memory = buffers.StepMemory(MemoryAnalysis(0, 0, 0, 0), (slots, weights))
        return " ".join(errors.state_advice(memory))

    shape = (1024, 1024)
    assert "'int8') takes 3.0 MiB off, and 'bfloat16' 2.0 MiB" in advised(4, shape)
    of_bfloat16 = advised(2, shape)
    assert "'int8') takes 1.0 MiB off, with" in of_bfloat16
    assert not advised(1, shape)
    assert not advised(4, (60, 60))
    assert not advised(4, shape, has_gpu=False)


RUNS_OUT = """
    import keras, numpy as np, tensorflow as tf
    import fastaccum as fa

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(1024, activation="gelu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((16,)), *layers])
    trainer = fa.Trainer(model, "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = np.ones([8192, 16], "float32"), np.zeros(8192, int)
    trainer.fit(x, y, batch_size=256, verbose=0, checkpoint_dir="saved")
    state = lambda: [np.asarray(v) for v in (*model.weights, *trainer.optimizer.variables)]
    before = state()
    for run in (lambda: trainer.fit(x, y, batch_size=8192, verbose=0),
                lambda: trainer.train_step((x[None], y[None]))):
        try:
            run()
        except fa.OutOfMemoryError as error:
            print(error.__cause__ and type(error.__cause__).__name__, error.fits, error)
    np.testing.assert_equal(state(), before)
    trainer.fit(x, y, batch_size=256, epochs=2, verbose=0, checkpoint_dir="saved")
    print("went on with", len(trainer.model.history.epoch), "epochs")
"""


def test_memory_that_runs_out_while_a_step_is_diagnosed_is_explained(monkeypatch):
    def run_out(*_):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM")

    monkeypatch.setattr("fastaccum.step.diagnosis.error", run_out)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    trainer = fa.Trainer(model, "sgd", "mse", on_nonfinite="raise", jit_compile=False)
    with pytest.raises(fa.OutOfMemoryError, match="There was no memory left"):
        trainer.fit(np.full((4, 2), np.inf, "float32"), np.zeros((4, 1)), batch_size=4, verbose=0)


@pytest.mark.slow
@pytest.mark.parametrize("told", ["before", "at run time"])
def test_a_limited_device(tmp_path, told):
    """TensorFlow's allocator has 64 MiB for a step that takes three times that; the check may be
    told of more.
    """
    pool = {
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": "64",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    more = {device.LIMIT: "16GiB"} if told == "at run time" else {}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RUNS_OUT)],
        cwd=tmp_path,
        env=os.environ | pool | more,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert not done.returncode, done.stderr[-2000:]
    cause = "ResourceExhaustedError" if more else "None"
    assert len(re.findall(rf"^{cause} \d+ ", done.stdout, re.MULTILINE)) == 2
    assert (
        done.stdout.count("The variables are as they were." if more else "Nothing was changed.")
        == 2
    )
    assert done.stdout.endswith("went on with 2 epochs\n")
