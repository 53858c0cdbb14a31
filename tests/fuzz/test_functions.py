"""Random calls of the functions that train nothing: each works, or names the argument it refuses."""

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_calls import ANYTHING, Values, calls, codes, fuzz, integers, judge, without

import fastaccum as fa

pytestmark = pytest.mark.slow

SHAPES = codes("""
    [2, 128, 2, 4] | (2, 300, 2, 4) | tf.TensorShape([2, 9, 2, 4]) | np.array([2, 9, 2, 4])
    (None, None, None, None)
""")
BAD_SHAPES = codes("""
    [] | [1] | [1, 2] | [1, 'a', 2, 3] | [1, -5, 2, 3] | [1, 2.5, 2, 3] | [1, True, 2, 3] | 'abcd'
    (1, nan, 2, 3) | [1, 2, 3, 4, 5] | [[1], 2, 3, 4]
""")
ODD_SHAPES = codes("[1, 10**400, 2, 3] | tf.TensorShape(None) | [1, 0, 2, 3]")
SHAPE = Values(SHAPES, BAD_SHAPES, [*ODD_SHAPES, *ANYTHING])
FLAG = Values(codes("True | False | np.True_"), odd=ANYTHING)
SIZE = Values([integers(1, 9)], odd=[*ANYTHING, "3.5", "np.int8(7)"])
GPT = {
    **dict.fromkeys(["vocabulary_size", "context", "layers"], SIZE),
    "width": Values(["8"], odd=[*SIZE.odd, "7", "10"]),
    "heads": Values(["2"], odd=[*SIZE.odd, "5"]),
    "key_value_heads": Values(["None", "1", "2"], odd=[*SIZE.odd, "4"]),
    "positions": Values(["'rotary'", "'learned'"], odd=ANYTHING),
    "tied": Values(["True", "False", "None"], odd=ANYTHING),
    "stacked": Values(["False", "True"], odd=ANYTHING),
    "preset": Values(["None", "'nano'"], odd=[*ANYTHING, "'Nano'"]),
    "dtype": Values(codes("None | 'float32' | 'mixed_bfloat16'"), odd=[*ANYTHING, "'int32'"]),
    "name": Values(["'small'"], odd=without("'x'", "Text('x')", "np.str_('a')")),
}
STACK = "(np.ones([2, 3, 4], 'float32'), np.ones([2, 3, 1], 'float32'))"
FOLDERS = codes("""
    folder / 'good' | str(folder / 'good') | Text(folder / 'good') | folder / 'empty' | folder / 'x'
""")
ODD_FOLDERS = codes("""
    b'good' | folder / 'file' | 'a\\0b' | folder / '\\ud800' | 'x' * 10000 | [folder] | 3 | 'good\\0'
    folder / 'file' / 'x'
""")
LAYERS = codes("[built(3), built(3)] | (built(3), built(3))")
BAD_LAYERS = codes("""
    [Dense(3)] | [Dense(3), 3] | [Dense(3), Dense(3)] | [built(3), built(4)]
    (built(3), built(3), built(3))
""")
MODELS = codes("small | small.layers[0]")
ODD_MODELS = [
    *codes("small.layers + [3] | [None] | [[small]] | keras.Model | small.weights"),
    *without(*codes("[] | () | {} | set() | keras.layers.Dense(1) | range(0) | generator() | ''")),
]
# Of each function: its arguments, those that are required, and other words of its errors.
FUNCTIONS = {
    "fa.kernels.attention_implementation": (
        {
            "query_shape": SHAPE,
            "key_shape": SHAPE,
            "block_size": Values(["None", integers(1, 300)], odd=ANYTHING),
            "dtype": Values(codes("'float32' | 'bfloat16' | tf.float16"), odd=ANYTHING),
            **dict.fromkeys(["causal", "packed", "jit_compile"], FLAG),
        },
        ["query_shape", "key_shape"],
        (),
    ),
    "fa.gpt": (GPT, ["vocabulary_size", "context", "width", "layers", "heads"], ()),
    "fa.checkpoint.latest": (
        {"directory": Values(FOLDERS, odd=[*ODD_FOLDERS * 2, *ANYTHING])},
        ["directory"],
        (),
    ),
    "fa.kernels.fp32_weight_gradients": (
        {"model": Values(MODELS, odd=ODD_MODELS)},
        ["model"],
        (),
    ),
    "fa.kernels.plain_weight_gradients": (
        {"layers": Values([*MODELS, "small.layers", "[]"], odd=ODD_MODELS)},
        ["layers"],
        (),
    ),
    "stack.assign_from": (
        {"layers": Values(LAYERS, [*BAD_LAYERS * 2, *ANYTHING])},
        ["layers"],
        ("Layers", "Layer"),
    ),
    "trainer.memory_analysis": (
        {"stack": Values([STACK], ANYTHING)},
        ["stack"],
        ("x", "y", "train step"),
    ),
    "trainer.compiler_ir": (
        {
            "stack": Values([STACK], ANYTHING),
            "stage": Values(["'hlo'", "'optimized_hlo'"], [*ANYTHING, "'no such stage'"]),
        },
        ["stack", "stage"],
        ("x", "y", "train step"),
    ),
}


def built(width):
    layer = keras.layers.Dense(width)
    layer.build((None, 3))
    return layer


@pytest.fixture(scope="module")
def trainer():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    return fa.Trainer(model, "sgd", "mse", gradient_accumulation_steps=2)


@pytest.fixture(scope="module")
def folder(trainer, tmp_path_factory):
    """A folder with a checkpoint of two steps, and what is none."""
    path = tmp_path_factory.mktemp("checkpoints")
    x = np.ones((4, 4))
    y = np.ones((4, 1))
    trainer.fit(x, y, batch_size=1, verbose=0, checkpoint_dir=path / "good")
    (path / "file").write_text("x")
    (path / "empty").mkdir()
    return path


CALLS = [
    calls(function, table, required, names=names)
    for function, (table, required, names) in FUNCTIONS.items()
]


@fuzz(400)
@given(call=st.one_of(CALLS), is_switched=st.booleans())
def test_a_function(call, is_switched, trainer, folder, monkeypatch):
    monkeypatch.chdir(folder)
    half = keras.layers.Dense(2, dtype="mixed_float16")
    small = keras.Sequential([keras.Input((3,)), half, keras.layers.Dense(2)])
    if is_switched:
        fa.kernels.fp32_weight_gradients(small)
    stack = fa.kernels.LayerStack(lambda: keras.layers.Dense(3), 2)
    stack.build((None, 3))
    names = {"trainer": trainer, "stack": stack, "small": small, "built": built, "folder": folder}
    arguments = call.values(**names, Dense=keras.layers.Dense)
    function = eval(call.function, {"fa": fa, **names})

    def state():
        weights = [*stack.weights, *trainer.model.weights, *trainer.optimizer.variables]
        return [np.asarray(w).tobytes() for w in weights], [type(layer) for layer in small.layers]

    def check(result):
        if call.function == "stack.assign_from":
            for layer, taken in zip(stack.unstack(), arguments["layers"], strict=True):
                np.testing.assert_array_equal(layer.kernel, taken.kernel)
        elif call.function == "fa.gpt":
            assert np.all(np.isfinite(result(np.zeros([2, 1], "int32"))))
        elif call.function == "fa.checkpoint.latest":
            assert (result is not None) == ("good" in call.arguments["directory"])
        elif call.function == "fa.kernels.attention_implementation":
            queries, keys = arguments["query_shape"][1], arguments["key_shape"][1]
            block = arguments.get("block_size") or 128
            is_small = queries is None or keys is None or queries * keys <= block**2
            assert result == ("reference" if is_small else "blockwise")
        elif call.function.endswith("weight_gradients") and "small" in str(call.arguments):
            assert type(small.layers[1]) is keras.layers.Dense
            is_switched_now = type(half) is not keras.layers.Dense
            assert is_switched_now == call.function.endswith("fp32_weight_gradients")

    judge(call, lambda: function(**arguments), check, state)
