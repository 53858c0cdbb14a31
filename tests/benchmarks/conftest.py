"""The benchmarks are not installed: their tests import them from the repository."""

import sys
from pathlib import Path

# At the end of the path, where kernels/ shadows no other package.
sys.path.append(str(Path(__file__).parents[2]))
