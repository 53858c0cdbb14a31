"""Random calls of the functions of tensors: the results and gradients of float64, or a refusal."""

import numpy as np
import pytest
import tensorflow as tf
from fuzzing import ANYTHING, PASTE, Values, draw, integers, numbers, value
from fuzzing_kernels import agrees, double, some

pytestmark = pytest.mark.fuzz

NAMES: dict = {}
exec(f"{PASTE}\nfrom fuzzing_kernels import *", NAMES)
HALF = ("float16", "bfloat16")
WRONG_DTYPES = (
    "int32",
    "complex64",
    "bool",
    "object",
    "str",
    "datetime64[s]",
    "longdouble",
    "uint8",
    "S3",
)
WAYS = ("eager",) * 30 + ("graph",) * 3 + ("unknown", "unranked", "xla")
OF_NO_NUMBER = [code for code in ANYTHING if code not in ("None",)]


def made(shape, dtype="float32", seed=0, **more):
    """The source of an array."""
    named = {"dtype": dtype, "seed": seed, **more}
    return f"array({', '.join([*map(str, shape), *(f'{k}={v!r}' for k, v in named.items())])})"


def tensor(rng, shape, dtype, seed, *, integral=False, **more):
    """Values for a tensor argument: forms of a right one, and what is none."""
    right = made(shape, dtype, seed, **more)
    forms = [f"tf.constant({right})"] * 6 + [
        right,
        f"np.array({right}, order='F')",
        f"tf.Variable({right})",
    ]
    if dtype in ("float32", "int32"):
        forms += [f"{right}.tolist()"] if 0 not in shape else []
        forms += [f"keras.Variable({right}, dtype={dtype!r})"]
    axis = int(rng.integers(max(1, len(shape))))
    resized = [[*shape[:axis], n, *shape[axis + 1 :]] for n in (0, 1, 2, 7)] if shape else []
    shapes = [[], [*shape, 1], [1, *shape], list(shape[1:]), list(shape[:-1]), *resized]
    others = [d for d in WRONG_DTYPES if d != dtype and not (integral and d in ("int32", "uint8"))]
    odd = [
        *(f"tf.constant({made(s, dtype, seed, **more)})" for s in shapes if list(s) != list(shape)),
        *(f"{made(shape, 'float32', seed)}.astype({d!r})" for d in others),
        *(
            f"tf.constant({made(shape, d, seed)})"
            for d in ("float64", "float32", *HALF, "int64")
            if d != dtype
        ),
        *(f"{form}({right})" for form in ("masked", "from_a_graph") if shape),
        f"{right}.astype({'>i4' if integral else '>f4'!r})",
        f"keras.KerasTensor({tuple(shape)})",
        f"tf.TensorSpec({tuple(shape)})",
        f"keras.Input({tuple(shape)[1:]})",
        f"tf.IndexedSlices({right}, tf.range({shape[0] if shape else 0}), {list(shape)})",
    ]
    if len(shape) > 1 and dtype != "bfloat16":
        odd += [f"tf.sparse.from_dense({right})", f"tf.RaggedTensor.from_tensor({right})"]
    if not integral:
        odd += [
            f"tf.constant(spoiled({right}, {each}))" for each in ("nan", "inf", "-inf", "nan, inf")
        ]
    return Values(forms, odd=[*odd, *OF_NO_NUMBER])


def calling(rng, function, table, required, right):
    """What `fuzzing.fuzz` takes of a call."""
    way = some(rng, *WAYS)
    call = draw(
        rng, f"{way}(fa.kernels.{function})", table, required=required, odd=(0, 0, 0, 1, 1, 1, 2, 3)
    )
    arguments = {name: value(code, NAMES) for name, code in call.arguments.items()}

    def run():
        try:
            return NAMES[way](getattr(NAMES["fa"].kernels, function))(**arguments)
        except (TypeError, ValueError) as error:
            if call.odd or call.bad or way in ("unknown", "unranked"):
                raise
            raise AssertionError(f"a valid call is refused: {error}") from error

    return call, run, lambda: b"", lambda result: right(result, arguments)


# matmul_fp32_wgrad


def matmul(rng):
    width, out = int(rng.integers(1, 6)), int(rng.integers(0, 6))
    lead = rng.integers(0, 4, int(rng.integers(0, 4))).tolist()
    dtype = some(rng, "float32", "float32", "float16", "bfloat16", "float64")
    table = {
        "x": tensor(rng, [*lead, width], dtype, 1),
        "kernel": tensor(rng, [width, out], "float64" if dtype == "float64" else "float32", 2),
    }

    def right(result, given):
        x, (kernel, rounded) = double(given["x"]), double(given["kernel"], given["x"])
        agrees(
            result, given, lambda: tf.tensordot(x, kernel + rounded, 1), {"x": x, "kernel": kernel}
        )

    return calling(rng, "matmul_fp32_wgrad", table, ["x", "kernel"], right)


def test_matmul(fuzzed):
    fuzzed(matmul, 150)


# linear_cross_entropy


def labels(rng, shape, vocabulary):
    dtype = some(rng, "int32", "int64", "int8", "uint8", "int16", "uint16", "uint32", "uint64")
    values = tensor(rng, shape, dtype, 3, integral=True, high=vocabulary)
    right = made(shape, "int64", 3, high=vocabulary)
    out = [
        f"tf.constant(spoiled({right}, {n}))"
        for n in (-1, -100, vocabulary, 2**31, 2**32, 2**62, -(2**63))
    ]
    return Values(
        [*values.valid, f"tf.constant(spoiled({right}, -100, -100))"], odd=[*values.odd, *out * 3]
    )


def cross_entropy(rng):
    width, vocabulary = int(rng.integers(1, 6)), int(some(rng, 1, 2, 5, 9, 63, 64, 65, 130))
    lead = rng.integers(0, 5, int(rng.integers(0, 3))).tolist()
    dtype = some(rng, "float32", "float32", "float16", "bfloat16")
    weights = some(rng, "float32", dtype)
    table = {
        "hidden": tensor(rng, [*lead, width], dtype, 1),
        "kernel": tensor(rng, [width, vocabulary], weights, 2),
        "labels": labels(rng, lead, vocabulary),
        "bias": tensor(rng, [vocabulary], some(rng, "float32", dtype), 4),
        "ignore_index": Values([integers(-3, vocabulary), "-100", "2**40"], odd=ANYTHING),
        "label_smoothing": Values(
            ["0.0", numbers(1e-3, 0.9)], odd=[*ANYTHING, "1.0", "1 - 1e-9", "-1e-9", "1.5"]
        ),
        "z_loss": Values(["0", numbers(1e-4, 1.0)], odd=[*ANYTHING, "-1e-9", "1e-44", "1e39"]),
        "chunk_size": Values(["None", integers(1, 70), "10**9"], odd=ANYTHING),
        "implementation": Values(
            ["'auto'", "'chunked'", "'reference'"], odd=[*ANYTHING, "'blockwise'", "'Auto'"]
        ),
    }

    def right(result, given):
        hidden, (kernel, rounded) = (
            double(given["hidden"]),
            double(given["kernel"], given["hidden"]),
        )
        bias = None if given.get("bias") is None else double(given["bias"])
        label = np.asarray(given["labels"])
        label = np.where(label > 2**62, 2**62, label).astype("int64")
        smoothing, z_loss = float(given.get("label_smoothing", 0)), float(given.get("z_loss", 0))

        def oracle():
            logits = tf.tensordot(hidden, kernel + rounded, 1) + (0.0 if bias is None else bias)
            lse, size = tf.reduce_logsumexp(logits, -1), kernel.shape[1]
            picked = tf.gather(logits, np.clip(label, 0, size - 1), batch_dims=label.ndim)
            loss = (1 - smoothing) * (lse - picked) + smoothing * (lse - tf.reduce_mean(logits, -1))
            loss += z_loss * lse**2
            loss *= np.where((label >= 0) & (label < size), 1.0, np.nan)
            return tf.where(label == given.get("ignore_index", -100), 0.0, loss)

        agrees(result, given, oracle, {"hidden": hidden, "kernel": kernel, "bias": bias})

    return calling(rng, "linear_cross_entropy", table, ["hidden", "kernel", "labels"], right)


def test_linear_cross_entropy(fuzzed):
    fuzzed(cross_entropy, 250)


# attention


def segments(rng, batch, queries, keys):
    dtype = some(rng, "int32", "int64", "int8", "uint8")
    one, two = (
        tensor(rng, [batch, time], dtype, 4 + i, integral=True, high=3)
        for i, time in enumerate((queries, keys))
    )
    pick = [f"({some(rng, *one.valid)}, {some(rng, *two.valid)})" for _ in range(3)]
    wide = made([batch, queries], "int64", 4)
    extreme = f"spoiled({wide}, {2**63 - 1}, {-(2**63)}, {2**32}, -1)"
    if queries == keys:
        pick += [*one.valid, extreme, f"tf.constant({extreme})"]
    odd = [
        f"({some(rng, *one.odd)}, {some(rng, *two.valid)})",
        f"({some(rng, *one.valid)}, {some(rng, *two.odd)})",
    ]
    odd += [
        f"[{pick[0][1:-1]}]",
        f"({one.valid[0]},)",
        f"({one.valid[0]}, {two.valid[0]}, None)",
        "(None, None)",
    ]
    return Values(["None", *pick], odd=[*odd * 3, *one.odd, *two.odd])


def attend(rng):
    batch, queries, keys = (int(rng.integers(1, n)) for n in (4, 20, 20))
    keys = queries if rng.random() < 0.6 else keys
    groups, per_group, width = (int(rng.integers(1, n)) for n in (4, 4, 6))
    dtype = some(rng, "float32", "float32", "float16", "bfloat16")
    table = {
        "query": tensor(rng, [batch, queries, groups * per_group, width], dtype, 1),
        "key": tensor(rng, [batch, keys, groups, width], dtype, 2),
        "value": tensor(rng, [batch, keys, groups, width], dtype, 3),
        "causal": Values(["True", "False", "np.True_"], odd=ANYTHING),
        "scale": Values(
            ["None", "0", "-0.5", numbers(0.01, 2.0), "np.float32(0.25)"], odd=ANYTHING
        ),
        "segment_ids": segments(rng, batch, queries, keys),
        "block_size": Values(["None", integers(1, 24), "8", "10**6"], odd=ANYTHING),
        "implementation": Values(
            ["'auto'", "'blockwise'", "'blockwise'", "'reference'"],
            odd=[*ANYTHING, "'cudnn'", "'chunked'", "'AUTO'"],
        ),
    }

    def right(result, given):
        query, key, values = (double(given[name]) for name in ("query", "key", "value"))
        scale = given.get("scale")
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        ids = given.get("segment_ids")

        def oracle():
            repeats = query.shape[2] // key.shape[2]
            k, v = (tf.repeat(t, repeats, 2) for t in (key, values))
            scores = tf.einsum("bthk,bshk->bhts", query, k) * scale
            t, s = np.arange(query.shape[1])[:, None], np.arange(key.shape[1])[None]
            seen = (
                (s <= t + key.shape[1] - query.shape[1])[None, None]
                if given.get("causal")
                else np.True_
            )
            if ids is not None:
                q, k = (np.asarray(t) for t in (ids if isinstance(ids, tuple) else (ids, ids)))
                seen = seen & (q[:, None, :, None] == k[:, None, None, :])
            weights = tf.where(seen, tf.nn.softmax(tf.where(seen, scores, -1e300)), 0.0)
            return tf.einsum("bhts,bshk->bthk", weights, v)

        agrees(result, given, oracle, {"query": query, "key": key, "value": values})

    return calling(rng, "attention", table, ["query", "key", "value"], right)


def test_attention(fuzzed):
    fuzzed(attend, 200)


# attention_implementation


def which(rng):
    shapes = [[2, int(rng.integers(1, 300)), 2, 4], [2, int(rng.integers(1, 300)), 2, 4]]
    strange = [
        "[]",
        "[1]",
        "[1, 2]",
        "[1, 'a', 2, 3]",
        "[1, -5, 2, 3]",
        "[1, 2.5, 2, 3]",
        "[1, True, 2, 3]",
        "(1, nan, 2, 3)",
    ]
    strange += [
        "[1, 10**400, 2, 3]",
        "'abcd'",
        "tf.TensorShape(None)",
        "[1, 0, 2, 3]",
        "[1, 2, 3, 4, 5]",
        "[[1], 2, 3, 4]",
    ]

    def shape(sizes):
        forms = [
            f"{sizes}",
            f"tuple({sizes})",
            f"tf.TensorShape({sizes})",
            f"np.array({sizes})",
            "(None, None, None, None)",
        ]
        return Values(forms, odd=[*strange, *strange, *ANYTHING])

    table = {
        "query_shape": shape(shapes[0]),
        "key_shape": shape(shapes[1]),
        "block_size": Values(["None", integers(1, 300)], odd=ANYTHING),
        "dtype": Values(["'float32'", "'bfloat16'", "tf.float16", "np.float32"], odd=ANYTHING),
        "causal": Values(["True", "False", "np.True_"], odd=ANYTHING),
        "packed": Values(["True", "False"], odd=ANYTHING),
        "jit_compile": Values(["True", "False"], odd=ANYTHING),
    }
    call = draw(
        rng, "fa.kernels.attention_implementation", table, required=["query_shape", "key_shape"]
    )
    arguments = {name: value(code, NAMES) for name, code in call.arguments.items()}

    def right(result):
        sizes = [list(arguments[name]) for name in ("query_shape", "key_shape")]
        assert all(len(each) == 4 for each in sizes), sizes
        times = [each[1] for each in sizes]
        for each in [*sizes[0], *sizes[1]]:
            assert each is None or (not isinstance(each, (bool, str)) and each == int(each) >= 0), (
                each
            )
        size = 128 if arguments.get("block_size") is None else int(arguments["block_size"])
        wanted = "reference" if None in times or times[0] * times[1] <= size**2 else "blockwise"
        assert size > 0 and result == wanted, (result, wanted)

    return (
        call,
        lambda: NAMES["fa"].kernels.attention_implementation(**arguments),
        lambda: b"",
        right,
    )


def test_attention_implementation(fuzzed):
    fuzzed(which, 150)
