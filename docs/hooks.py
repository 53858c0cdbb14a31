"""What the site needs beside mkdocs.yml: its version, pages from outside docs/, the looks of
outputs, and an entry in docs/api for every public name.
"""

from __future__ import annotations

import ast
import logging
import os
import posixpath
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import absl.logging  # noqa: F401  before the gallery runs, which lends it a stderr that it could not close at exit
import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "fastaccum": "fastaccum/__init__.pyi",
    "fastaccum.checkpoint": "fastaccum/checkpoint/__init__.py",
    "fastaccum.kernels": "kernels/__init__.py",
}  # where each has its public names: all that it imports
OUTSIDE = "project"  # where what lies outside docs/ stands on the site
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")
HELP = "<!-- help of every command -->"
START = "<!-- README.md up to its second heading -->"
TEXT = re.compile(r"^(<!-- output.*? -->\n+)?```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ALIGNED = 115  # letters in a line: a longer one is a sentence, and no row of a table
THUMBNAIL = re.compile(
    r'^<div class="mkd-glr-thumbcontainer".*?^</div>\n', re.MULTILINE | re.DOTALL
)
DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
log = logging.getLogger("mkdocs.hooks.fastaccum")  # warnings fail a strict build
warnings.simplefilter(
    "ignore", DeprecationWarning
)  # mkdocs shows other packages' in the output of the gallery


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the version beside the name, and the link to the repository where the package's metadata
    has one.
    """
    package = metadata.metadata("fastaccum")
    config.site_name = f"{config.site_name} {package['Version']}"
    config.repo_url = dict(url.split(", ") for url in package.get_all("Project-URL", [])).get(
        "Repository"
    )
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files outside docs/ that pages and the navigation lead to, and those that these lead
    to.
    """
    pages = [file.src_uri for file in files.documentation_pages()]
    waiting = [target for page in pages for target in _links(f"docs/{page}")]
    waiting += [path.name for path in ROOT.glob("*.md")]
    while waiting:
        path = waiting.pop()
        uri = _uri(path)
        if path.startswith("docs/") or files.get_file_from_path(uri) or not (ROOT / path).is_file():
            continue  # a link to nothing is found by mkdocs itself
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
        waiting += _links(path)
    _check_public_names()
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links between files of the repository become links between pages of the site, and outputs
    look like such.
    """
    if page.file.src_uri.startswith(
        "generated/"
    ):  # a page of the gallery leads to its own .py, to be downloaded
        return (
            markdown
            if config.plugins["gallery"].config["plot_gallery"]
            else THUMBNAIL.sub("", markdown)
        )
    uri = page.file.src_uri
    markdown = _for_page(
        markdown.replace(HELP, _help() if HELP in markdown else ""), _path(uri), uri
    )
    markdown = (
        markdown.replace(START, _for_page(_start(), "README.md", uri))
        if START in markdown
        else markdown
    )
    return TEXT.sub(_with_classes, markdown)


def _with_classes(match: re.Match[str]) -> str:
    """A block of text with the classes that docs/site.css knows."""
    aligned = max(map(len, match[2].splitlines()), default=0) <= ALIGNED
    return f"``` {{ .text{' .output' * bool(match[1])}{' .aligned' * aligned} }}\n{match[2]}```"


def _for_page(text: str, path: str, uri: str) -> str:
    """The text of the file at `path`, with links that lead on from the page at `uri`."""

    def rewritten(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2]))
        return match[1] + posixpath.relpath(_uri(target), posixpath.dirname(uri) or ".") + match[3]

    return LINK.sub(rewritten, text)


def _start() -> str:
    """README.md up to its second heading; links within README.md lead to its own page, which has
    the rest.
    """
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]
    return text.replace("](#", "](README.md#")


def _help() -> str:
    """What `fastaccum` and each of its commands say of themselves."""

    def of(*command: str) -> str:
        environment = os.environ | {"COLUMNS": "92"}
        command = (sys.executable, "-m", "fastaccum", *command, "--help")
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        ).stdout

    commands = [[], *([name] for name in re.findall(r"^    (\w+)  ", of(), re.MULTILINE))]
    return "\n".join(
        f"## {' '.join(['fastaccum', *each])}\n\n```text\n{of(*each)}```\n" for each in commands
    )


class Doctests(griffe.Extension):
    """Examples in docstrings are written as doctests, which Markdown would take for quotations."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(
                lambda match: f"```pycon\n{match[0]}\n```", obj.docstring.value
            )


def _links(path: str) -> Iterator[str]:
    if path.endswith(".md"):
        for match in LINK.finditer((ROOT / path).read_text(encoding="utf-8")):
            yield posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2]))


def _uri(path: str) -> str:
    if path.startswith("docs/gallery/"):  # the page that is made of it
        stem = posixpath.splitext(posixpath.basename(path))[0]
        return f"generated/gallery/{'index' if stem == 'README' else stem}.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{OUTSIDE}/{path}"


def _path(uri: str) -> str:
    return uri.removeprefix(f"{OUTSIDE}/") if uri.startswith(f"{OUTSIDE}/") else f"docs/{uri}"


def _check_public_names() -> None:
    """Warns of a public name that no page of docs/api has, and of an entry that is no public
    name.
    """
    public = {
        f"{package}.{alias.asname}"
        for package, path in PACKAGES.items()
        for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    } - PACKAGES.keys()
    pages = (ROOT / "docs" / "api").glob("*.md")
    entries = {
        name
        for page in pages
        for name in re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), re.M)
    }
    # A function of its module's name is found as a.b.b.
    entries = {re.sub(r"\.(\w+)\.\1$", r".\1", name) for name in entries}
    for name in sorted(public - entries):
        log.warning("%s is public, and no page of docs/api has `::: %s`", name, name)
    for name in sorted(entries - public):
        log.warning("docs/api has `::: %s`, which is no public name of fastaccum", name)
