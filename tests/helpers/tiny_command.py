"""The command `fastaccum` with a smaller model: how runs end is not about what they learn."""

import sys

from fastaccum import cli

if __name__ == "__main__":
    cli._import_tensorflow()  # without its messages
    from fastaccum import transformer

    transformer.PRESETS["nano"] |= {"width": 32, "layers": 1, "heads": 2}
    sys.exit(cli.main())
