"""Writes fused steps of GPTs as StableHLO: `python -m benchmarks.gpu.export FOLDER`.

A manifest describes them. The command needs TensorFlow and jaxlib (`pip install -e ".[test,h200]"`)
and no GPU: the steps are traced as on one. Weights are arguments, described and not stored, so that
a program takes some hundred kilobytes whatever its size.
"""

import argparse
import collections
import contextlib
import gzip
import json
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import fastaccum as fa
from benchmarks.gpu import manifest
from benchmarks.h200 import kernels, roofline
from benchmarks.support import stablehlo
from benchmarks.support.stablehlo import FLOAT8_FLAGS, h200
from fastaccum import transformer
from fastaccum.kernels.attention import attention
from fastaccum.kernels.xla_ops import in_xla

OPTIMIZER = {
    "learning_rate": 3e-4,
    "weight_decay": 0.1,
    "beta_1": 0.9,
    "beta_2": 0.999,
    "epsilon": 1e-7,
}
CLIP_NORM = 1.0
CHECKED_STEPS = 3

# One micro-batch fills a GPU. Losses of the small model are computed on the CPU too: one step of
# 124 million parameters would take minutes there, and the program differs in its sizes alone.
SIZES = {
    "check": {
        "vocabulary_size": 512,
        "context": 256,
        "width": 128,
        "layers": 2,
        "heads": 2,
        "tied": True,
        "stacked": True,
    },
    "124m": transformer.PRESETS["124m"],
    "350m": transformer.PRESETS["350m"],
}
BATCH_SIZES = {"check": 2, "124m": 16, "350m": 16}
MICRO_BATCHES = {"check": 2, "124m": 4, "350m": 4}
DTYPES = ("float16", "bfloat16")
ATTENTION = ("auto", "blockwise")  # "auto" is cuDNN's
MEMORY_AT = (2, 8, 32)  # micro-batches


def plan(presets):
    """Yields the entries of the programs to export, before they are traced."""
    for preset in presets:
        micro_batches = MICRO_BATCHES[preset]
        for dtype in DTYPES:
            for kind in ATTENTION:
                yield _program(preset, dtype, kind, True, micro_batches)
        # The unrolled ones do not recompute activations, as the peers do not.
        for dtype in DTYPES:
            yield _program(preset, dtype, "auto", False, micro_batches)
        unrolled = _program(preset, "bfloat16", "auto", False, micro_batches, "-float8")
        yield {**unrolled, "float8": True}
        unrolled = _program(preset, "bfloat16", "auto", False, micro_batches, "-int8")
        yield {**unrolled, "optimizer_state_dtype": "int8"}
        # Where memory is short, the blocks are computed in loops.
        looped = _program(preset, "bfloat16", "auto", True, micro_batches, "-loops")
        yield {**looped, "policy": ["projection", "attention"]}
    if "124m" in presets:
        for micro_batches in MEMORY_AT:
            yield _program(
                "124m", "bfloat16", "blockwise", True, micro_batches, f"-memory-{micro_batches}"
            )


def _program(preset, dtype, kind, stacked, micro_batches, suffix=""):
    name = f"{preset}-{dtype}-{kind}"
    if not stacked:
        name += "-unrolled"
    name += suffix
    purpose = "time"
    if preset == "check":
        purpose = "check"
    elif "memory" in suffix:
        purpose = "memory"
    sizes = {key: value for key, value in SIZES[preset].items() if key not in ("tied", "stacked")}
    return {
        "name": name,
        "file": f"{name}.mlirbc.gz",
        "purpose": purpose,
        "preset": preset,
        "dtype": dtype,
        "attention": kind,
        "stacked": stacked,
        "policy": "auto",
        "float8": False,
        "optimizer_state_dtype": "float32",
        "sizes": sizes,
        "micro_batches": micro_batches,
        "batch_size": BATCH_SIZES[preset],
        "optimizer": {**OPTIMIZER, "clip_norm": CLIP_NORM},
    }


def export(program, folder):
    """Traces the program as on a GPU, writes it, and completes its entry in the manifest."""
    trainer = _trainer(program)
    stack = _shapes(program)
    with h200.as_on_a_gpu(), attention_by(program["attention"]):
        module, variables = stablehlo.of_train_step(trainer, stack)
    next_values = stablehlo.next_values(module)
    x, y = stack
    arguments = [_tokens("x", x, program, shift=0), _tokens("y", y, program, shift=1)]
    for name, variable in zip(_unique(map(_name, variables)), variables, strict=True):
        output = next_values.get(len(arguments))
        arguments.append({"name": name, **_described(variable), "output": output})
    program["arguments"] = arguments
    program["weights"] = [_name(variable.value) for variable in trainer.model.variables]
    program["loss"] = 0  # the first field of the first result, StepResult.loss
    # The prediction comes first: making the module portable changes it.
    program["predicted"] = None
    if program["purpose"] == "time":
        program["predicted"] = _predicted(module, program["float8"])
    path = Path(folder, program["file"])
    path.write_bytes(gzip.compress(stablehlo.portable(module), mtime=0))
    program["losses"] = _losses(program) if program["purpose"] == "check" else []
    return path.stat().st_size


def _tokens(name, ids, program, shift):
    """Describes the argument of the ids, or with a shift of 1 of the next ids."""
    vocabulary = program["sizes"]["vocabulary_size"]
    return {
        "name": name,
        "shape": list(ids.shape),
        "dtype": "int32",
        "initial": {"tokens": vocabulary, "shift": shift},
        "output": None,
    }


def _predicted(module, float8):
    """Predicts the time of a step on an H200 by the roofline of its kernels."""
    flags = FLOAT8_FLAGS if float8 else {}
    text, _ = h200.compile_for_h200(stablehlo.serialized(module), **flags)
    prediction = roofline.predict(kernels.read(text))
    return {"device": "H200", "ms": prediction.ms, "serial_ms": prediction.serial_ms}


def _trainer(program):
    keras.utils.set_random_seed(0)  # the spread of the weights is measured
    form = {"stacked": program["stacked"], "policy": program["policy"]}
    model = fa.gpt(**program["sizes"], tied=True, **form, dtype=f"mixed_{program['dtype']}")
    return fa.Trainer(
        model,
        keras.optimizers.AdamW(**OPTIMIZER),
        fa.LinearCrossEntropy(),
        clip_norm=CLIP_NORM,
        float8=program["float8"],
        optimizer_state_dtype=program["optimizer_state_dtype"],
    )


def _shapes(program):
    shape = (program["micro_batches"], program["batch_size"], program["sizes"]["context"])
    ids = np.zeros(shape, "int32")
    return ids, ids


def _losses(program):
    """Computes the first losses in TensorFlow on the CPU, from the manifest's initial values."""
    trainer = _trainer(program)
    values = manifest.initial_values(program)
    for variable in trainer.model.variables:
        variable.assign(values[_name(variable.value)])
    stack = values["x"], values["y"]
    return [float(trainer.train_step(stack).loss) for _ in range(CHECKED_STEPS)]


@contextlib.contextmanager
def attention_by(implementation):
    """Sets the implementation of the model's attention in programs that XLA compiles."""

    def attention_in_programs(*args, **kwargs):
        if in_xla():
            return attention(*args, **kwargs, implementation=implementation)
        return attention(*args, **kwargs)  # Keras's symbolic calls

    with mock.patch.object(transformer, "attention", attention_in_programs):
        yield


def _name(variable):
    return variable.name.removesuffix(":0")


def _unique(names):
    """Makes names unique, `v, v` as `v, v_1`: TensorFlow lets variables share a name."""
    seen = collections.Counter()
    for name in names:
        yield f"{name}_{seen[name]}" if seen[name] else name
        seen[name] += 1


def _described(variable):
    """Describes shape, dtype and initial value; weights are drawn again with the same spread."""
    value = variable.numpy()
    if value.size and np.all(value == value.flat[0]):
        initial = {"fill": value.flat[0].item()}
    elif value.size <= 16:
        initial = {"values": value.ravel().tolist()}
    else:
        initial = {"normal": float(np.std(value, dtype="float64"))}
    return {"shape": list(value.shape), "dtype": value.dtype.name, "initial": initial}


def main(argv=None):
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.export", description=__doc__.splitlines()[0]
    )
    parser.add_argument("folder", type=Path, help="where the programs and manifest.json go")
    parser.add_argument(
        "--preset", nargs="+", choices=list(SIZES), default=list(SIZES), help="the models (all)"
    )
    parser.add_argument("--program", nargs="+", help="these programs alone, by name")
    arguments = parser.parse_args(argv)
    programs = list(plan(arguments.preset))
    if arguments.program:
        unknown = set(arguments.program) - {program["name"] for program in programs}
        if unknown:
            names = ", ".join(program["name"] for program in programs)
            parser.error(f"no program {', '.join(sorted(unknown))}: there are {names}")
        programs = [program for program in programs if program["name"] in arguments.program]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for program in programs:
        size = export(program, arguments.folder)
        keras.backend.clear_session()
        print(f"{program['name']}: {size / 1e3:,.0f} kB", flush=True)
    versions = {
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "fastaccum": fa.__version__,
    }
    text = json.dumps({"versions": versions, "programs": programs}, indent=1)
    Path(arguments.folder, "manifest.json").write_text(text)


if __name__ == "__main__":
    main()
