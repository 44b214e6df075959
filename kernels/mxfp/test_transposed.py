"""The version in CUDA C++ (sm90/transposed.cu): which problems it supports, that it compiles, and its results.

Results are tested on a GPU and on the host, for which the same source is compiled with its PTX emulated in C++.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from harness.compiling import nvrtc, sass

from . import configs, mxfp
from .formats import FORMATS
from .reference import mxfp_reference
from .sm90 import cuda_driver, transposed

HOPPER = (9, 0)
SOURCE = Path(transposed.__file__).with_name("transposed.cu")
KERNEL = "mxfp_quantize_transposed"
COMPILER = shutil.which("c++") or shutil.which("g++")
EVERY = pytest.mark.parametrize("format", FORMATS)
ON_HOPPER = pytest.mark.gpu(min_capability=HOPPER)
ON_THE_HOST = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler for the host")

# Replaces what the kernel uses from CUDA and instructions.cuh. Threads run one after another.
BEFORE = """
#include <algorithm>
#include <cmath>
#include <cstring>
#define DEVICE static inline
#define __global__
#define __shared__
#define __align__(bytes)
#define __grid_constant__
#define __launch_bounds__(...)
using std::min;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static struct { u32 x; } threadIdx, blockIdx, gridDim;
static void __syncwarp() {}
static float __uint_as_float(u32 x) { float y; memcpy(&y, &x, 4); return y; }
static u32 __float_as_uint(float x) { u32 y; memcpy(&y, &x, 4); return y; }

static u32 both(u32 bits) { return bits * 0x10001; }
template <class F> static u32 each(u32 a, u32 b, F f) {
    return (f(a & 0xFFFF, b & 0xFFFF) & 0xFFFF) | f(a >> 16, b >> 16) << 16;
}
static u32 larger(u32 a, u32 b) { return each(a, b, [](u32 x, u32 y) { return x > y ? x : y; }); }
static u32 smaller(u32 a, u32 b) { return each(a, b, [](u32 x, u32 y) { return x < y ? x : y; }); }
static float wide(u32 x) { return __uint_as_float(x << 16); }
static u32 to_bf16(float x) { const u32 bits = __float_as_uint(x); return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16; }
static u32 product(u32 a, u32 b) { return each(a, b, [](u32 x, u32 y) { return to_bf16(wide(x) * wide(y)); }); }
static u32 added(u32 a, u32 b) { return each(a, b, [](u32 x, u32 y) { return to_bf16(wide(x) + wide(y)); }); }
static u32 lower(u32 a, u32 b) { return (a & 0xFFFF) | b << 16; }
static u32 upper(u32 a, u32 b) { return a >> 16 | (b & 0xFFFF0000); }
static void pin(u32&) {}
static u32 load(const char* at) { u32 x; memcpy(&x, at, 4); return x; }

static u32 to_eight(float x, int mantissa, int bias, double largest) {
    const double magnitude = std::fabs((double)x);
    const int least = 1 - bias;
    int exponent = magnitude > 0 ? std::max(std::ilogb(magnitude), least) : least;
    const double step = std::ldexp(1, exponent - mantissa);
    const double rounded = std::min(std::nearbyint(magnitude / step) * step, largest);
    exponent = rounded > 0 ? std::max(std::ilogb(rounded), least) : least;
    const u32 code = ((exponent - least) << mantissa) + (u32)std::ldexp(rounded, mantissa - exponent);
    return code | (std::signbit(x) ? 0x80 : 0);
}
static u32 to_e4m3(float low, float high) { return to_eight(low, 3, 7, 448) | to_eight(high, 3, 7, 448) << 8; }
static u32 to_e5m2(float low, float high) { return to_eight(low, 2, 15, 57344) | to_eight(high, 2, 15, 57344) << 8; }
"""
# Threads run twice: in the second run each reads what the other threads of its warp wrote to shared memory.
AFTER = """
alignas(16) char shared[SHARED];
extern "C" void run(const Problem* p, int grid) {
    gridDim.x = grid;
    for (int block = 0; block < grid; block++)
        for (int thread = 0; thread < 2 * 32 * WARPS; thread++) {
            blockIdx.x = block, threadIdx.x = thread % (32 * WARPS);
            mxfp_quantize_transposed(*p);
        }
}
"""


class Problem(ctypes.Structure):
    """The struct Problem of transposed.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "data", "scales", "tensor_scale", "amax")),
        ("pitch", ctypes.c_uint64),
        *((name, ctypes.c_int) for name in ("rows", "columns", "tiles")),
    )


@functools.cache
def library(format: str, config: configs.CudaConfig) -> ctypes.CDLL:
    assert COMPILER is not None
    texts = [(SOURCE.parent / name).read_text(encoding="utf-8") for name in ("elements.cuh", SOURCE.name)]
    code = re.sub(r'(?m)^#(include "|pragma).*$', "", "\n".join(texts))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "transposed.so"
        words = [COMPILER, "-O1", "-shared", "-fPIC", "-std=c++17", "-ffp-contract=off", "-w"]
        words += [f"-D{define}" for define in transposed.defines(FORMATS[format], config)]
        subprocess.run([*words, "-x", "c++", "-", "-o", path], input=BEFORE + code + AFTER, text=True, check=True)
        return ctypes.CDLL(str(path))


def on_the_host(
    x: torch.Tensor, format: str, config: configs.CudaConfig, tensor_scale: float = 0.37, amax: float | None = None
) -> tuple[torch.Tensor, ...]:
    """Data and scales of x bf16 [rows, columns] and, for nvfp4, tensor_scale, which is written with an amax."""
    layout = FORMATS[format]
    rows, columns = x.shape
    blocks = layout.blocks(rows)
    data = torch.full((columns, blocks * layout.block_bytes), 0xA5, dtype=torch.uint8)
    scales = torch.full((columns, blocks), 0xA5, dtype=torch.uint8)
    scale, largest = torch.tensor(tensor_scale), torch.tensor(amax or 0.0)
    tiles = -(-columns // (64 * config.warps))
    known = largest.data_ptr() if amax is not None else 0
    places = x.data_ptr(), data.data_ptr(), scales.data_ptr(), scale.data_ptr(), known
    problem = Problem(*places, 2 * x.stride(0), rows, columns, tiles)
    library(format, config).run(ctypes.byref(problem), tiles * -(-rows // (32 * config.steps)))
    return data, scales, scale


def random_bits(rows: int, columns: int, device: str = "cpu") -> torch.Tensor:
    """bf16 in four kinds of columns: random bits, finite random bits, values of similar magnitudes, and the last with
    every 37th value a NaN, an infinity or a zero."""
    shape = rows, columns
    bits = torch.randint(-(2**15), 2**15, shape, dtype=torch.int32, device=device)
    x = bits.to(torch.int16).view(torch.bfloat16)
    mild = torch.randn(shape, device=device) * torch.exp2(torch.randint(-9, 9, shape, device=device))
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0], device=device)
    index = torch.arange(rows * columns, device=device).view(shape)
    kinds = x, torch.where(x.isfinite(), x, 1.5), mild, torch.where(index % 37 == 0, special[index % 5], mild)
    return torch.stack([kind.to(torch.bfloat16) for kind in kinds])[
        index % columns % 4, index // columns, index % columns
    ]


def every_number() -> torch.Tensor:
    """All finite bf16 values, each in a block with a value larger by one of several factors: [32, columns]."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16)
    x = x[x.isfinite()]
    x = torch.cat([x, x.new_zeros(-len(x) % 31)]).view(-1, 31)
    largest = x.float().abs().amax(1, keepdim=True)
    tops = [(largest * factor).clamp(max=3e38).to(torch.bfloat16) for factor in (1.0, 1.9, 2.0**3, 2.0**7, 2.0**17)]
    columns = torch.cat([torch.cat([top, x], 1) for top in tops])
    return torch.cat([columns, columns[: len(columns) % 2]]).t().contiguous()


def assert_same(mine: tuple[torch.Tensor, ...], exact: tuple[torch.Tensor, ...]) -> None:
    for a, b in zip(mine, exact, strict=True):
        assert torch.equal(a, b), f"{int((a != b).sum())} of {a.numel()} differ"


def expected(x: torch.Tensor, format: str, tensor_scale: float = 0.37) -> tuple[torch.Tensor, ...]:
    given = {"tensor_scale": torch.tensor(tensor_scale, device=x.device)} if format == "nvfp4" else {}
    return mxfp_reference(x, format, dim=0, **given)[:2]


@ON_THE_HOST
@EVERY
def test_every_number_of_bf16_on_the_host(format: str) -> None:
    x = every_number()
    assert_same(on_the_host(x, format, configs.CudaConfig(1, 1))[:2], expected(x, format))


@ON_THE_HOST
@EVERY
@pytest.mark.parametrize("config", [configs.CudaConfig(1, 2), configs.CudaConfig(2, 4), configs.CudaConfig(8, 1)])
def test_every_size_on_the_host(format: str, config: configs.CudaConfig) -> None:
    """Rows that end within an iteration, within a tile and at its end; columns that end within a warp and a CTA."""
    for rows, columns in ((1, 2), (32, 64), (31, 66), (129, 128), (224, 190), (256, 318), (300, 64)):
        rows += 16 if format == "nvfp4" and -(-rows // 16) % 2 else 0
        x = random_bits(rows, columns + 6)[:, :columns]
        assert_same(on_the_host(x, format, config)[:2], expected(x, format))


@ON_THE_HOST
def test_the_scale_of_the_tensor_on_the_host() -> None:
    x, config = random_bits(96, 70), configs.CudaConfig(2, 1)
    for scale in (1e-3, 1e5, 2.0**-120, 2.0**-117, 0.0, -1.0, float("inf"), float("nan")):
        assert_same(on_the_host(x, "nvfp4", config, scale)[:2], expected(x, "nvfp4", scale))
    kept = x.isfinite()
    for factor in (0.0, 1e-38, 1.0):
        y = torch.where(kept, (x.float() * factor).to(torch.bfloat16), x)
        amax = float(torch.where(kept, y, 0).abs().amax())
        exact = mxfp_reference(y, "nvfp4", dim=0)
        assert_same(on_the_host(y, "nvfp4", config, torch.nan, amax), exact)


def reason(**change: object) -> str | None:
    problem = dict(shape=(64, 64), strides=(1, 64), block=32, stochastic=False, dtype=torch.bfloat16, aligned=True)
    return transposed.unsupported_reason(**{**problem, "capability": HOPPER, **change})  # type: ignore[arg-type]


def test_what_it_takes() -> None:
    """Independent of the GPU present: depends on the problem, the capability, and last on the compiler."""
    for same in ({}, {"strides": (1, 70)}, {"shape": (2, 33)}, {"shape": (64, 32), "block": 16}):
        assert reason(**same) == cuda_driver.no_compiler(), same
    for change, words in (
        ({"capability": (8, 0)}, "compute capability 9.0"),
        ({"capability": (10, 0)}, "compute capability 9.0"),
        ({"dtype": torch.float16}, "bfloat16"),
        ({"stochastic": True}, "to nearest"),
        ({"strides": (64, 1)}, "other than the contiguous one"),
        ({"strides": (2, 64)}, "other than the contiguous one"),
        ({"strides": (1, 65)}, "even strides"),
        ({"shape": (63, 64)}, "even size"),
        ({"aligned": False}, "16-byte alignment"),
        ({"shape": (64, 48), "block": 16}, "2 blocks"),
        ({"shape": (2, 2**31)}, "at most 2147479552 rows"),
    ):
        assert words in str(reason(**change)), change


def test_what_auto_takes() -> None:
    assert configs.pick_backend("auto", possible=True) == "cuda"
    assert configs.pick_backend("auto", possible=False) == "triton"
    assert configs.pick_backend("triton", possible=True) == "triton"
    assert configs.pick_backend("cuda", possible=True) == "cuda"


def test_every_size_has_a_configuration() -> None:
    for rows, dim, layout in itertools.product((2, 190, 8192), (1, 100, 8192, 65536), FORMATS.values()):
        config = configs.pick_cuda_config(rows, dim, layout.width)
        assert config.steps in (1, 2, 4) and config.warps == 4
    assert configs.pick_cuda_config(8192, 8192, 8) == configs.CudaConfig(2, 4)
    assert configs.pick_cuda_config(8192, 8192, 4) == configs.CudaConfig(4, 4)
    assert configs.pick_cuda_config(256, 256, 8).steps == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU it cannot run")
def test_where_it_cannot_run_is_an_error() -> None:
    with pytest.raises(RuntimeError, match='backend="cuda" cannot run here: it needs a GPU of compute capability 9.0'):
        mxfp(torch.zeros(64, 64), dim=0, backend="cuda")


def test_an_unknown_backend_is_an_error() -> None:
    with pytest.raises(ValueError, match="backend must be one of auto, triton, cuda, got 'cutlass'"):
        mxfp(torch.zeros(64, 64, device="cuda" if torch.cuda.is_available() else "cpu"), backend="cutlass")


@pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.MISSING)
@pytest.mark.parametrize("steps", [1, 2, 4])
@EVERY
def test_it_compiles_and_does_not_spill(format: str, steps: int) -> None:
    layout = FORMATS[format]
    defines = transposed.defines(layout, configs.CudaConfig(steps, 4))
    usage = sass.inspect(nvrtc.compiled(SOURCE, "sm_90a", defines), KERNEL)
    assert usage.spills == 0 and usage.stack == 0
    assert usage.registers <= (72 if layout.width == 8 or format == "nvfp4" else 64)
    # Loads of a full and of a partial iteration. The first row exists in both, so that 63 suffice.
    assert usage.loads["LDG.32"] >= 63
    assert usage.stores["STG.64" if layout.width == 6 else "STG.128"] >= 1


def test_host_and_device_agree() -> None:
    text = (SOURCE.parent / "elements.cuh").read_text(encoding="utf-8") + SOURCE.read_text(encoding="utf-8")
    assert f"STEP = {transposed.STEP}, BLOCK = NVFP4 ? 16 : 32;" in text
    assert "PAIRS = 32, COLUMNS = 2 * PAIRS;" in text and transposed.WARP_COLUMNS == 64


@pytest.fixture
def compiler() -> None:
    if why := cuda_driver.no_compiler():
        pytest.skip(why)


def agrees(x: torch.Tensor, format: str, tensor_scale: float | None = 0.37, dim: int = 0) -> None:
    given = {}
    if format == "nvfp4" and tensor_scale is not None:
        given["tensor_scale"] = torch.tensor(tensor_scale, device=x.device)
    assert_same(mxfp(x, format, dim=dim, backend="cuda", **given), mxfp_reference(x, format, dim=dim, **given))


@ON_HOPPER
@EVERY
def test_every_number_of_bf16(compiler, format: str) -> None:
    agrees(every_number().cuda(), format)


@ON_HOPPER
@EVERY
@pytest.mark.parametrize(("steps", "warps"), list(itertools.product((1, 2, 4, 8), (1, 2, 4, 8))))
def test_every_configuration_and_size(compiler, monkeypatch, steps: int, warps: int, format: str) -> None:
    config = configs.CudaConfig(steps, warps)
    if transposed.shared_bytes(FORMATS[format], config) > 227 << 10:
        pytest.skip("more shared memory than a CTA has")
    monkeypatch.setattr(configs, "pick_cuda_config", lambda *_: config)
    for rows, columns in ((1, 2), (32, 64), (31, 66), (129, 128), (224, 190), (256, 318), (1000, 1030)):
        rows += 16 if format == "nvfp4" and -(-rows // 16) % 2 else 0
        agrees(random_bits(rows, columns, "cuda"), format)


@ON_HOPPER
@EVERY
def test_random_bits_of_many_blocks(compiler, format: str) -> None:
    agrees(random_bits(4096, 1024, "cuda"), format)


@ON_HOPPER
@EVERY
def test_layouts(compiler, format: str) -> None:
    """Columns of a wider tensor, a transposed one along its last dimension, an expanded row, leading dimensions."""
    wide = random_bits(160, 400, "cuda")
    for x in (wide[:, 8:200], wide[32:], wide[::2][:64], wide[:1].expand(64, 400)):
        agrees(x, format)
    agrees(wide.t(), format, dim=-1)
    agrees(wide.view(160, 20, 20), format)


@ON_HOPPER
def test_the_scale_of_the_tensor(compiler) -> None:
    x = random_bits(256, 512, "cuda")
    for scale in (1e-3, 1e5, 2.0**-120, 0.0, float("inf"), float("nan"), None):
        agrees(x, "nvfp4", scale)
    agrees(x[:, 8:200], "nvfp4", None)
    agrees(torch.zeros_like(x), "nvfp4", None)


@ON_HOPPER
@EVERY
def test_auto_gives_the_same_bits(compiler, format: str) -> None:
    """Also where CUDA C++ does not support them: an odd number of columns, unaligned x, an odd number of blocks."""
    wide = random_bits(208, 300, "cuda")
    for x in (wide, wide[:, :299], wide[:, 1:], wide[:, 2:], wide[:40]):
        assert_same(mxfp(x, format, dim=0), mxfp(x, format, dim=0, backend="triton"))
        assert_same(mxfp(x, format, dim=0), mxfp_reference(x, format, dim=0))
    with pytest.raises(RuntimeError, match="it requires a dim other than the contiguous one"):
        mxfp(wide[:, :299], format, dim=0, backend="cuda")


@ON_HOPPER
@pytest.mark.parametrize("format", ["mxfp8_e4m3", "mxfp4"])
def test_more_than_two_to_the_31_elements(compiler, format: str) -> None:
    x = torch.randn(2**31 // 8192 + 130, 8192, device="cuda", dtype=torch.bfloat16)
    data, scales = mxfp(x, format, dim=0, backend="cuda")
    for part in (slice(0, 64), slice(-64, None)):
        assert_same((data[part], scales[part]), mxfp_reference(x[:, part], format, dim=0))
