"""Loading compiled kernels and launching them on torch's current stream, through CUDA's driver.

The driver's library is found by its one name, libcuda.so.1; torch must have made its context on the
device, which it has where a tensor lies there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from weightpath.errors import CannotRun

MOST_SHARED = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
STARTS_EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
TENSOR_MAP_BYTES, TENSOR_MAP_ALIGNMENT = 128, 64
MAP_TYPES = {torch.float16: 6, torch.bfloat16: 9}  # CU_TENSOR_MAP_DATA_TYPE_...
SWIZZLE_128, PROMOTE_256 = 3, 3


@dataclass(frozen=True)
class Function:
    """A kernel on one device. shared: bytes of dynamic shared memory a block takes."""

    handle: Any
    shared: int


@cache
def _cuda() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as missing:
        raise CannotRun(f"CUDA's driver is not found ({missing}); use the CPU") from missing


def _check(status: int, what: str) -> None:
    if status:
        name = ctypes.c_char_p()
        _cuda().cuGetErrorString(status, ctypes.byref(name))
        said = name.value.decode() if name.value else "no such error"
        raise CannotRun(
            f"CUDA: {what} failed with {status}, {said}; use the triton or torch kernels"
        )


@cache
def most_shared(index: int) -> int:
    """Bytes of shared memory that a block can ask for on a device, by torch's number of it."""
    device, found = ctypes.c_int(), ctypes.c_int()
    _check(_cuda().cuDeviceGet(ctypes.byref(device), index), f"device {index}")
    status = _cuda().cuDeviceGetAttribute(ctypes.byref(found), MOST_SHARED, device)
    _check(status, f"the shared memory of device {index}")
    return found.value


def load(cubin: bytes, name: str, shared: int) -> Function:
    """A kernel of a compiled file, on torch's current device. It stays loaded."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check(_cuda().cuModuleLoadData(ctypes.byref(module), cubin), f"loading kernel {name}")
    _check(
        _cuda().cuModuleGetFunction(ctypes.byref(function), module, name.encode()), f"kernel {name}"
    )
    _check(
        _cuda().cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, shared),
        f"asking {shared} bytes of shared memory for kernel {name}",
    )
    return Function(function, shared)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: which one, and a value in the first of 64 bytes."""

    _fields_: ClassVar = [
        ("name", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_uint8 * 60),
    ]


class _Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_: ClassVar = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


def launch(
    function: Function,
    grid: tuple[int, int],
    threads: int,
    arguments: Sequence[Any],
    early: bool,
) -> None:
    """Start it on torch's current stream. arguments: ctypes values, in the kernel's order. early: it
    may start before the kernel before it has ended; it waits itself before it reads that one's
    results."""
    pointers = (ctypes.c_void_p * len(arguments))(
        *(ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in arguments)
    )
    attribute = _Attribute(name=STARTS_EARLY, value=1)
    launch = _Launch(
        (grid[0], grid[1], 1),
        (threads, 1, 1),
        function.shared,
        torch.cuda.current_stream().cuda_stream,
        ctypes.pointer(attribute),
        int(early),
    )
    status = _cuda().cuLaunchKernelEx(ctypes.byref(launch), function.handle, pointers, None)
    _check(status, "a launch")


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """A tensor's address as an argument; null for None."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def tensor_map(x: Tensor, rows: int) -> Any:
    """How the copy engine reads boxes of `rows` x 64 columns of x [M, K], 16-bit, columns in order,
    rows a multiple of 16 bytes apart; zeros beyond it."""
    held = (ctypes.c_uint8 * (TENSOR_MAP_BYTES + TENSOR_MAP_ALIGNMENT))()
    start = -ctypes.addressof(held) % TENSOR_MAP_ALIGNMENT
    made = (ctypes.c_uint8 * TENSOR_MAP_BYTES).from_buffer(held, start)
    status = _cuda().cuTensorMapEncodeTiled(
        made,
        MAP_TYPES[x.dtype],
        2,
        ctypes.c_void_p(x.data_ptr()),
        (ctypes.c_uint64 * 2)(x.shape[1], x.shape[0]),
        (ctypes.c_uint64 * 1)(x.stride(0) * 2),
        (ctypes.c_uint32 * 2)(64, rows),
        (ctypes.c_uint32 * 2)(1, 1),
        0,
        SWIZZLE_128,
        PROMOTE_256,
        0,
    )
    _check(status, f"describing activations {list(x.shape)}")
    return made
