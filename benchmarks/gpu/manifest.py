"""Reads `manifest.json` of a folder of exported programs: sizes, arguments, expected losses.

The module needs NumPy alone. A program is a dict:

    name, file            of the StableHLO, gzipped
    preset, dtype, attention, stacked
    float8                whether the blocks multiply in float8
    optimizer_state_dtype what the optimizer's slots are stored in
    sizes                 vocabulary_size, context, width, layers, heads
    micro_batches, batch_size
    optimizer             learning_rate, weight_decay, beta_1, beta_2, epsilon, clip_norm
    arguments             in order: name, shape, dtype, initial, and output: the number of the
                          result that is its next value, or null for one that every step takes anew
    weights               the names of the arguments that are the model's
    loss                  the number of the result that is the step's loss
    losses                of the first steps, by TensorFlow on a CPU; empty where that would take
                          too long
    predicted             what a step takes: device, ms, and serial_ms, where nothing overlaps; null
                          where none is timed
    purpose               "check", "time", or "memory": compiled alone, for the memory that it needs

`initial` is one of {"fill": value}, {"values": [...]}, {"normal": standard deviation} and
{"tokens": size of the vocabulary, "shift": 0 for ids, 1 for the next ones}. An argument's name
seeds its random numbers, so every contestant starts from the same weights and sees the same tokens.
"""

import json
import math
import zlib
from pathlib import Path

import numpy as np


def load(folder):
    """Reads the programs in a folder, by name.

    Raises:
        FileNotFoundError: a folder without a manifest.
    """
    path = Path(folder, "manifest.json")
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: write it with `python -m benchmarks.gpu.export {folder}`."
        )
    return {program["name"]: program for program in json.loads(path.read_text())["programs"]}


def find(folder, name):
    """Reads one program.

    Raises:
        KeyError: a name that the manifest does not have.
    """
    programs = load(folder)
    if name not in programs:
        raise KeyError(f"no program {name!r} in {folder}: choose one of {', '.join(programs)}.")
    return programs[name]


def chosen(parser, arguments):
    """Reads the program that a command line names, or ends with the parser's error."""
    try:
        return find(arguments.folder, arguments.program)
    except (OSError, KeyError, ValueError) as error:
        parser.error(str(error.args[0]))


def initial_values(program):
    """Makes the arguments' first values by name: NumPy arrays, the same on every machine."""
    return {argument["name"]: _initial(argument) for argument in program["arguments"]}


def weights(program):
    """Makes the model's initial weights by name."""
    return {
        argument["name"]: _initial(argument)
        for argument in program["arguments"]
        if argument["name"] in program["weights"]
    }


def tokens(program):
    """Makes ids and next ids, int32 `[micro_batches, batch_size, context]`."""
    of_tokens = [argument for argument in program["arguments"] if "tokens" in argument["initial"]]
    x, y = map(_initial, of_tokens)
    return x, y


def tokens_per_step(program):
    """Counts the tokens of one step."""
    return program["micro_batches"] * program["batch_size"] * program["sizes"]["context"]


def model_flops(program):
    """Counts the floating point operations of one step's model, without recomputation.

    A token takes 6 for each parameter of a matmul (the head's included), and for causal attention 6
    for each layer, channel and position of the context: half of the 12 that both products take
    without a mask.

    >>> sizes = {"vocabulary_size": 10, "context": 4, "width": 2, "layers": 3, "heads": 1}
    >>> model_flops({"sizes": sizes, "micro_batches": 1, "batch_size": 1})  # 4 tokens
    4512
    """
    sizes = program["sizes"]
    width = sizes["width"]
    layers = sizes["layers"]
    parameters = sizes["vocabulary_size"] * width + layers * 12 * width**2
    return tokens_per_step(program) * (6 * parameters + 6 * layers * width * sizes["context"])


def _initial(argument):
    shape = tuple(argument["shape"])
    dtype = argument["dtype"]
    initial = argument["initial"]
    if "fill" in initial:
        return np.full(shape, initial["fill"], dtype)
    if "values" in initial:
        return np.array(initial["values"], dtype).reshape(shape)
    if "normal" in initial:
        drawn = _generator(argument["name"]).standard_normal(math.prod(shape), "float32")
        return (drawn.reshape(shape) * np.float32(initial["normal"])).astype(dtype)
    if "tokens" in initial:
        *lead, time = shape
        ids = _generator("tokens").integers(0, initial["tokens"], (*lead, time + 1)).astype(dtype)
        return ids[..., initial["shift"] : initial["shift"] + time]
    raise ValueError(f"argument {argument['name']!r} has an unknown initial value: {initial}.")


def _generator(name):
    return np.random.default_rng(zlib.crc32(name.encode()))
