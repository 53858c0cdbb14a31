"""Every page of the documentation runs as it is printed: see run_page.py for how a page brings its
data.
"""

import os
import subprocess
import sys

import pytest
import run_page
from run_page import PAGES, ROOT

WITH_CODE = [page for page in PAGES if "```python" in page.read_text()]


def run(page, folder):
    """Runs a page in a process and an empty folder of its own, so that no page depends on another."""
    env = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2", "HOME": str(folder), "COLUMNS": "100"}
    env.pop("TF_USE_LEGACY_KERAS", None)  # which fastaccum.addons has set here
    command = [sys.executable, run_page.__file__, str(page)]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=900)


@pytest.mark.docs
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_runs_as_printed(page, tmp_path):
    result = run(page, tmp_path)
    if result.returncode == run_page.SKIPPED:
        pytest.skip(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
    if page.stem in ("reliability", "resuming"):
        result = run(page, tmp_path)  # as by readers who run it again, where its checkpoints are
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.docs
def test_a_block_whose_module_is_missing_is_left_out_and_the_rest_runs(tmp_path):
    page = tmp_path / "page.md"
    block = "```python\nprint({})\n```\n\n<!-- output -->\n\n```text\n{}\n```\n\n"
    page.write_text(
        "# Page\n\n<!-- needs: no_such_module -->\n\n" + block.format(1, 2) + block.format(3, 3)
    )
    result = run(page, tmp_path)
    assert (
        result.returncode == run_page.SKIPPED and "blocks that need no_such_module" in result.stdout
    )
    page.write_text("# Page\n\n<!-- needs: sys -->\n\n" + block.format(1, 2))
    result = run(page, tmp_path)
    assert result.returncode == 1 and "the page says that this is printed" in result.stderr


@pytest.mark.docs
@pytest.mark.parametrize(
    "shown, printed, agree",
    [
        ("a table of 1,000 B\n", "a table of 1,050 B", True),
        ("a table of 1,000 B\n", "a table of 1,200 B", False),
        ("a table of 1,000 B\n", "a list of 1,000 B", False),
        ("compiled, 20 s\n", "compiled, 3.5 s", True),
        ("$ command --option 5\n│  9 │\n└────┘\n", "│ 9 │\n└───┘\n", True),
    ],
)
def test_figures_of_a_machine_may_differ_by_a_tenth_and_words_may_not(shown, printed, agree):
    assert run_page.same_but_for_numbers(shown, printed) is agree
