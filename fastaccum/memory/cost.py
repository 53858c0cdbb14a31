"""Counts the arithmetic and the traffic of a compiled program, instruction by instruction and turn by turn of loops."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from fastaccum.memory.buffers import HloProto

# Bytes of an element, by XLA's PrimitiveType; all others hold none.
_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 2, 8: 4, 9: 8, 10: 2, 11: 4, 12: 8, 15: 8, 16: 2, 18: 16}
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
_SLICES = {"slice", "dynamic-slice", "gather"}


class Cost(NamedTuple):
    """The arithmetic and the traffic of one run of a program.

    Attributes:
        flops: floating point operations of its matrix products and convolutions, two for a multiplication and its
            addition. Recomputed products count again; elementwise operations do not count.
        bytes: read and written by its kernels, as if no cache kept anything between two of them.
        at_least: true if XLA does not know the length of a loop with products, which counts as one turn.
    """

    flops: int
    bytes: int
    at_least: bool = False


def count(protos: Iterable[HloProto]) -> Cost:
    """Adds up the costs of optimized programs; of a conditional's branches, the one with the most FLOPs counts."""
    modules = [proto.hlo_module for proto in protos]
    return _sum(_Reader(module.computations).cost(module.entry_computation_id) for module in modules)


class _Reader:
    def __init__(self, computations: Iterable[HloProto]):
        self._computations = {c.id: c for c in computations}
        self._instructions = {i.id: i for c in computations for i in c.instructions}

    def cost(self, computation: int) -> Cost:
        """Adds up the costs of a computation's instructions, with those of the computations that they call."""
        return _sum(map(self._launched, self._computations[computation].instructions))

    def _launched(self, line: HloProto) -> Cost:
        called = list(line.called_computation_ids)
        if line.opcode == "while":  # the body is called first
            known = json.loads(line.backend_config or b"{}").get("known_trip_count", {})
            times = int(known.get("n", 1))
            inner = self.cost(called[0])
            return Cost(times * inner.flops, times * inner.bytes, inner.at_least or (not known and inner.flops > 0))
        if line.opcode == "conditional":
            return max(map(self.cost, called))
        if line.opcode in ("call", "async-start"):
            return _sum(map(self.cost, called))
        if line.opcode in _FREE or line.opcode.endswith(("-done", "-update")):
            return Cost(0, 0)
        if line.opcode == "fusion":
            fused = self._computations[called[0]]
            return Cost(sum(map(self._flops, self._nested(fused))), self._moved(line, fused))
        return Cost(self._flops(line), self._moved_alone(line))

    def _nested(self, computation: HloProto) -> Iterator[HloProto]:
        for line in computation.instructions:
            yield line
            if line.opcode in ("fusion", "call"):
                for called in line.called_computation_ids:
                    yield from self._nested(self._computations[called])

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
        return 2 * math.prod(_arrays(line.shape)[0].dimensions) * math.prod(sizes[axis] for axis in contracted)

    def _convolution(self, line: HloProto) -> int:
        """Counts two FLOPs for each pair of an output and a weight that meet at an input, not at the padding."""
        image, filters = (list(self._operand(line, i).shape.dimensions) for i in (0, 1))
        result = list(_arrays(line.shape)[0].dimensions)
        if line.custom_call_target.endswith("BackwardInput"):
            image, result = result, image
        elif line.custom_call_target.endswith("BackwardFilter"):
            filters, result = result, filters
        axes = line.convolution_dimension_numbers
        pairs = 2 * result[axes.output_batch_dimension] // max(1, line.batch_group_count)
        pairs *= filters[axes.kernel_input_feature_dimension] * filters[axes.kernel_output_feature_dimension]
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

    def _moved_alone(self, line: HloProto) -> int:
        operands = [self._operand(line, i).shape for i in range(len(line.operand_ids))]
        if line.opcode in _SLICES:
            return 2 * _size(line.shape)
        if line.opcode == "dynamic-update-slice":
            return 2 * _size(operands[1])
        if line.opcode == "scatter":
            return 3 * _size(operands[-1])
        return _size(line.shape) + sum(map(_size, operands))

    def _moved(self, line: HloProto, fused: HloProto) -> int:
        """Counts a fusion's bytes: slices of operands that it only slices, and the part that it writes in place."""
        inside = {i.id: i for i in fused.instructions}
        users: dict[int, list[HloProto]] = {}
        for each in fused.instructions:
            for operand in each.operand_ids:
                users.setdefault(operand, []).append(each)
        root = inside[fused.root_id]
        results = [self._behind(i) for i in root.operand_ids] if root.opcode == "tuple" else [self._behind(root.id)]
        updates = [r for r in results if r.opcode == "dynamic-update-slice"]
        in_place = {self._behind(r.operand_ids[0]).id for r in updates}
        moved = sum(_size(r.shape) for r in results if r.opcode != "dynamic-update-slice")
        moved += sum(_size(self._operand(r, 1).shape) for r in updates)
        for each in fused.instructions:
            if each.opcode == "parameter":
                users_of = users.get(each.id, [])
                whole = _size(each.shape)
                if users_of and all(u.opcode in _SLICES and u.operand_ids[0] == each.id for u in users_of):
                    moved += min(whole, sum(_size(u.shape) for u in users_of))
                elif each.id not in in_place:
                    moved += whole
        return moved

    def _behind(self, instruction: int) -> HloProto:
        line = self._instructions[instruction]
        while line.opcode in ("bitcast", "reshape", "copy"):
            line = self._instructions[line.operand_ids[0]]
        return line

    def _operand(self, line: HloProto, number: int) -> HloProto:
        return self._instructions[line.operand_ids[number]]


def _meetings(window: HloProto, length: int, outputs: int) -> int:
    """Counts the pairs of an output and a weight that meet at an input, along one axis."""
    dilated = window.base_dilation or 1
    length = (length - 1) * dilated + 1
    places = (
        output * (window.stride or 1) + weight * (window.window_dilation or 1) - window.padding_low
        for output in range(outputs)
        for weight in range(window.size)
    )
    return sum(0 <= place < length and place % dilated == 0 for place in places)


def _sum(costs: Iterable[Cost]) -> Cost:
    found = list(costs)
    return Cost(sum(c.flops for c in found), sum(c.bytes for c in found), any(c.at_least for c in found))


def _arrays(shape: HloProto) -> list[HloProto]:
    """Lists the arrays in a shape, which may be a tuple of tuples."""
    return [array for part in shape.tuple_shapes for array in _arrays(part)] if shape.tuple_shapes else [shape]


def _size(shape: HloProto) -> int:
    return sum(_BYTES.get(array.element_type, 0) * math.prod(array.dimensions) for array in _arrays(shape))
