"""Runs a page of the documentation as its reader would: `python run_page.py PAGE`, in an empty
folder.

Every ```python block runs as printed, from the top of the page to its end, in one namespace. What
the reader is to bring (data, a model) comes from invisible blocks of Sybil, in HTML comments:

    <!-- invisible-code-block: python
    x = np.zeros((8, 3), "float32")
    -->

A ```text block after the comment `<!-- output -->` is what the block above prints; "..." stands for
any text. After `<!-- output, about -->` numbers may differ by a tenth, times in seconds by
anything, and a line that begins with "$ " is the command that the block above stands for.

Where a module is missing, a page that begins with `<!-- needs: torch -->` is skipped, and so is a
block right below that comment; the rest of the page runs.
"""

import doctest
import importlib.util
import io
import re
import sys
from pathlib import Path

from sybil import Region, Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
ROOT = Path(__file__).parents[2]
# The change log tells of what was; docs/generated is made of the gallery's files, which are run by
# themselves.
LEFT_OUT = {ROOT / "CHANGELOG.md", *ROOT.glob("docs/generated/**/*.md")}
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")} - LEFT_OUT)
NUMBER = re.compile(r"(\d+(?:[.,]\d+)*)")
SKIPPED = 5  # pytest's exit code for no tests


def outputs(document):
    """A parser of Sybil for what the blocks print."""
    pattern = r"^<!-- output(, about)? -->\n+```text\n(.*?)^```"
    for match in re.finditer(pattern, document.text, re.DOTALL | re.MULTILINE):
        yield Region(
            match.start(),
            match.end(),
            (match[2], same_but_for_numbers if match[1] else same),
            compare,
        )


def same(expected, printed):
    return doctest.OutputChecker().check_output(expected, printed, FLAGS)


def same_but_for_numbers(expected, printed):
    expected = re.sub(r"^\$ .*\n", "", expected)
    expected, printed = parts(expected), parts(printed)
    words_agree = expected[::2] == printed[::2]
    numbers = [
        [float(number.replace(",", "")) for number in each[1::2]] for each in (expected, printed)
    ]
    return words_agree and all(abs(a - b) <= a / 10 for a, b in zip(*numbers, strict=True))


def parts(text):
    """Words and numbers in turn, without times and without what makes a table as wide as its
    numbers are.
    """
    text = re.sub(r"[\d.]+ s\b", "x s", text.strip())
    return NUMBER.split(re.sub(r"(\s|─)+", r"\1", text))


def compare(example):
    printed = sys.stdout.getvalue()
    expected, agree = example.parsed
    if not agree(expected, printed):
        place = f"{example.path}, line {example.line}"
        raise AssertionError(
            f"{place}: the page says that this is printed:\n{expected}\nIt was:\n{printed}"
        )


def missing(above):
    """The modules that a comment at the end of this text says are needed, and that are not
    installed.
    """
    match = re.search(r"<!-- needs: (.*?) -->\s*\Z", above)
    return (
        [name for name in match[1].split(", ") if importlib.util.find_spec(name) is None]
        if match
        else []
    )


def main(path):
    if lacks := missing(Path(path).read_text().partition("\n")[0]):
        print(f"{path} needs {', '.join(lacks)}")
        return SKIPPED
    document = Sybil(parsers=[PythonCodeBlockParser(doctest_optionflags=FLAGS), outputs]).parse(
        Path(path)
    )
    document.namespace["__name__"] = "__main__"
    left_out = set()
    for example in document.examples():
        if example.region.evaluator is not compare:
            lacks = missing(document.text[: example.region.start])
            left_out.update(lacks)
            sys.stdout = io.StringIO()  # what this block prints
        if lacks:
            continue
        try:
            example.evaluate()
        finally:
            sys.__stdout__.write(
                "" if example.region.evaluator is compare else sys.stdout.getvalue()
            )
    if left_out:
        sys.__stdout__.write(
            f"{path} ran, but for the blocks that need {', '.join(sorted(left_out))}"
        )
    return SKIPPED if left_out else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
