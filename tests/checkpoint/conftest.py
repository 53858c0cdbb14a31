"""Provides what the tests share that kill processes."""

import multiprocessing

import pytest


@pytest.fixture(scope="module")
def context():
    """Processes that begin with everything imported, and nothing run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["killed", "fastaccum.trainer"])
    return context
