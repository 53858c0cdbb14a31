"""`fit`, `evaluate` and `predict` of Trainers, called at random."""

import functools

import fuzzing
import fuzzing_trainers as given
import keras
import numpy as np
import pytest
import tensorflow as tf
from fuzzing import ANYTHING, Values, draw, integers, numbers, value, without

import fastaccum as fa

pytestmark = [pytest.mark.fuzz, pytest.mark.long]

NAMES = {**vars(fuzzing), **vars(given), "fa": fa, "keras": keras, "np": np, "tf": tf}
WHOLE = ("1", "np.int64(3)", "Whole(3)", "np.float32(2)")
BAD_NUMBERS = without(*WHOLE)
BAD_COUNTS = without("None", *WHOLE)
NOTHING = ("()", "[]", "{}", "[[]]", "range(0)", "{'a': {}}")
TEXTS = ("''", "'x'", "b'x'", "Text('x')", "np.str_('a')", "'\\ud800'")  # are names of folders
SINGLE = ("regression", "classes", "ids", "subclassed", "legacy")


@functools.cache
def pool(kind, accumulation):
    """A Trainer, and where it starts from."""
    trainer = given.new_trainer(kind, accumulation)
    return trainer, [tf.identity(v) for v in given.variables(trainer)]


@functools.cache
def oracle(kind):
    return given.Oracle(kind)


def fresh(kind, accumulation):
    """The same Trainer as ever, with the weights that it starts from."""
    trainer, start = pool(kind, accumulation)
    for variable, before in zip(given.variables(trainer), start, strict=True):
        variable.assign(before)
    return trainer


def bytes_of(trainer):
    return [v.numpy().tobytes() for v in given.variables(trainer)]


def odd_arrays(array):
    """What an array may be replaced by: what must be refused, and what may be taken if it is taken
    exactly.
    """
    bad = [
        *(
            f"{array}.astype({dtype})"
            for dtype in ("'complex64'", "str", "'datetime64[s]'", "object", "'longdouble'")
        ),
        *(
            f"{array}{cut}"
            for cut in ("[:0]", "[:-1]", "[None]", "[..., None, None, None]", "[0]", "[0, 0]")
        ),
        f"np.ma.masked_equal({array}, {array}.flat[0])",
        *(
            f"{array}.tolist()",
            "tf.ragged.constant([[1.], [1., 2.]] * 6)",
            f"iter({array})",
            f"str({array})",
        ),
        *(
            f"Lies({array}.astype(object), 12)",
            f"{array}.dtype",
            f"lambda: {array}",
            f"np.rec.fromarrays([{array}])",
        ),
        *(
            f"[{array}, {array}, {array}]",
            f"{{'nothing': {array}}}",
            f"tf.constant({array}.astype(str))",
        ),
        *(
            f"keras.KerasTensor({array}.shape)",
            f"tf.TensorSpec({array}.shape)",
            f"memoryview({array}.tobytes())",
        ),
    ]
    odd = [
        *(
            f"{array}.astype({dtype!r})"
            for dtype in ("float64", "float16", "int8", "uint8", ">f8", "bool", "bfloat16")
        ),
        *(
            f"{array}{cut}"
            for cut in (
                "[::-1]",
                "[..., None]",
                ".T",
                ".ravel()",
                "[:, None]",
                "[..., :1]",
                "* 0",
                "* -1",
            )
        ),
        *(
            f"{array}{change}"
            for change in (" * nan", " * inf", " * 1e9", " + 1e6", " - 100", " * 0.5")
        ),
        *(
            f"{kind}({array})"
            for kind in (
                "tf.constant",
                "tf.Variable",
                "keras.Variable",
                "np.asfortranarray",
                "np.ma.array",
            )
        ),
        *(f"Lies({array}, {n})" for n in (3, 0, 100)),
        *(
            f"[{array}]",
            f"({array},)",
            f"[[{array}]]",
            f"memoryview(np.ascontiguousarray({array}))",
        ),
    ]
    return bad, odd


def data_table(kind, rows, form):
    """x, y and sample_weight."""
    if form != "arrays":
        made = {
            "dataset": f"dataset({kind!r}, {rows}, {{}})",
            "PyDataset": f"Batches({kind!r}, {rows}, {{}})",
        }
        made["generator"] = f"iter(list(dataset({kind!r}, {rows}, {{}})))"
        x = Values([lambda rng: made[form].format(int(rng.integers(1, 7)))], bad=ANYTHING)
        none = Values(["None"], bad=without("None", *NOTHING), odd=NOTHING)
        return {"x": x, "y": none, "sample_weight": none}
    table = {}
    for name, code in (("x", f"inputs({kind!r}, {rows})"), ("y", f"targets({kind!r}, {rows})")):
        bad, odd = (
            odd_arrays(code)
            if kind in SINGLE
            else ([], [f"{code}[::-1]", f"dict(zip('ab', {code}))"])
        )
        keep = ("Lies(np.ones((12, 4)), 3)",)
        table[name] = Values([code], bad=[*without(*keep), *bad, *bad], odd=[*odd, *odd, *keep])
    bad, odd = odd_arrays(f"weights({rows})")
    keep = ("None", *NOTHING, "Lies(np.ones((12, 4)), 3)")
    table["sample_weight"] = Values(
        [f"weights({rows})"], bad=[*without(*keep), *bad, *bad], odd=[*odd, *odd, *keep]
    )
    return table


def fit_table(kind, rows, form):
    validation = [f"(inputs({kind!r}, 5), targets({kind!r}, 5))", f"dataset({kind!r}, 5, 2)"]
    validation += [f"(inputs({kind!r}, 5), targets({kind!r}, 5), weights(5))"]
    bad_validation = [*without("None", *NOTHING), f"inputs({kind!r}, 5)", f"(inputs({kind!r}, 5),)"]
    bad_validation += [
        f"(inputs({kind!r}, 5), targets({kind!r}, 4))",
        f"(inputs({kind!r}, 5), None, weights(5))",
    ]
    bad_validation += [
        f"(inputs({kind!r}, 5), targets({kind!r}, 5), weights(5), 1)",
        f"dataset({kind!r}, 5, 2).repeat()",
    ]
    callbacks = [
        "None",
        "[]",
        "[keras.callbacks.Callback()]",
        "keras.callbacks.History()",
        "(keras.callbacks.TerminateOnNaN(),)",
    ]
    callbacks += ["[keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None)]"]
    raising = [
        f"[keras.callbacks.LambdaCallback({hook}=raises)]"
        for hook in ("on_epoch_end", "on_train_batch_end", "on_train_begin")
    ]
    table = {
        **data_table(kind, rows, form),
        "batch_size": Values([integers(1, 14), "None"], BAD_COUNTS),
        "epochs": Values([integers(1, 3)], BAD_NUMBERS),
        "verbose": Values(
            ["0", "0", "0", "'auto'", "1", "2"],
            without(
                "0", "1", "-0.0", "Whole(3)", "True", "False", "np.True_", "2.5", "np.int64(3)"
            ),
            ["False", "True", "np.True_", "-0.0"],
        ),
        "callbacks": Values(callbacks, without("None", *NOTHING), [*NOTHING, *raising]),
        "validation_split": Values(
            ["0.0", "0", numbers(0.2, 0.8)],
            without("0", "-0.0", "False", "1e-50"),
            ["-0.0", "1e-50"],
        ),
        "validation_data": Values([*validation, "None"], bad_validation, NOTHING),
        "shuffle": Values(["False", "True"], without("True", "False", "np.True_"), ["np.True_"]),
        "initial_epoch": Values(["0", "0", "1"], without("0", "-0.0", *WHOLE), ["-0.0", *WHOLE]),
        "steps_per_epoch": Values(["None", integers(1, 4)], BAD_COUNTS),
        "validation_steps": Values(["None", "1"], BAD_COUNTS),
        "validation_batch_size": Values(["None", integers(1, 6)], BAD_COUNTS),
        "validation_freq": Values(
            ["1", "2", "[1]", "(1, 3)", "{2}"], without("range(3)", *WHOLE), ["range(3)"]
        ),
        "checkpoint_dir": Values(
            ["None", "folder()"], [c for c in without("None") if c not in TEXTS]
        ),
        "checkpoint_every": Values(["None", "1"], BAD_COUNTS, WHOLE),
        "keep": Values(["1", "3"], BAD_NUMBERS),
        "resume": Values(["()", "[]"], without("()", "[]")),  # a name needs a checkpoint_dir
        "global_batch_size": Values(["None"], without("None")),  # another needs batch_size="auto"
        "class_weight": Values(
            ["None"], without("None", "{1: 2}"), ["{1: 2}"] if kind in ("classes", "ids") else []
        ),
    }
    if kind in ("classes", "ids"):
        table["class_weight"] = table["class_weight"]._replace(
            valid=["{0: 2.0}", "{0: 0.5, 2: 3}", "{1: 0.0}"]
        )
    return table


def data(rng, accumulations=(1, 2, 3)):
    """What to call, on data of which form, and what `fit` takes of them."""
    kind, accumulation = str(rng.choice(list(given.KINDS))), int(rng.choice(accumulations))
    rows, forms = (
        int(rng.choice([1, 5, 12, 13])),
        ["arrays"] * 4 + ["dataset", "PyDataset", "generator"],
    )
    form = str(rng.choice(forms))
    return kind, accumulation, form, fresh(kind, accumulation), fit_table(kind, rows, form)


def make_fit(rng):
    kind, accumulation, form, trainer, table = data(rng)
    if form != "arrays":
        for name in ("class_weight", "validation_split"):
            del table[name]
    required = ["x", "y"] if form == "arrays" else ["x"]
    setup = f"trainer = new_trainer({kind!r}, {accumulation})"
    call = draw(rng, "trainer.fit", table, required=required, chance=0.25, setup=setup)
    if form == "generator":  # is read once
        call = call._replace(
            arguments={**call.arguments, "epochs": call.arguments.get("epochs", "1")}
        )
    arguments = {name: value(code, NAMES) for name, code in call.arguments.items()}
    before = [v.numpy() for v in trainer.model.variables]
    call = ignored(call, form)

    def run():
        return trainer.fit(**arguments)

    def right(history):
        again = {name: value(code, NAMES) for name, code in call.arguments.items()}
        check_fit(kind, accumulation, before, trainer, history, again)

    return call, run, functools.partial(bytes_of, trainer), right


def ignored(call, form):
    """What is not read is not refused: a batch_size beside batches, as in Keras."""
    if form == "arrays":
        return call
    return call._replace(bad=tuple(name for name in call.bad if name != "batch_size"))


def check_fit(kind, accumulation, before, trainer, history, fit):
    epochs, first = int(fit.get("epochs", 1)), int(fit.get("initial_epoch", 0))
    x, y, split = fit["x"], fit.get("y"), float(fit.get("validation_split", 0))
    losses = history.history.get("loss", [])
    if epochs <= first:
        assert not losses
        return
    per_epoch = fit.get("steps_per_epoch")
    assert all(np.isfinite(w.numpy()).all() for w in trainer.model.variables), (
        "weights that are not finite"
    )
    if (
        isinstance(x, tf.data.Dataset)
        or hasattr(x, "__next__")
        or isinstance(x, keras.utils.PyDataset)
    ):
        if isinstance(x, keras.utils.PyDataset) and fit.get("shuffle", True):
            return
        batches = (
            x.batches
            if isinstance(x, keras.utils.PyDataset)
            else [given.plain(batch) for batch in x]
        )
        steps, shuffled = given.pooled(batches, accumulation), False
    else:
        batch = given.arrays_of(
            x, y, given.nothing_as_none(fit.get("sample_weight")), fit.get("class_weight")
        )
        rows = given.rows_of(batch)
        if split and given.nothing_as_none(fit.get("validation_data")) is None:
            batch = given.cut(batch, 0, rows := int(np.floor(rows * (1 - split))))
        steps = given.steps_of(batch, min(int(fit.get("batch_size") or 32), rows), accumulation)
        shuffled = bool(fit.get("shuffle", True))
    expected = given.epochs_of(steps, None if per_epoch is None else int(per_epoch), epochs - first)
    assert len(losses) == (1 if hasattr(x, "__next__") and len(losses) == 1 else epochs - first), (
        f"{len(losses)} epochs"
    )
    if (shuffled and len(steps) > 1) or len(losses) < epochs - first:
        return
    wanted = oracle(kind).steps(before, [step for epoch in expected for step in epoch])
    for now, then in zip(trainer.model.get_weights(), wanted, strict=True):
        np.testing.assert_allclose(now, then, rtol=1e-3, atol=2e-5 * (1 + np.abs(then).max()))


def test_fit(fuzzed):
    fuzzed(make_fit, 150)


def make_evaluate(rng):
    kind, accumulation, form, trainer, fit = data(rng)
    table = {
        name: fit[name]
        for name in ("x", "y", "batch_size", "verbose", "sample_weight", "callbacks")
    }
    table |= {
        "steps": fit["validation_steps"],
        "return_dict": Values(
            ["True", "False"], without("True", "False", "np.True_"), ["np.True_"]
        ),
    }
    required = ["x", "y"] if form == "arrays" else ["x"]
    setup = f"trainer = new_trainer({kind!r}, {accumulation})"
    call = ignored(draw(rng, "trainer.evaluate", table, required=required, setup=setup), form)
    arguments = {name: value(code, NAMES) for name, code in call.arguments.items()}
    start = bytes_of(trainer)

    def right(logs):
        assert bytes_of(trainer) == start, "evaluate moved something"
        again = {name: value(code, NAMES) for name, code in call.arguments.items()}
        check_evaluate(
            kind, trainer, logs["loss"] if isinstance(logs, dict) else np.ravel(logs)[0], again
        )

    return call, lambda: trainer.evaluate(**arguments), functools.partial(bytes_of, trainer), right


def check_evaluate(kind, trainer, loss, given_to):
    x, steps = given_to["x"], given_to.get("steps")
    if isinstance(x, (tf.data.Dataset, keras.utils.PyDataset)) or hasattr(x, "__next__"):
        batches = (
            x.batches
            if isinstance(x, keras.utils.PyDataset)
            else [given.plain(batch) for batch in x]
        )
    else:
        batch = given.arrays_of(
            x, given_to.get("y"), given.nothing_as_none(given_to.get("sample_weight")), None
        )
        batches = given.steps_of(
            batch, min(int(given_to.get("batch_size") or 32), given.rows_of(batch)), 1
        )
    (batch,) = given.pooled(batches[: None if steps is None else int(steps)], len(batches))
    wanted = oracle(kind).loss([v.numpy() for v in trainer.model.variables], batch)
    np.testing.assert_allclose(loss, wanted, rtol=1e-3, atol=1e-5)


def test_evaluate(fuzzed):
    fuzzed(make_evaluate, 80)


def make_predict(rng):
    kind, accumulation, form, trainer, fit = data(rng, [1])
    table = {name: fit[name] for name in ("x", "batch_size", "verbose", "callbacks")} | {
        "steps": fit["validation_steps"]
    }
    setup = f"trainer = new_trainer({kind!r}, {accumulation})"
    call = ignored(draw(rng, "trainer.predict", table, required=["x"], setup=setup), form)
    arguments = {name: value(code, NAMES) for name, code in call.arguments.items()}
    start = bytes_of(trainer)

    def right(outputs):
        assert bytes_of(trainer) == start, "predict moved something"

    return call, lambda: trainer.predict(**arguments), functools.partial(bytes_of, trainer), right


def test_predict(fuzzed):
    fuzzed(make_predict, 60)
