"""What pyproject.toml cannot say: where the packages are, and README.md as a package index shows
it.
"""

import re
import sys
from pathlib import Path

from setuptools import setup


def description() -> str:
    """README.md for a package index, where links to files of the repository would lead nowhere:
    their paths as text.
    """

    def without_link(match: re.Match[str]) -> str:
        text, path = match.groups()
        return text if path.startswith(text) else f"{text} ({path})"

    readme = Path("README.md").read_text(encoding="utf-8")
    to_a_file = r"!?\[([^]]*)\]\((?!https?:|#)([^)#]*)[^)]*\)"
    return (
        re.sub(to_a_file, without_link, readme)
        + "\nThe source distribution has the files that this page names.\n"
    )


# `src` holds a link to fastaccum alone. As the source root it makes an editable install a plain
# path, which type checkers and editors follow, while `kernels` beside fastaccum stays out of reach.
# Where git wrote its links as text files (Windows), setuptools' import hook does, which only Python
# follows. Source distributions hold no links.
by_path = "editable_wheel" in sys.argv and Path("src/fastaccum/kernels/__init__.py").exists()
setup(
    package_dir={"": "src"} if by_path else {"fastaccum.kernels": "kernels"},
    long_description=description(),
    long_description_content_type="text/markdown",
)
