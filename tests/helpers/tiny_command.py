"""The command `fastaccum` with a smaller model: how runs end is not about what they learn."""

import os
import sys

from fastaccum import cli


def make_small():
    """The model, as little as it can be."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    from fastaccum import transformer

    transformer.PRESETS["nano"] |= {"width": 32, "layers": 1, "heads": 2}


if __name__ == "__main__":
    make_small()
    sys.exit(cli.main())
