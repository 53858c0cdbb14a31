"""`fastaccum generate`: a text, continued by the model that a run saved."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import keras

from fastaccum.app import text
from fastaccum.app.options import MODEL_FILE, BadArgument


def generate(options: argparse.Namespace) -> int:
    """Prints the prompt and its continuation as parsed, and returns the exit code."""
    prompt = os.fsencode(options.prompt)
    file = Path(options.run, MODEL_FILE)
    try:
        model = keras.saving.load_model(file, compile=False)
        context = model.get_layer("context").context
        continuation = text.generate(
            model,
            prompt,
            options.length,
            context,
            temperature=options.temperature,
            seed=options.seed,
        )
    except (ValueError, OSError) as error:
        raise BadArgument(f"fastaccum generate: error: {error}") from error
    print(text.printable(prompt + continuation))
    return 0
