"""The memory of a device, and how much of it is free."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

from fastaccum.kernels.devices import compute_capability, device_memory, has_gpu

LIMIT = "FASTACCUM_MEMORY_LIMIT"
_UNITS = {unit: 1000**i for i, unit in enumerate(("B", "KB", "MB", "GB", "TB"))}
_UNITS |= {unit: 1024**i for i, unit in enumerate(("", "KIB", "MIB", "GIB", "TIB"))}
_PROCESS, _MACHINE, _CGROUPS = Path("/proc/self"), Path("/proc/meminfo"), Path("/sys/fs/cgroup")
# A number without a unit counts bytes. Nobody means fewer bytes than a page of memory has: "24" is
# meant as 24 GiB.
_SMALLEST_WITHOUT_UNIT = 4096
# MiB that TensorFlow's pool leaves to a GPU's driver and libraries, by CUDA's compute capability.
_GPU_RESERVE = {6: 500, 7: 1050, 8: 1536}


class DeviceMemory(NamedTuple):
    """Bytes of a device."""

    total: int  # of the device, or of the limit on this process
    in_use: int  # by this process and others, of `total`
    free: int  # for this process to take
    source: str  # the limit or the device that these figures are of


def available(device: str | None = None) -> DeviceMemory:
    """Looks up the memory of "GPU:1" or "CPU:0"; of the first GPU if None, or without one the
    host's tightest limit.

    FASTACCUM_MEMORY_LIMIT, in bytes or as "16GiB", takes the place of all other limits; ValueError
    if it is no size.
    """
    if text := os.environ.get(LIMIT):
        total = parse_size(text, LIMIT)
        return DeviceMemory(total, 0, total, LIMIT)
    return physical(device)


def physical(device: str | None = None) -> DeviceMemory:
    """Looks up a device's memory as `available` does, but without FASTACCUM_MEMORY_LIMIT."""
    device = device or ("GPU:0" if has_gpu() else "CPU:0")
    device = device.rpartition("device:")[2]
    return _gpu(device) if "GPU" in device else min([host(), *_pool()], key=lambda each: each.free)


def host() -> DeviceMemory:
    """Looks up the tightest limit on the host's memory: a control group's, the process's or the
    machine's.
    """
    return min(_host(), key=lambda each: each.free)


def parse_size(text: str | int, name: str = "memory_limit") -> int:
    """Parses a number of bytes, or a text like "16GiB" or "500 MB".

    Raises:
        ValueError: raised for anything else, and for a number that is too small to be meant as
            bytes.

    >>> parse_size("16GiB"), parse_size("1.5 GB"), parse_size(4096)
    (17179869184, 1500000000, 4096)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", str(text), re.IGNORECASE)
    unit = found[2].upper() if found else ""
    unit = unit if unit in _UNITS else unit + "B" if unit.endswith("I") else unit + "IB"
    if not found or unit not in _UNITS or not (number := int(float(found[1]) * _UNITS[unit])):
        raise ValueError(f'{name}={text!r} is not a size: pass bytes, or a text like "16GiB".')
    if not found[2] and number < _SMALLEST_WITHOUT_UNIT:
        raise ValueError(
            f"{name}={text!r} would be {number:,} bytes, since it has no unit: "
            f'pass "{number}GiB", or "{number}MiB".'
        )
    return number


def _gpu(device: str) -> DeviceMemory:
    in_use = tf.config.experimental.get_memory_info(device)["current"]
    physical = tf.config.list_physical_devices("GPU")
    index = int(device.rpartition(":")[2])
    configured = (
        tf.config.get_logical_device_configuration(physical[min(index, len(physical) - 1)]) or []
    )
    limits = [each.memory_limit for each in configured if each.memory_limit]
    reserve = _GPU_RESERVE.get(compute_capability()[0], 1800) * 2**20
    total = limits[0] * 2**20 if limits else device_memory() - reserve
    return DeviceMemory(total, in_use, max(0, total - in_use), "TensorFlow's pool on the GPU")


def _host() -> Iterator[DeviceMemory]:
    machine = _kilobytes(_MACHINE.read_text())
    total, free = machine["MemTotal"], machine["MemAvailable"] + machine["SwapFree"]
    yield DeviceMemory(total, max(0, total - free), free, "the machine's memory")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        in_use = _kilobytes((_PROCESS / "status").read_text())["VmSize"]
        yield DeviceMemory(
            limit, in_use, max(0, limit - in_use), "the process's limit on its address space"
        )
    for second, folder in _cgroups():
        yield from _of_cgroup(second, folder, total)


def _pool() -> Iterator[DeviceMemory]:
    """Yields TensorFlow's pool of the host's memory, if the environment turns it on."""
    if os.environ.get("TF_CPU_ALLOCATOR_USE_BFC", "").lower() in ("1", "true"):
        total = int(os.environ.get("TF_CPU_BFC_MEM_LIMIT_IN_MB") or 2**16) * 2**20
        in_use = tf.config.experimental.get_memory_info("CPU:0")["current"]
        yield DeviceMemory(total, in_use, max(0, total - in_use), "TensorFlow's pool on the CPU")


def _kilobytes(text: str) -> dict[str, int]:
    return {
        name: int(number) * 1024
        for name, number in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)
    }


def _cgroups() -> Iterator[tuple[bool, Path]]:
    """Yields the folders of the process's control groups and of all above them; true for version
    2.
    """
    for line in (_PROCESS / "cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        root = _CGROUPS if number == "0" else _CGROUPS / "memory"
        for part in (Path(path), *Path(path).parents):
            yield number == "0", root / part.relative_to("/")


def _of_cgroup(second: bool, folder: Path, machine: int) -> Iterator[DeviceMemory]:
    files = (
        ("memory.max", "memory.current")
        if second
        else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    try:
        limit, used = ((folder / file).read_text().strip() for file in files)
        counted = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return
    if limit == "max" or int(limit) >= machine:
        return
    # Pages of files that nobody uses are given back before anything is refused.
    in_use = max(
        0, int(used) - int(counted.get("inactive_file" if second else "total_inactive_file", 0))
    )
    yield DeviceMemory(
        int(limit), in_use, max(0, int(limit) - in_use), "the limit of a control group"
    )
