"""`fastaccum generate`: a text, continued by the model that a run saved."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import keras

from fastaccum.app import text
from fastaccum.app.options import BadArgument


def generate(options: argparse.Namespace) -> int:
    """Prints the prompt and its continuation as the parsed `options` say, and returns the exit code."""
    prompt = os.fsencode(options.prompt)
    file = Path(options.run, "model.keras")
    try:
        if not prompt:
            raise ValueError("--prompt '' is empty: give at least one character, or leave it out")
        if not file.is_file():
            raise ValueError(f"{str(file)!r} is not there: `fastaccum train` saves it when training ends")
        model = keras.saving.load_model(file, compile=False)
        continuation = text.generate(model, prompt, options.length, model.get_layer("context").context)
    except (ValueError, OSError) as error:
        raise BadArgument(f"fastaccum generate: error: {error}") from error
    print(text.printable(prompt + continuation))
    return 0
