"""Tests what docs/hooks.py adds to the site.

CI builds the site itself, strictly: a warning is an error.
"""

import importlib.util
import logging
from email.message import Message
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.docs
ROOT = Path(__file__).parents[2]


@pytest.fixture
def hooks(monkeypatch, tmp_path):
    """The hooks, on a copy of what they read to check the public names."""
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for path in [
        *module.PACKAGES.values(),
        *(f"docs/api/{page.name}" for page in (ROOT / "docs/api").glob("*.md")),
    ]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text((ROOT / path).read_text())
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def test_every_public_name_has_an_entry(hooks, caplog):
    hooks._check_public_names()
    assert not caplog.records


@pytest.mark.parametrize(
    "path, line, named",
    [
        (
            "fastaccum/__init__.pyi",
            "from .trainer import Other as Other",
            "fastaccum.Other is public",
        ),
        (
            "kernels/__init__.py",
            "from fastaccum.kernels.x import y as y",
            "fastaccum.kernels.y is public",
        ),
        ("docs/api/trainer.md", "::: fastaccum.Gone", "fastaccum.Gone`, which is no public name"),
    ],
)
def test_names_without_an_entry_and_entries_without_a_name_fail_the_build(
    hooks, caplog, path, line, named
):
    with (hooks.ROOT / path).open("a") as file:
        file.write(f"\n{line}\n")
    hooks._check_public_names()
    assert [named in record.getMessage() for record in caplog.records] == [True]
    assert caplog.records[0].levelno == logging.WARNING and caplog.records[0].name.startswith(
        "mkdocs."
    )


def test_the_start_page_begins_as_readme_does(hooks):
    readme = "# Title\n\n[m](docs/memory.md#b), [further down](#test)\n\n## Next\n\n## Test\n"
    (hooks.ROOT / "README.md").write_text(readme)
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    start = hooks.on_page_markdown(f"{hooks.START}\n\n## Where to go next\n", page, None, None)
    beginning = "# Title\n\n[m](memory.md#b), [further down](project/README.md#test)\n"
    assert start == f"{beginning}\n\n## Where to go next\n"
    assert (Path(__file__).parents[2] / "docs" / "index.md").read_text().startswith(hooks.START)


@pytest.mark.parametrize(
    "page, link, on_the_site",
    [
        ("guides/a.md", "[m](../memory.md#b)", "[m](../memory.md#b)"),
        ("memory.md", "[s](../SECURITY.md)", "[s](project/SECURITY.md)"),
        (
            "guides/a.md",
            "![p](../../benchmarks/results/x/p.png)",
            "![p](../project/benchmarks/results/x/p.png)",
        ),
        ("project/CHANGELOG.md", "[m](docs/memory.md#b)", "[m](../memory.md#b)"),
        (
            "project/benchmarks/gpu/README.md",
            "[m](../../docs/memory.md)",
            "[m](../../../memory.md)",
        ),
        (
            "memory.md",
            "[s](https://example.org/a.md) [b](#b)",
            "[s](https://example.org/a.md) [b](#b)",
        ),
    ],
)
def test_links_between_files_lead_to_pages(hooks, page, link, on_the_site):
    page = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    assert hooks.on_page_markdown(link, page, None, None) == on_the_site


def test_blocks_of_text_are_told_apart(hooks):
    table, sentence = "a  1\nb  2\n", "Error: " + "very " * 30 + "wrong\n"
    given = (
        "<!-- output, about "
        f"-->\n```text\n{table}```\n\n```text\n{sentence}```\n\n```python\n{table}```\n"
    )
    page = SimpleNamespace(file=SimpleNamespace(src_uri="memory.md"))
    expected = (
        f"``` {{ .text .output .aligned }}\n{table}```\n\n``` {{ .text "
        f"}}\n{sentence}```\n\n```python\n{table}```\n"
    )
    assert hooks.on_page_markdown(given, page, None, None) == expected


@pytest.mark.parametrize("url", [None, "https://example.org/x"])
def test_the_site_has_the_version_and_the_link_that_the_package_has(hooks, monkeypatch, url):
    package = Message()
    package["Version"] = "1.2.3"
    if url:
        package["Project-URL"] = f"Repository, {url}"
    monkeypatch.setattr(hooks.metadata, "metadata", {"fastaccum": package}.__getitem__)
    config = hooks.on_config(SimpleNamespace(site_name="name", repo_url=None))
    assert (config.site_name, config.repo_url) == ("name 1.2.3", url)


@pytest.mark.parametrize("ran", [True, False])
def test_a_gallery_that_did_not_run_has_no_pictures(hooks, ran):
    given = 'Text\n<div class="mkd-glr-thumbcontainer" tooltip="x">\n    <img src="a.png" />\n</div>\nMore\n'
    page = SimpleNamespace(file=SimpleNamespace(src_uri="generated/gallery/index.md"))
    config = SimpleNamespace(plugins={"gallery": SimpleNamespace(config={"plot_gallery": ran})})
    assert hooks.on_page_markdown(given, page, config, None) == (given if ran else "Text\nMore\n")
