"""The CUDA kernels without a GPU: every configuration that a shape can get compiles, for each
architecture that it is for, and fits its shared memory; what cannot run says why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from weightpath.errors import BadRequest, CannotRun
from weightpath.kernels.choose import Layer, choose
from weightpath.kernels.cuda import compiler, tiles_linear
from weightpath.kernels.cuda.configurations import Mma, Wgmma, mma_for, wgmma_for
from weightpath.layouts import gpu_tiles
from weightpath.scheme import INT8, Scheme

SHAPES = [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (576, 1536)]
HOPPER_SHARED = 227 << 10
"""Bytes of shared memory that a block can have on sm_90."""
ROWS = (1, 2, 4, 5, 8, 16, 17, 32, 48, 64, 100, 128, 256, 512, 1024, 2048, 4096)
KINDS = [(4, 32, False), (4, 128, False), (4, 64, True), (4, 0, True), (8, 0, False)]


def tiles_of(bits: int, group: int, asymmetric: bool) -> gpu_tiles.GpuTiles:
    columns = 256
    codes = torch.zeros(64, columns, dtype=torch.uint8)
    groups = columns // group if group else 1
    scales = torch.ones(64, groups, dtype=torch.bfloat16 if bits == 4 else torch.float32)
    zeros = torch.zeros(64, groups, dtype=torch.uint8) if asymmetric else None
    return gpu_tiles.from_parts(codes, scales, zeros, bits)


def configurations(bits: int) -> set[Mma | Wgmma]:
    few = {mma_for(rows, n, bits, 132) for n, _ in SHAPES for rows in ROWS if rows <= 32}
    return few | {wgmma_for(rows, n, k, 132) for n, k in SHAPES for rows in ROWS if rows > 32}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def compiled(kind: tuple[int, int, bool], which: Mma | Wgmma, architecture: str) -> bytes:
    settings = tiles_linear.settings_of(tiles_of(*kind), torch.bfloat16, which)
    early = int(architecture != "sm_80")
    text, name, every = tiles_linear.program({**settings, "EARLY": early}, which)
    cubin = compiler.compile_cubin(text, every, architecture)
    assert name.encode() in cubin
    return cubin


needs_compiler = pytest.mark.skipif(compiler.refusal() is not None, reason="no NVRTC here")


@needs_compiler
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_kernel_compiles_for_hopper(kind: tuple[int, int, bool]) -> None:
    every = sorted(configurations(kind[0]), key=str)
    for which in every if kind == KINDS[1] else every[:: len(every) // 3]:
        assert compiled(kind, which, "sm_90a")


@needs_compiler
@pytest.mark.parametrize("architecture", ["sm_80", "sm_100"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_kernels_for_few_rows_compile_before_and_after_hopper(
    kind: tuple[int, int, bool], architecture: str
) -> None:
    for rows in (1, 32):
        assert compiled(kind, mma_for(rows, 4096, kind[0], 108), architecture)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_configuration_fits_the_shared_memory(kind: tuple[int, int, bool]) -> None:
    for which in configurations(kind[0]):
        settings = tiles_linear.settings_of(tiles_of(*kind), torch.bfloat16, which)
        assert which.blocks * tiles_linear.shared_bytes(settings, which) <= HOPPER_SHARED


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_configurations_shrink_to_the_shared_memory_of_smaller_gpus(
    kind: tuple[int, int, bool],
) -> None:
    tiles, limit = tiles_of(*kind), 99 << 10
    for which in configurations(kind[0]):
        if isinstance(which, Mma):
            small = tiles_linear.fitted(which, tiles, torch.bfloat16, limit)
            settings = tiles_linear.settings_of(tiles, torch.bfloat16, small)
            assert tiles_linear.shared_bytes(settings, small) <= limit
            assert small.stages >= 2
            assert tiles_linear.fitted(which, tiles, torch.bfloat16, HOPPER_SHARED) == which


@needs_compiler
def test_a_damaged_kept_kernel_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = 'extern "C" __global__ void nothing() {}'
    first = compiler.compile_cubin(text, {}, "sm_80")
    (kept,) = (tmp_path / "weightpath" / "cuda").iterdir()
    kept.write_bytes(kept.read_bytes()[:-40])
    assert compiler.compile_cubin(text, {}, "sm_80") == first
    assert kept.read_bytes()[:-32] == first


@needs_compiler
def test_a_text_that_does_not_compile_is_one_line_that_says_so() -> None:
    with pytest.raises(CannotRun, match="refused a kernel") as caught:
        compiler.compile_cubin("nonsense;", {}, "sm_80")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["cuda", "triton"])
@pytest.mark.parametrize("scheme", [Scheme(4, 64), INT8])
def test_asking_for_a_gpu_kernel_on_the_cpu_says_why_not(name: str, scheme: Scheme) -> None:
    with pytest.raises(CannotRun, match="run on CUDA; this layer is on cpu"):
        choose(Layer(64, 128, scheme, torch.device("cpu")), name)


def test_activations_of_another_dtype_or_width_are_refused() -> None:
    tiles = tiles_of(4, 64, False)
    with pytest.raises(BadRequest, match=r"torch.float32; the CUDA kernels take bf16 and fp16"):
        tiles_linear.linear(torch.zeros(1, 256), tiles)
    with pytest.raises(BadRequest, match="256 in_features"):
        tiles_linear.linear(torch.zeros(1, 128, dtype=torch.bfloat16), tiles)
