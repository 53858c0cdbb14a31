"""`python -m fastaccum`."""

import sys

from fastaccum.cli import main

sys.exit(main())
