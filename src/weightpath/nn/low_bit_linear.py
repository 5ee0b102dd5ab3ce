"""LowBitLinear: what the low-bit linears share, which is the kernel they run on and the form of
their codes.

A module holds its codes once, in one of three forms:

    plain      the subclass's named buffers, on any device: what the torch kernel reads
    tiles      one uint8 buffer in the bytes of `layouts/cpu_tiles.py`, in place of those: what the
               compiled CPU kernels read
    GPU tiles  the parts of `layouts/gpu_tiles.py`, in place of those: what the CUDA kernels read,
               and the Triton ones of 4 bits

`set_backend`, or the first product, brings them into the form that the chosen kernel reads; moving
to another device brings back the plain one. Attributes, `state_dict` and `dequantize` give the plain
values in either form, so that a saved file never depends on the machine that wrote it. Tiles may
lie elsewhere, one in a row of a matrix that another engine holds (`hold_rows`): they are copied only
if this module itself is asked for a product.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from weightpath.errors import BadRequest, CannotRun
from weightpath.kernels import cpu
from weightpath.kernels.choose import Choice, Layer, choose
from weightpath.kernels.cuda import tiles_linear
from weightpath.kernels.triton import ops
from weightpath.layouts.cpu_tiles import CpuTiles
from weightpath.layouts.gpu_tiles import GpuTiles
from weightpath.scheme import Scheme

Plain = dict[str, Any]
"""The plain buffers by name: tensors, or None for zeros that a symmetric scheme has not."""
GPU = ("gpu_codes", "gpu_scales", "gpu_zeros")
"""Buffers of the GPU tiles."""
_forming = threading.Lock()


class LowBitLinear(nn.Module, ABC):
    """y = x @ weight.T + bias on low-bit codes; x [..., K] float, y [..., N]."""

    PLAIN: ClassVar[tuple[str, ...]]
    """Names of the buffers that tiles stand for."""
    scheme: Scheme
    in_features: int
    out_features: int
    bias: nn.Parameter | None

    def __init__(self, bias: Tensor | None) -> None:
        super().__init__()
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.backend: str | None = None
        self.scale_per_group = True  # of 8-bit activations; else one a row
        self._tiles: CpuTiles | None = None
        self._gpu: GpuTiles | None = None
        self._ready = False  # whether the form is the chosen kernel's
        self._kernel = ""  # the chosen kernel's name, once ready
        self._few_rows = 0  # rows of x from which torch takes the product; 0: never

    @classmethod
    def from_tiles(cls, tiles: CpuTiles, scheme: Scheme, bias: Tensor | None = None) -> Self:
        """A linear on codes that are laid out already, nothing copied. tiles.packed may be uint8
        rows [tiles, bytes of a tile], strided or not, as `hold_rows` takes."""
        module = cls.__new__(cls)
        LowBitLinear.__init__(module, bias)
        module.out_features, module.in_features = tiles.out_features, tiles.in_features
        module.scheme = scheme
        module.register_buffer("tiles", tiles.packed)
        module._tiles = tiles
        return module

    # The subclass's part.

    @abstractmethod
    def _to_tiles(self) -> CpuTiles:
        """The plain buffers laid out."""

    @abstractmethod
    def _from_tiles(self, tiles: CpuTiles) -> Plain:
        """The plain buffers' values, by name."""

    @abstractmethod
    def _to_gpu_tiles(self) -> GpuTiles:
        """The plain buffers laid out for the GPU kernels, where they lie."""

    @abstractmethod
    def _from_gpu_tiles(self, tiles: GpuTiles) -> Plain:
        """The plain buffers' values, by name."""

    def _multiply_triton(self, x: Tensor, out: torch.dtype) -> Tensor:
        """The product by a Triton kernel that reads the plain buffers, of schemes that have one."""
        raise CannotRun(f"no Triton kernel reads plain {self.scheme.name} codes")

    @abstractmethod
    def _multiply_plain(self, x: Tensor, plain: Plain) -> Tensor:
        """The product in plain torch."""

    @property
    def activation_bits(self) -> int:
        """8 where activations are quantized to int8 as they arrive, else 16."""
        return self.scheme.activation_bits

    @property
    def takes_scales_per_group(self) -> bool:
        """Whether 8-bit activations have a scale for each group of a row."""
        tiles = self._tiles
        one_group = tiles is not None and tiles.groups == 1
        return self.activation_bits == 8 and self.scale_per_group and not one_group

    # Choosing.

    def _layer(self) -> Layer:
        held = self._buffers[self._held_names()[0]]
        assert held is not None
        return Layer(
            self.out_features, self.in_features, self.scheme, held.device, self._scale_dtype()
        )

    def _held_names(self) -> tuple[str, ...]:
        """Buffers that hold the codes in the present form, the codes' own first."""
        return (
            ("tiles",) if self._tiles is not None else GPU if self._gpu is not None else self.PLAIN
        )

    def _scale_dtype(self) -> torch.dtype:
        if self._tiles is not None:
            return self._tiles.scale_dtype
        if self._gpu is not None:
            return self._gpu.scales.dtype
        scales = self._buffers[self.PLAIN[1]]
        assert scales is not None
        return scales.dtype

    @property
    def kernel(self) -> Choice:
        """The kernel that runs this layer on its present device, with the rejections."""
        return choose(self._layer(), self.backend)

    def set_backend(self, backend: str | None) -> str:
        """Use a kernel by name (None: the chooser's); returns what was repacked, or "".

        CannotRun says why one cannot be had, and nothing has changed then.
        """
        if self._ready and backend == self.backend:
            return ""
        self.refuse_or(backend)
        self.backend = backend
        self._ready = False
        return self.prepare()

    def refuse_or(self, backend: str | None) -> None:
        """CannotRun, or BadRequest for an unknown name, where `backend` cannot run this layer."""
        choose(self._layer(), backend)

    def prepare(self) -> str:
        """Bring the codes into the form that the chosen kernel reads; returns what was repacked.

        The first product does it by itself; call it before `torch.export`, which cannot.
        """
        with _forming:
            if self._ready:
                return ""
            self._kernel = name = self.kernel.name
            on_gpu = name == "cuda" or (name == "triton" and self.scheme.bits == 4)
            wanted = "CPU tiles" if name == "cpu" else "GPU tiles" if on_gpu else "plain codes"
            held = self._form()
            if held != wanted and held != "plain codes":
                self._hold_plain()
            if held != wanted and wanted == "CPU tiles":
                self._hold_tiles(self._to_tiles())
            elif held != wanted and wanted == "GPU tiles":
                self._hold_gpu(self._to_gpu_tiles())
            done = "" if held == wanted else f"{held} to {wanted}"
            self._few_rows = cpu.fewest_torch_rows() if wanted == "CPU tiles" else 0
            self._ready = True
            return done

    def _form(self) -> str:
        tiled = "GPU tiles" if self._gpu is not None else "plain codes"
        return "CPU tiles" if self._tiles is not None else tiled

    def _hold_gpu(self, tiles: GpuTiles) -> None:
        for name, part in zip(GPU, (tiles.codes, tiles.scales, tiles.zeros), strict=True):
            self.register_buffer(name, part)
        self._gpu = tiles
        for name in self.PLAIN:
            del self._buffers[name]
        if tiles.codes.device.type == "cuda":
            # The kernels may read weights before the kernel ahead of them has ended.
            torch.cuda.current_stream(tiles.codes.device).synchronize()

    def _hold_tiles(self, tiles: CpuTiles) -> None:
        self.register_buffer("tiles", tiles.packed)
        self._tiles = tiles
        for name in self.PLAIN:
            del self._buffers[name]

    def hold_rows(self, rows: Tensor) -> None:
        """Keep the tiles in uint8 rows [tiles, bytes of a tile], strided or not, that hold their
        bytes already; what was held is let go. BadRequest for rows of another shape."""
        tiles = self._tiles
        if tiles is None or rows.numel() != tiles.packed.numel() or rows.stride(-1) != 1:
            raise BadRequest(
                f"rows {list(rows.shape)} cannot stand for the tiles of a {self.scheme.name} linear "
                f"[{self.out_features}, {self.in_features}]"
            )
        self._hold_packed(rows)

    def _hold_packed(self, packed: Tensor) -> None:
        assert self._tiles is not None
        self._tiles = replace(self._tiles, packed=packed)
        self._buffers["tiles"] = packed

    def _hold_plain(self) -> None:
        plain, names = self._plain(), self._held_names()
        for name, value in plain.items():
            self._buffers[name] = value
        self._tiles = self._gpu = None
        for name in names:
            del self._buffers[name]

    @property
    def cpu_tiles(self) -> CpuTiles | None:
        """The codes as the compiled CPU kernels read them, where they are held so."""
        return self._tiles

    # Values in either form.

    def _plain(self) -> Plain:
        if self._gpu is not None:
            return self._from_gpu_tiles(self._gpu)
        if self._tiles is None:
            return {name: self._buffers[name] for name in self.PLAIN}
        return self._from_tiles(replace(self._tiles, packed=self._tiles.packed.reshape(-1)))

    def __getattr__(self, name: str) -> Any:
        held = self.__dict__.get("_tiles"), self.__dict__.get("_gpu")
        if name in type(self).PLAIN and held != (None, None):
            return self._plain()[name]
        return super().__getattr__(name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LowBitLinear:
        """What `to`, `half` and the like do: scales follow to a device, never to a dtype, and tiles
        stay on the CPU."""
        if self._gpu is not None:
            self._hold_plain()
        if self._tiles is not None and fn(torch.empty(0, dtype=torch.uint8)).device.type != "cpu":
            self._hold_plain()
        self._ready = False
        stored = {name: value for name, value in self._buffers.items() if value is not None}
        super()._apply(fn, recurse)
        for name, before in stored.items():
            after = self._buffers[name]
            assert after is not None
            if after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        if self._tiles is not None:
            held = self._buffers["tiles"]
            assert held is not None
            self._tiles = replace(self._tiles, packed=held)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._form() == "plain codes":
            return
        for name in self._held_names():
            destination.pop(prefix + name, None)
        for name, value in self._plain().items():
            if value is not None:
                destination[prefix + name] = value

    def _load_from_state_dict(self, *arguments: Any, **named: Any) -> None:
        if self._form() != "plain codes":
            self._hold_plain()
            self._ready = False
        super()._load_from_state_dict(*arguments, **named)

    # The product.

    def _multiply(self, x: Tensor, out: torch.dtype) -> Tensor:
        """y in `out`. fp64 has no compiled kernel: it goes to torch in either form."""
        if not self._ready:
            if torch.compiler.is_exporting():
                raise CannotRun(
                    f"a {self.scheme.name} linear [{self.out_features}, {self.in_features}] is not "
                    "laid out yet; call weightpath.nn.swap.set_backend(model, None) before export"
                )
            self.prepare()
        if self._kernel in ("cuda", "triton"):
            return self._multiply_on_gpu(x, out)
        tiles = self._tiles
        if tiles is None or x.dtype == torch.float64:
            return self._multiply_plain(x, self._plain()).to(out)
        if self._few_rows and x.numel() >= self._few_rows * self.in_features:
            return self._multiply_plain(x, self._plain()).to(out)
        if tiles.packed.dim() == 2:  # rows of another engine
            self._hold_packed(tiles.packed.reshape(-1))
            tiles = self._tiles
            assert tiles is not None
        if torch.compiler.is_compiling():
            tiles = replace(tiles, packed=self._buffers["tiles"])
        bits, per_group = self.activation_bits, self.takes_scales_per_group
        return cpu.linear(x, tiles, self.bias, activation_bits=bits, per_group=per_group, out=out)

    def _multiply_on_gpu(self, x: Tensor, out: torch.dtype) -> Tensor:
        """By a CUDA or Triton kernel; floats that they do not take, and gradients, go to torch."""
        follows = torch.is_grad_enabled() and x.requires_grad
        if x.dtype not in tiles_linear.DTYPES or follows:
            return self._multiply_plain(x, self._plain()).to(out)
        tiles = self._gpu
        if tiles is None:
            return self._multiply_triton(x, out)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if self._kernel == "cuda":
            return tiles_linear.tiles_linear(x, tiles, bias, out)
        parts = (tiles.codes, tiles.scales, tiles.zeros)
        return ops.int4_linear(x, *parts, bias, tiles.out_features, tiles.group_size, out)

    def extra_repr(self) -> str:
        """What print(model) shows of it."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.scheme.name}"
