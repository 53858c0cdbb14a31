"""Random loss scales, losses, models of `fa.gpt`, and folders of checkpoints."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from fuzzing import ANYTHING, PASTE, Values, draw, integers, numbers, value, without
from fuzzing_kernels import some

import fastaccum as fa

pytestmark = pytest.mark.fuzz

NAMES: dict = {}
exec(f"{PASTE}\nfrom fuzzing_kernels import *", NAMES)


def calling(call, run, right):
    """What `fuzzing.fuzz` takes, of a call that moves nothing but what it makes."""
    arguments = {name: value(code, NAMES) for name, code in call.arguments.items()}

    def strict():
        try:
            return run(**arguments)
        except (TypeError, ValueError) as error:
            if call.odd or call.bad:
                raise
            raise AssertionError(f"a valid call is refused: {error}") from error

    return call, strict, lambda: b"", lambda result: right(result, **arguments)


# Loss scales


def follow(kind, outcomes, **arguments):
    """A loss scale after train steps whose gradients were finite or not."""
    loss_scale = getattr(fa, kind)(**arguments)
    scales = [float(loss_scale.scale())]
    for finite in outcomes:
        loss_scale.update(tf.constant(finite))
        scales.append(float(loss_scale.scale()))
    again = type(loss_scale)(**loss_scale.get_config())
    assert repr(again) == repr(loss_scale)
    return scales


def rule(outcomes, init=2.0**15, growth=2.0, backoff=0.5, interval=2000, low=1.0, high=2.0**24):
    scale, good, scales = np.float32(init), 0, [float(np.float32(init))]
    for finite in outcomes:
        good = good + 1 if finite else 0
        if not finite:
            scale = max(scale * np.float32(backoff), np.float32(low))
        elif good == interval:
            scale, good = min(scale * np.float32(growth), np.float32(high)), 0
        scales.append(float(scale))
    return scales


def scale(rng):
    kind = some(
        rng,
        "DynamicLossScale",
        "DynamicLossScale",
        "DynamicLossScale",
        "StaticLossScale",
        "NoLossScale",
    )
    outcomes = (rng.random(int(rng.integers(0, 12))) < 0.7).tolist()
    bounds = np.sort(np.exp(rng.uniform(-3, 12, 3))).tolist()
    odd = [*ANYTHING, "2**-65", "2**101", "1 + 1e-9", "1 - 1e-9", "3.4e38", "np.float16(2)"]
    tables = {
        "DynamicLossScale": {
            "init_scale": Values([repr(bounds[1])], odd=odd),
            "growth_factor": Values([numbers(1.01, 10), "3"], odd=odd),
            "backoff_factor": Values([numbers(0.01, 0.99)], odd=odd),
            "growth_interval": Values([integers(1, 5), "2.0", "10**9"], odd=odd),
            "min_scale": Values([repr(bounds[0])], odd=odd),
            "max_scale": Values([repr(bounds[2])], odd=odd),
        },
        "StaticLossScale": {
            "loss_scale": Values([numbers(1e-5, 1e9), "8", "np.float32(0.5)"], odd=odd)
        },
        "NoLossScale": {"loss_scale": Values(["1.0"], bad=odd)},
    }
    required = {
        "DynamicLossScale": ["init_scale", "min_scale", "max_scale"],
        "StaticLossScale": ["loss_scale"],
    }
    call = draw(
        rng,
        f"fa.{kind}",
        tables[kind],
        required=required.get(kind, ()),
        chance=0.5 * (kind != "NoLossScale"),
    )

    def right(scales, **given):
        given = {name: float(each) for name, each in given.items()}
        if kind == "DynamicLossScale":
            short = {
                "init_scale": "init",
                "growth_interval": "interval",
                "min_scale": "low",
                "max_scale": "high",
            }
            wanted = rule(
                outcomes, **{short.get(k, k.removesuffix("_factor")): v for k, v in given.items()}
            )
        else:
            wanted = [np.float32(given.get("loss_scale", 1.0))] * (len(outcomes) + 1)
        np.testing.assert_allclose(scales, wanted, 1e-5)

    return calling(call, lambda **arguments: follow(kind, outcomes, **arguments), right)


def test_loss_scales(fuzzed):
    fuzzed(scale, 400)


# LinearCrossEntropy


def loss(rng):
    # Not of texts or complex numbers: Keras makes numbers of them before any loss of its is called.
    rows, classes = int(rng.integers(1, 5)), int(rng.integers(1, 9))
    lead = [rows] if rng.random() < 0.6 else [rows, 3]
    shape, seed = ", ".join(map(str, lead)), int(rng.integers(100))
    labels = f"array({shape}, dtype='int32', high={classes}, seed={seed})"
    logits = f"array({shape}, {classes}, seed={seed})"
    table = {
        "y_true": Values(
            [
                labels,
                f"tf.constant({labels})",
                f"{labels}[..., None]",
                f"{labels}.astype('float32')",
                f"{labels}.tolist()",
            ],
            odd=[
                *(
                    f"{labels}.astype('int64') + {each}"
                    for each in ("1", "100", "-1", "0.5", "2**31", "2**40", "nan")
                ),
                *(f"{labels}.astype({each!r})" for each in ("int8", "uint64", "bool", "float64")),
                *(
                    f"{labels}[1:]",
                    f"{labels}[None]",
                    f"{labels} * 0 - 100",
                    logits,
                    f"{labels}.astype('>i4')",
                    "array()",
                ),
            ],
        ),
        "y_pred": Values(
            [logits, f"tf.constant({logits})", f"tf.cast({logits}, 'float16')"],
            odd=[
                f"{logits}[..., 0]",
                f"{logits}[..., :0]",
                f"{logits}[None]",
                f"{logits} * 1e4",
                f"{logits}.astype('int32')",
                "array()",
            ],
        ),
        "head": Values(
            ["None", "'head'"],
            odd=without("None", "''", "'x'", "Text('x')", "'\\0'", "'\\ud800'", "np.str_('a')"),
        ),
        "ignore_index": Values([integers(-1, 8), "-100"], odd=ANYTHING),
        "label_smoothing": Values(["0", numbers(1e-3, 0.9)], odd=[*ANYTHING, "1.0"]),
        "z_loss": Values(["0.0", numbers(1e-4, 1)], odd=ANYTHING),
        "chunk_size": Values(["None", integers(1, 100)], odd=ANYTHING),
        "reduction": Values(
            ["'sum'", "'sum_over_batch_size'", "'none'", "'mean_with_sample_weight'"],
            odd=[*ANYTHING, "'auto'", "'Sum'"],
        ),
        "name": Values(
            ["'x'", "'a loss'"], odd=without("None", "'x'", "Text('x')", "np.str_('a')")
        ),
    }
    call = draw(rng, "lce", table, required=["y_true", "y_pred"], names=("y",))

    def right(
        got,
        y_true,
        y_pred,
        head=None,
        ignore_index=-100,
        label_smoothing=0.0,
        z_loss=0.0,
        chunk_size=None,
        reduction="sum_over_batch_size",
        name=None,
    ):
        logits = np.asarray(y_pred, "float64")
        label = np.asarray(y_true)
        label = label[..., 0] if label.ndim == logits.ndim else label
        assert label.shape == logits.shape[:-1] and not np.iscomplexobj(label)
        label = np.where(label == np.trunc(label), label, 2**40)
        lse = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
        at = np.clip(label.astype("int64"), 0, logits.shape[-1] - 1)
        picked = np.take_along_axis(logits, at[..., None], -1)[..., 0]
        losses = (
            (1 - label_smoothing) * (lse - picked)
            + label_smoothing * (lse - logits.mean(-1))
            + z_loss * lse**2
        )
        losses = np.where((label >= 0) & (label < logits.shape[-1]), losses, np.nan)
        counted = label != ignore_index
        losses = np.where(counted, losses, 0.0)
        if reduction == "sum":
            losses = losses.sum()
        elif reduction not in ("none", None):
            losses = losses.sum() / max(counted.sum(), 1e-7)
        np.testing.assert_allclose(
            np.asarray(got, "float64"), losses, 3e-2, 3e-2 * np.abs(lse).max(initial=1.0)
        )

    def run(y_true, y_pred, **arguments):
        return fa.LinearCrossEntropy(**arguments)(y_true, y_pred)

    return calling(call, run, right)


def test_linear_cross_entropy_from_logits(fuzzed):
    fuzzed(loss, 150)


# gpt


def model(rng):
    heads, per_head = int(rng.integers(1, 4)), 2 * int(rng.integers(1, 3))
    sizes = [*ANYTHING, "3.5", "np.int8(7)"]
    table = {
        "vocabulary_size": Values([integers(1, 9)], odd=sizes),
        "context": Values([integers(1, 9)], odd=sizes),
        "width": Values([repr(heads * per_head)], odd=[*sizes, "7", "10"]),
        "layers": Values([integers(1, 2), "2.0"], odd=sizes),
        "heads": Values([repr(heads)], odd=[*sizes, "5"]),
        "key_value_heads": Values(["None", "1", repr(heads)], odd=[*sizes, "4"]),
        "positions": Values(["'rotary'", "'learned'"], odd=ANYTHING),
        "tied": Values(["True", "False", "None"], odd=ANYTHING),
        "stacked": Values(["False", "False", "True"], odd=ANYTHING),
        "preset": Values(["None", "'nano'"], odd=[*ANYTHING, "'Nano'"]),
        "dtype": Values(
            ["None", "'float32'", "'mixed_bfloat16'"],
            odd=[*ANYTHING, "'float64'", "'int8'", "'int32'", "'mixed'"],
        ),
        "name": Values(["'small'"], odd=without("'x'", "Text('x')", "np.str_('a')")),
    }
    call = draw(
        rng,
        "fa.gpt",
        table,
        required=["vocabulary_size", "context", "width", "layers", "heads"],
        chance=0.2,
    )

    def right(made, **given):
        given = {
            "context": 128,
            "width": 256,
            "layers": 4,
            "heads": 4,
            **{k: v for k, v in given.items() if v is not None},
        }
        ids = np.zeros([2, min(2, int(given["context"]))], "int32")
        v = int(given.get("vocabulary_size", 256))
        logits = made(ids)
        assert logits.shape == (*ids.shape, v) and logits.dtype == tf.float32
        assert np.all(np.isfinite(logits))
        d, n = (int(given[name]) for name in ("width", "layers"))
        kv = int(given.get("key_value_heads") or given["heads"]) * (d // int(given["heads"]))
        wanted = (
            (v * d if given.get("tied") else 2 * v * d) + n * (10 * d * d + 2 * d * kv + 2 * d) + d
        )
        wanted += int(given["context"]) * d * (given.get("positions") == "learned")
        assert made.count_params() == wanted, (made.count_params(), wanted)

    return calling(call, fa.gpt, right)


def test_gpt(fuzzed):
    fuzzed(model, 80)


# Folders of checkpoints


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One with a checkpoint of two steps, and what is none."""
    path = tmp_path_factory.mktemp("checkpoints")
    trainer = fa.Trainer(
        keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]),
        "sgd",
        "mse",
        jit_compile=False,
    )
    trainer.fit(
        np.ones((4, 1)), np.ones((4, 1)), batch_size=2, verbose=0, checkpoint_dir=path / "good"
    )
    (path / "file").write_text("x")
    (path / "empty").mkdir()
    return path


def test_latest(fuzzed, folder, monkeypatch):
    monkeypatch.chdir(folder)
    NAMES["folder"], counter = folder, itertools.count()
    none = ["''", "'x'", "Text('x')", "np.str_('a')"]

    def folders(rng):
        next(counter)
        good = [
            "folder / 'good'",
            "str(folder / 'good')",
            "'good'",
            "str(folder / 'good') + '/'",
            "Text(folder / 'good')",
        ]
        valid = [*good, "folder / 'empty'", "folder", "'no/such'", "folder / 'x'"]
        odd = [
            "b'good'",
            "folder / 'file'",
            "'a\\0b'",
            "folder / '\\ud800'",
            "'x' * 10000",
            "[folder]",
            "3",
            "'good\\0'",
            "folder / 'file' / 'x'",
        ]
        table = {"directory": Values(valid, odd=[*odd, *odd, *without(*none)])}
        call = draw(rng, "fa.checkpoint.latest", table, required=["directory"], odd=(0, 1, 1, 1))

        def right(found, directory):
            path = directory.decode() if isinstance(directory, bytes) else directory
            assert not isinstance(path, int) and path is not None
            is_good = (folder / path).resolve() == folder / "good"
            assert (found is not None) == is_good and (not is_good or found.step == 2), found

        return calling(call, fa.checkpoint.latest, right)

    fuzzed(folders, 100)
