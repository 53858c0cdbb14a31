"""`fastaccum generate`: a text, continued by the model that a run saved."""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import sys
from pathlib import Path

import keras

from fastaccum.app import output, run_folder, text
from fastaccum.app.options import BadArgument

PROG = "fastaccum generate"


def generate(options: argparse.Namespace) -> int:
    """Prints the prompt and its continuation as the parsed `options` say, and returns the exit code."""
    prompt = os.fsencode(options.prompt)
    decoder = text.make_utf8_decoder()
    try:
        if not prompt:
            raise ValueError("--prompt '' is empty: give at least one character, or leave it out")
        model, context = _load(Path(options.run))
    except (ValueError, OSError) as error:
        raise BadArgument(str(error), PROG) from error
    drawn = text.draw(model, prompt, context, temperature=options.temperature, seed=options.seed)
    try:
        for byte in itertools.chain(prompt, itertools.islice(drawn, options.length)):
            print(text.printable(bytes([byte]), decoder), end="", flush=True)
            if output.has_ended():  # as after `| head`
                break
    except ValueError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    print()
    return 0


def _load(run: Path) -> tuple[keras.Model, int]:
    """Loads the model in a run folder, and its context; raises ValueError if there is none."""
    file = run / "model.keras"
    run_folder.require_own_files(run)
    if not os.path.lexists(file):
        run_folder.read_config(run)  # which says so if this is no run folder
        command = f"fastaccum train --resume {shlex.quote(str(run))}"
        raise ValueError(f"{str(file)!r} is saved when training ends: `{command}` trains to the end, or to Ctrl-C")
    try:
        model = keras.saving.load_model(file, compile=False)
        return model, model.get_layer("context").context
    except Exception as error:  # of Keras, of zip and of HDF5, each of its own kind
        raise ValueError(f"{str(file)!r} cannot be loaded: {error}") from error
