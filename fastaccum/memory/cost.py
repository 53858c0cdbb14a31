"""Counts the arithmetic of a compiled program, instruction by instruction and turn by turn of
loops.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from fastaccum.memory.buffers import HloProto


class Cost(NamedTuple):
    """The arithmetic of one run of a program: the floating point operations of its matrix products
    and convolutions.

    A multiplication and its addition are two; recomputed products count again, and elementwise
    operations do not.
    """

    flops: int
    # true if XLA does not know the length of a loop with products, which counts as one turn
    at_least: bool = False


def count(protos: Iterable[HloProto]) -> Cost:
    """Adds up the costs of optimized programs; of a conditional's branches, the one with the most
    FLOPs counts.
    """
    modules = [proto.hlo_module for proto in protos]
    return _sum(
        _Reader(module.computations).cost(module.entry_computation_id) for module in modules
    )


class _Reader:
    def __init__(self, computations: Iterable[HloProto]):
        self._computations = {c.id: c for c in computations}
        self._instructions = {i.id: i for c in computations for i in c.instructions}

    def cost(self, computation: int) -> Cost:
        """Adds up the costs of a computation's instructions, with those of the computations that
        they call.
        """
        return _sum(map(self._launched, self._computations[computation].instructions))

    def _launched(self, line: HloProto) -> Cost:
        called = list(line.called_computation_ids)
        if line.opcode == "while":  # the body is called first
            known = json.loads(line.backend_config or b"{}").get("known_trip_count", {})
            inner = self.cost(called[0])
            return Cost(
                int(known.get("n", 1)) * inner.flops,
                inner.at_least or (not known and inner.flops > 0),
            )
        if line.opcode == "conditional":
            return max(map(self.cost, called))
        return _sum([Cost(self._flops(line)), *map(self.cost, called)])

    def _flops(self, line: HloProto) -> int:
        target = line.custom_call_target
        if line.opcode == "dot":
            return self._product(line, line.dot_dimension_numbers.lhs_contracting_dimensions)
        if target.startswith("__cublas$"):
            gemm = json.loads(line.backend_config)["gemm_backend_config"]["dot_dimension_numbers"]
            return self._product(line, map(int, gemm["lhs_contracting_dimensions"]))
        if line.opcode == "convolution" or target.startswith("__cudnn$conv"):
            return self._convolution(line)
        return self._attention(line) if target.startswith("__cudnn$fmha") else 0

    def _product(self, line: HloProto, contracted: Iterable[int]) -> int:
        sizes = self._operand(line, 0).shape.dimensions
        return (
            2
            * math.prod(_arrays(line.shape)[0].dimensions)
            * math.prod(sizes[axis] for axis in contracted)
        )

    def _convolution(self, line: HloProto) -> int:
        """Counts two FLOPs for each pair of an output and a weight that meet at an input, not at
        the padding.
        """
        image, filters = (list(self._operand(line, i).shape.dimensions) for i in (0, 1))
        result = list(_arrays(line.shape)[0].dimensions)
        if line.custom_call_target.endswith("BackwardInput"):
            image, result = result, image
        elif line.custom_call_target.endswith("BackwardFilter"):
            filters, result = result, filters
        axes = line.convolution_dimension_numbers
        pairs = 2 * result[axes.output_batch_dimension] // max(1, line.batch_group_count)
        pairs *= (
            filters[axes.kernel_input_feature_dimension]
            * filters[axes.kernel_output_feature_dimension]
        )
        spatial = axes.input_spatial_dimensions, axes.output_spatial_dimensions
        for window, at_image, at_result in zip(line.window.dimensions, *spatial, strict=True):
            pairs *= _meetings(window, image[at_image], result[at_result])
        return pairs

    def _attention(self, line: HloProto) -> int:
        """Counts cuDNN's two products forward and five backward; a causal mask halves each."""
        config = json.loads(line.backend_config)["cudnn_fmha_backend_config"]
        scores = math.prod(map(int, config["intermediate_tensor_shape"]["dimensions"]))
        products = 5 if "Backward" in line.custom_call_target else 2
        flops = 2 * products * scores * self._operand(line, 0).shape.dimensions[-1]
        return flops // 2 if "CAUSAL" in config.get("mask_type", "") else flops

    def _operand(self, line: HloProto, number: int) -> HloProto:
        return self._instructions[line.operand_ids[number]]


def _meetings(window: HloProto, length: int, outputs: int) -> int:
    """Counts the pairs of an output and a weight that meet at an input, along one axis."""
    dilated = window.base_dilation or 1
    length = (length - 1) * dilated + 1
    outputs_1, weights = np.arange(outputs)[:, np.newaxis], np.arange(window.size)
    places = (
        outputs_1 * (window.stride or 1)
        + weights * (window.window_dilation or 1)
        - window.padding_low
    )
    return int(np.sum((places >= 0) & (places < length) & (places % dilated == 0)))


def _sum(costs: Iterable[Cost]) -> Cost:
    found = list(costs)
    return Cost(sum(c.flops for c in found), any(c.at_least for c in found))


def _arrays(shape: HloProto) -> list[HloProto]:
    """Lists the arrays in a shape, which may be a tuple of tuples."""
    return (
        [array for part in shape.tuple_shapes for array in _arrays(part)]
        if shape.tuple_shapes
        else [shape]
    )
