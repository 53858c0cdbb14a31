"""Where the packages are, which pyproject.toml cannot choose by what there is."""

from pathlib import Path

from setuptools import setup

# `src` holds a link to fastaccum alone. As the source root it makes an editable install a plain path, which type
# checkers and editors follow, while `kernels` beside fastaccum stays out of reach. Where git wrote its links as text
# files (Windows), setuptools' import hook does, which only Python follows.
linked = Path("src/fastaccum/kernels/__init__.py").exists()
setup(package_dir={"": "src"} if linked else {"fastaccum.kernels": "kernels"})
