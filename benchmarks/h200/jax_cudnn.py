"""Answers for the described H200 what JAX asks a GPU's cuDNN while it traces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from jax._src.cudnn import fused_attention_stablehlo

# The description of the H200 has these.
CUDNN_VERSION = 91000
CAPABILITY = (9, 0)


@contextlib.contextmanager
def cudnn_of_the_described_gpu() -> Iterator[None]:
    """Makes JAX take cuDNN and the compute capability of the described H200 while it traces.

    JAX looks at the machine that it runs on, although the program may be for another: it asks only
    these three functions of jax._src.cudnn.fused_attention_stablehlo.
    """

    def capability(text):
        return tuple(int(number) for number in text.split("."))

    with mock.patch.multiple(
        fused_attention_stablehlo,
        check_cudnn_version=lambda: CUDNN_VERSION,
        check_compute_capability=lambda at_least: capability(at_least) <= CAPABILITY,
        is_cuda_compute_capability_equal=lambda to: capability(to) == CAPABILITY,
    ):
        yield
