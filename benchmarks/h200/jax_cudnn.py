"""What JAX asks of a GPU's cuDNN while it traces, answered for the described H200."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from jax._src.cudnn import fused_attention_stablehlo

CUDNN_VERSION, CAPABILITY = 91000, (9, 0)  # what the description of the H200 says


@contextlib.contextmanager
def cudnn_of_the_described_gpu() -> Iterator[None]:
    """Answers for the device that JAX asks, while it traces, whether its cuDNN has flash attention.

    JAX looks at the machine that it runs on, although the program may be for another: these three
    functions of jax._src.cudnn.fused_attention_stablehlo are all that it asks.
    """

    def capability(of):
        return tuple(int(part) for part in of.split("."))

    with mock.patch.multiple(
        fused_attention_stablehlo,
        check_cudnn_version=lambda: CUDNN_VERSION,
        check_compute_capability=lambda at_least: capability(at_least) <= CAPABILITY,
        is_cuda_compute_capability_equal=lambda to: capability(to) == CAPABILITY,
    ):
        yield
