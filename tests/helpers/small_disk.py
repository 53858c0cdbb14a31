"""A file system of its own, with as much room as is asked for."""

import contextlib
import subprocess

import pytest


@contextlib.contextmanager
def mounted(path, size):
    """A new file system at `path`, of a size such as "6m"; the test is skipped where none may be
    mounted.
    """
    path.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True
    ).returncode:
        pytest.skip("mounting a file system needs to be permitted")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], capture_output=True)
