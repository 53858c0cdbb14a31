"""What docs/hooks.py adds to the site. The site itself is built strictly by CI, where a warning is an error."""

import importlib.util
import logging
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
    for path in [*module.PACKAGES.values(), *(f"docs/api/{page.name}" for page in (ROOT / "docs/api").glob("*.md"))]:
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
        ("fastaccum/__init__.pyi", "from .trainer import Other as Other", "fastaccum.Other is public"),
        ("kernels/__init__.py", "from fastaccum.kernels.x import y as y", "fastaccum.kernels.y is public"),
        ("docs/api/trainer.md", "::: fastaccum.Gone", "fastaccum.Gone`, which is no public name"),
    ],
)
def test_names_without_an_entry_and_entries_without_a_name_fail_the_build(hooks, caplog, path, line, named):
    with (hooks.ROOT / path).open("a") as file:
        file.write(f"\n{line}\n")
    hooks._check_public_names()
    assert [named in record.getMessage() for record in caplog.records] == [True]
    assert caplog.records[0].levelno == logging.WARNING and caplog.records[0].name.startswith("mkdocs.")


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
        ("guides/a.md", "![p](../../benchmarks/results/x/p.png)", "![p](../project/benchmarks/results/x/p.png)"),
        ("project/CHANGELOG.md", "[m](docs/memory.md#b)", "[m](../memory.md#b)"),
        ("project/benchmarks/gpu/README.md", "[m](../../docs/memory.md)", "[m](../../../memory.md)"),
        ("memory.md", "[s](https://example.org/a.md) [b](#b)", "[s](https://example.org/a.md) [b](#b)"),
    ],
)
def test_links_between_files_lead_to_pages(hooks, page, link, on_the_site):
    page = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    assert hooks.on_page_markdown(link, page, None, None) == on_the_site
