"""`Trainer(...)`, its options, and stacks made by hand, at random."""

import functools

import fuzzing
import fuzzing_trainers as given
import keras
import numpy as np
import pytest
import tensorflow as tf
from fuzzing import ANYTHING, Call, Values, draw, integers, numbers, value, without

import fastaccum as fa

pytestmark = [pytest.mark.fuzz, pytest.mark.long]

NAMES = {**vars(fuzzing), **vars(given), "fa": fa, "keras": keras, "np": np, "tf": tf}
WHOLE = ("1", "np.int64(3)", "Whole(3)", "np.float32(2)")
REAL = ("1", "2.5", "np.float32(2)", "np.int64(3)", "Whole(3)")
BOOLS = ("True", "False", "np.True_")
CALLABLE = ("raises", "lambda: None", "lambda a, b, c: None", "object", "Holder", "type")
NOTHING = ("None", "()", "[]", "{}", "[[]]", "[None]", "{'a': {}}", "range(0)")
ROWS = 12

LOSSES = [
    "'mse'",
    "'mean_squared_error'",
    "keras.losses.MeanSquaredError()",
    "keras.losses.Huber(0.5)",
    "['mae']",
]
LOSSES += [
    "keras.losses.mean_squared_error",
    "lambda y, p: tf.reduce_mean(tf.square(y - p), -1)",
    "'log_cosh'",
]
LOSSES += [
    "keras.losses.MeanAbsoluteError(reduction='sum')",
    "keras.losses.MeanSquaredError(reduction='mean_with_sample_weight')",
    "keras.losses.MeanSquaredError",
]
BAD_LOSSES = [
    "'msee'",
    "keras.losses.MeanSquaredError(reduction=None)",
    "lambda y, p: tf.reduce_mean(y - p)",
    "lambda y: y",
]
BAD_LOSSES += [
    "lambda y, p: None",
    "lambda y, p: 'a'",
    "lambda y, p: p[:1, 0]",
    "{'no such output': 'mse'}",
    "keras.metrics.Mean()",
]
BAD_LOSSES += [
    "'adam'",
    "keras.losses",
    "['mse', 'mae', 3]",
    "lambda y, p: tf.cast(p, tf.int32)",
]
BAD_LOSSES += [
    "keras.losses.SparseCategoricalCrossentropy(from_logits=True, axis=3)",
    "fa.LinearCrossEntropy('no such layer')",
]
OPTIMIZERS = [
    "'sgd'",
    "'adam'",
    "'Adam'",
    "keras.optimizers.SGD(0.1, momentum=0.9)",
    "keras.optimizers.Adam(1e-2)",
]
OPTIMIZERS += [
    "keras.optimizers.RMSprop()",
    "'adamw'",
    "keras.optimizers.Adagrad(0.1)",
    "keras.optimizers.Lion()",
]
OPTIMIZERS += ["keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5))"]
BAD_OPTIMIZERS = [
    "'adamm'",
    "keras.optimizers.Adam",
    "keras.optimizers.SGD(nan)",
    "keras.optimizers.SGD(inf)",
]
BAD_OPTIMIZERS += [
    "keras.optimizers.Adam(gradient_accumulation_steps=2)",
    "keras.optimizers.LossScaleOptimizer('sgd')",
    "['sgd']",
]
BAD_OPTIMIZERS += ["{'class_name': 'sgd'}", "keras.losses.MeanSquaredError()", "keras.optimizers"]
METRICS = [
    "()",
    "['mae']",
    "[keras.metrics.MeanSquaredError()]",
    "['mse', 'mae']",
    "[lambda y, p: tf.abs(y - p)]",
    "None",
]
BAD_METRICS = [
    "['accuracyy']",
    "[3]",
    "[keras.metrics.MeanSquaredError]",
    "{'no such output': 'mae'}",
    "'mae'",
    "[['mae', ['mse', 3]]]",
]
BAD_METRICS += [
    "[raises]",
    "[lambda y: y]",
    "[keras.optimizers.SGD()]",
    "keras.metrics.Mean()",
    "[keras.layers.Dense(1)]",
]
BAD_MODELS = [
    "keras.Sequential",
    "keras.layers.Dense(1)",
    "'model'",
    "keras.Sequential()",
    "keras.Model()",
    "lambda x: x",
    "keras",
]
BAD_MODELS += [
    "keras.Sequential([keras.layers.Input((4,))])",
    "keras.Sequential([keras.Input((4,)), keras.layers.ReLU()])",
]
SCALES = [
    "'auto'",
    "None",
    "8.0",
    "fa.NoLossScale()",
    "fa.StaticLossScale(1024.)",
    "fa.DynamicLossScale(init_scale=64.)",
]
SCALES += [numbers(1e-3, 1e6)]
BAD_SCALES = [
    "'dynamic'",
    "fa.DynamicLossScale",
    "1e-30",
    "keras.optimizers.LossScaleOptimizer('sgd')",
    "fa.StaticLossScale",
]

TABLE = {
    "model": Values(
        ["model('regression')", "model('subclassed')", "Subclassed()"],
        [*ANYTHING, *BAD_MODELS, *BAD_MODELS],
    ),
    "optimizer": Values(OPTIMIZERS, [*without("None"), *BAD_OPTIMIZERS, *BAD_OPTIMIZERS]),
    "loss": Values(LOSSES, [*without(*CALLABLE), *BAD_LOSSES, *BAD_LOSSES], CALLABLE),
    "metrics": Values(METRICS, [*without(*NOTHING), *BAD_METRICS, *BAD_METRICS], [*NOTHING]),
    "loss_weights": Values(
        ["None", "2.0", "[0.5]", "0.0", "-1.0"],
        without(*NOTHING, *REAL, *BOOLS, "0", "-1", "-0.0", "range(3)"),
        [*NOTHING, *REAL, *BOOLS, "0", "-0.0", "range(3)"],
    ),
    "weighted_metrics": Values(METRICS, [*without(*NOTHING), *BAD_METRICS], NOTHING),
    "gradient_accumulation_steps": Values([integers(1, 5)], without(*WHOLE), WHOLE),
    "loss_scale": Values(SCALES, [*without("None", *REAL), *BAD_SCALES, *BAD_SCALES], REAL),
    "clip_norm": Values(["None", numbers(1e-3, 1e3)], without("None", *REAL), REAL),
    "fp32_weight_gradients": Values(["True", "False"], without(*BOOLS), BOOLS),
    "flash_attention": Values(["'auto'", "True", "False"], without(*BOOLS, "1", "0"), BOOLS),
    "jit_compile": Values(["False"], without(*BOOLS)),
    "steps_per_execution": Values(["1", integers(1, 3)], without(*WHOLE), WHOLE),
    "on_nonfinite": Values(["'skip'", "'raise'"], [*ANYTHING, "'skipp'", "['skip']"]),
    "shard_optimizer": Values(["'auto'", "False"], without(*BOOLS, "1", "0"), BOOLS),
    "own_loss_reduction": Values(["'mean'", "'sum'"], [*ANYTHING, "'none'"]),
}


def trained(**arguments):
    """A new Trainer, after two updates and an evaluation."""
    trainer = fa.Trainer(**arguments)
    x, y = given.inputs("regression", ROWS), given.targets("regression", ROWS)
    trainer.fit(x, y, batch_size=2, epochs=1, shuffle=False, verbose=0)
    return trainer


NAMES["trained"] = trained


def variables_of(model):
    """What a Trainer that is refused must not move, if the model is built by now."""
    return list(model.variables) if isinstance(model, keras.Model) and model.built else []


def make_trainer(rng):
    setup = "def trained(**options):\n    trainer = fa.Trainer(**options)\n"
    setup += (
        f"    trainer.fit(inputs('regression', {ROWS}), targets('regression', {ROWS}), "
        "batch_size=2, shuffle=False)"
    )
    required = ["model", "optimizer", "loss", "jit_compile"]
    call = draw(
        rng,
        "trained",
        TABLE,
        required=required,
        chance=0.2,
        odd=(0, 1, 1, 2),
        setup=setup,
        names=("x", "y"),
    )
    if rng.random() < 0.02:
        call.arguments["modle"] = "1"
    if call.arguments.get("own_loss_reduction") and "own_loss_reduction" not in call.bad:
        del call.arguments["own_loss_reduction"]  # of a model's own loss, which these have not
    arguments = {name: value(code, NAMES) for name, code in call.arguments.items()}

    def right(trainer):
        again = {name: value(code, NAMES) for name, code in call.arguments.items()}
        check_trainer(trainer, again)

    known = variables_of(arguments["model"])
    return call, lambda: trained(**arguments), lambda: [v.numpy().tobytes() for v in known], right


def check_trainer(trainer, given_to):
    """As Keras's own step on the full batches, with Keras's own clipping."""
    keras.utils.set_random_seed(1)
    model, optimizer = given_to["model"], keras.optimizers.get(given_to["optimizer"])
    x, y = given.inputs("regression", ROWS), given.targets("regression", ROWS)
    assert all(np.isfinite(w).all() for w in trainer.model.get_weights()), (
        "weights that are not finite"
    )
    if isinstance(model, given.Subclassed) and not model.built:
        return  # its first weights are drawn as it is built
    config = optimizer.get_config()
    if given_to.get("clip_norm") is not None:
        config["global_clipnorm"] = float(given_to["clip_norm"])
    loss, loss_weights = given_to["loss"], given_to.get("loss_weights")
    if loss_weights == ():
        loss_weights = None
    model.compile(
        type(optimizer).from_config(config),
        loss,
        loss_weights=loss_weights,
        auto_scale_loss=False,
        run_eagerly=True,
    )
    each = 2 * int(given_to.get("gradient_accumulation_steps", 1))
    for start in range(0, ROWS, each):
        model.train_on_batch(x[start : start + each], y[start : start + each])
    for now, then in zip(trainer.model.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(now, then, rtol=2e-3, atol=2e-4)


def test_a_trainer(fuzzed):
    fuzzed(make_trainer, 40)


OPTIONS = (
    "gradient_accumulation_steps",
    "steps_per_execution",
    "loss_scale",
    "clip_norm",
    "on_nonfinite",
)
OPTIONS += (
    "fp32_weight_gradients",
    "flash_attention",
    "jit_compile",
    "shard_optimizer",
    "own_loss_reduction",
)


@functools.cache
def built():
    return given.new_trainer("regression", 2)


def make_option(rng):
    name = str(rng.choice(OPTIONS))
    values = TABLE[name]
    which = [*values.bad] if rng.random() < 0.7 else [*values.valid, *values.odd]
    code = which[int(rng.integers(len(which)))]
    code = code(rng) if callable(code) else code
    bad = (name,) if code in values.bad and name != "jit_compile" else ()
    setup = "trainer = new_trainer('regression', 2)"
    call = Call("vars(trainer).update", {name: code}, bad=bad, setup=setup)  # said by setattr
    trainer, new = built(), value(code, NAMES)
    options = {each: repr(getattr(trainer, each)) for each in OPTIONS}

    def state():
        return {each: repr(getattr(trainer, each)) for each in OPTIONS}, [
            v.numpy().tobytes() for v in given.variables(trainer)
        ]

    def right(_):
        others = {each: text for each, text in state()[0].items() if each != name}
        assert others == {each: text for each, text in options.items() if each != name}
        trainer.gradient_accumulation_steps, trainer.steps_per_execution = 2, 1

    return call, lambda: setattr(trainer, name, new), state, right


def test_an_option_that_is_set(fuzzed):
    fuzzed(make_option, 100)


@functools.cache
def by_hand(kind):
    trainer = given.new_trainer(kind, 2)
    return trainer, [tf.identity(v) for v in given.variables(trainer)], given.Oracle(kind)


def stacked(kind, which, micro_batches=2, rows=3):
    """Inputs, targets or weights as [micro-batches, rows, ...]."""
    made = {"x": given.inputs, "y": given.targets}.get(which, lambda kind, n: given.weights(n))
    flat = made(kind, micro_batches * rows)
    return tf.nest.map_structure(lambda a: a.reshape(micro_batches, rows, *a.shape[1:]), flat)


NAMES["stacked"] = stacked
KINDS = [kind for kind in given.KINDS if kind != "legacy"]


def make_step(rng):
    kind = str(rng.choice(KINDS))
    n, rows = int(rng.choice([1, 2, 3])), int(rng.choice([1, 3]))
    x, y, w = (f"stacked({kind!r}, {which!r}, {n}, {rows})" for which in "xyw")
    single = kind in ("regression", "classes", "ids", "subclassed")
    changes = [
        "{}[:0]",
        "{}[:, :0]",
        "{}[0]",
        "{}[:, :-1]",
        "{}[None]",
        "{}.astype('complex64')",
        "{}.astype(object)",
        "{}.tolist()",
    ]
    changes += [
        "np.ma.masked_equal({0}, {0}.flat[0])",
        "{}.ravel()",
        "[{0}, {0}, {0}]",
        "{{'nothing': {}}}",
        "{}.astype(str)",
    ]
    maybe = [
        "{}.astype('float64')",
        "tf.constant({})",
        "({},)",
        "{}[..., None]",
        "{} * nan",
        "{} - 100",
        "{} * 0",
        "{}.astype('int8')",
    ]
    maybe += [
        "tf.Variable({})",
        "keras.Variable({})",
        "{}[::-1]",
        "{}.astype('>f4')",
        "Lies({}, 1)",
        "{} * 1e9",
    ]
    table = {}
    for name, code in (("x", x), ("y", y), ("sample_weight", w)):
        bad = (
            [change.format(code) for change in changes] if single or name == "sample_weight" else []
        )
        odd = [change.format(code) for change in maybe] if single or name == "sample_weight" else []
        keep = NOTHING if name == "sample_weight" else ()
        table[name] = Values([code], [*without(*keep), *bad, *bad, *bad], [*odd, *odd, *keep])
    parts = draw(rng, "", table, required=["x", "y"], odd=(0, 1, 1, 2))
    stack, bad = (
        "(" + ", ".join(parts.arguments[name] for name in table if name in parts.arguments) + ",)",
        parts.bad,
    )
    if rng.random() < 0.15:
        others = [
            *ANYTHING,
            f"{x}",
            f"({x},)",
            f"({x}, None)",
            f"({x}, {y}, {w}, 1)",
            f"(None, {y})",
            f"{{'x': {x}, 'y': {y}}}",
        ]
        stack, bad = others[int(rng.integers(len(others)))], ("stack",)
    setup = f"trainer = new_trainer({kind!r}, 2)"
    call = Call(
        "trainer.train_step",
        {"stack": stack},
        bad=bad,
        setup=setup,
        names=("x", "y", "sample_weight", "train step"),
    )
    trainer, start, oracle = by_hand(kind)
    for variable, before in zip(given.variables(trainer), start, strict=True):
        variable.assign(before)
    weights, passed = [v.numpy() for v in trainer.model.variables], value(stack, NAMES)
    if bad == ("sample_weight",) and len(passed) < 3:
        return make_step(rng)

    def right(result):
        check_step(oracle, weights, trainer, result, value(stack, NAMES))

    return (
        call,
        lambda: trainer.train_step(passed),
        lambda: [v.numpy().tobytes() for v in given.variables(trainer)],
        right,
    )


def check_step(oracle, before, trainer, result, stack):
    def rows(nest):
        return tf.nest.map_structure(lambda a: a.reshape(-1, *a.shape[2:]), given.plain(nest))

    x, y, *weight = stack
    weight = [rows(each) for each in weight if given.nothing_as_none(each) is not None]
    wanted = oracle.steps(before, [(rows(x), rows(y), *weight)])
    for now, then in zip(trainer.model.get_weights(), wanted, strict=True):
        np.testing.assert_allclose(now, then, rtol=1e-3, atol=2e-5 * (1 + np.abs(then).max()))


def test_train_step(fuzzed):
    fuzzed(make_step, 80)


def make_report(rng):
    """The program's text, and its memory: of a stack that may be odd, while nothing is run."""
    function = str(rng.choice(["compiler_ir", "memory_analysis"]))
    trainer, (x, y) = compiled(), (stacked("regression", "x"), stacked("regression", "y"))
    stack, bad = (x, y), ()
    arguments = {"stack": "(stacked('regression', 'x'), stacked('regression', 'y'))"}
    if rng.random() < 0.7:
        arguments["stack"], bad = ANYTHING[int(rng.integers(len(ANYTHING)))], ("stack",)
        stack = value(arguments["stack"], NAMES)
    passed = {"stack": stack}
    if function == "compiler_ir":
        stages = ["'hlo'", "'optimized_hlo'", *ANYTHING, "'no such stage'"]
        arguments["stage"] = stages[int(rng.integers(len(stages)))]
        passed["stage"] = value(arguments["stage"], NAMES)
        bad = (*bad, *(["stage"] if arguments["stage"] not in stages[:2] else []))
    setup = "trainer = new_trainer('regression', 2, jit_compile=True)"
    call = Call(
        f"trainer.{function}", arguments, bad=bad, setup=setup, names=("x", "y", "train step")
    )

    def right(result):
        assert isinstance(result, (str, bytes)) or result.temp_bytes >= 0

    def state():
        return [v.numpy().tobytes() for v in given.variables(trainer)]

    return call, lambda: getattr(trainer, function)(**passed), state, right


@functools.cache
def compiled():
    return given.new_trainer("regression", 2, jit_compile=True)


def test_reports_of_the_program(fuzzed):
    fuzzed(make_report, 30)
