"""Every page of the documentation runs as it is printed: see run_page.py for how a page brings its data."""

import os
import subprocess
import sys

import pytest
import run_page
from run_page import PAGES, ROOT

WITH_CODE = [page for page in PAGES if "```python" in page.read_text()]


@pytest.mark.docs
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_runs_as_printed(page, tmp_path):
    """In a process of its own, so that no page leans on another, and in an empty folder."""
    env = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2", "HOME": str(tmp_path), "COLUMNS": "100"}
    command = [sys.executable, run_page.__file__, str(page)]
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900)
    if result.returncode == run_page.SKIPPED:
        pytest.skip(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
