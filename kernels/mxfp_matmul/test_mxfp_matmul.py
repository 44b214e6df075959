"""Properties specific to mxfp_matmul: the packing of weights, the value of every code, and split-K.
The rest follows from SPEC: tests/test_specs.py."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from . import configs, mxfp_matmul, mxfp_pack, op, plans
from .bench import unpacked
from .formats import BLOCK
from .reference import E2M1, dequantized, mxfp_matmul_reference
from .sm90 import few_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
XDTYPES = (torch.float32, torch.float16, torch.bfloat16) if DEVICE == "cuda" else (torch.float32, torch.float16)
EVERY = pytest.mark.parametrize("format", BLOCK)


def weights(columns: int, depth: int, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Random data [N, K / 2] and scales [N, K / block] in the order of their elements."""
    data = torch.randint(0, 256, (columns, depth // 2), dtype=torch.uint8, device=DEVICE)
    low, high = (0x20, 0x50) if format == "nvfp4" else (120, 130)
    scales = torch.randint(low, high, (columns, depth // BLOCK[format]), dtype=torch.uint8, device=DEVICE)
    return data, scales


def one(format: str, value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"tensor_scale": torch.tensor(value, device=DEVICE)} if format == "nvfp4" else {}


@EVERY
def test_packing_moves_every_element_to_its_place(format):
    for columns, depth in ((3, 128), (5, 32), (2, 320), (1, 1024)):
        data, scales = weights(columns, depth, format)
        w, packed_scales = mxfp_pack(data, scales, format)
        assert w.is_contiguous() and packed_scales.is_contiguous()
        natural, natural_scales = unpacked(w, packed_scales)
        assert torch.equal(natural[:, : depth // 2], data) and not natural[:, depth // 2 :].any()
        kept = natural_scales[:, : scales.shape[1]]
        assert torch.equal(kept, scales if format == "mxfp4" else scales + 120)  # normal values with another bias
        table = torch.tensor([*E2M1, *(-v for v in E2M1)], device=DEVICE, dtype=torch.float64)
        elements = table[torch.stack([data & 15, data >> 4], -1).flatten(1).long()]
        if format == "mxfp4":
            scale = torch.exp2(scales.double() - 127).repeat_interleave(32, 1)
        else:
            scale = scales.view(torch.float8_e4m3fn).double().repeat_interleave(16, 1)
        assert torch.equal(dequantized(w, packed_scales, format)[:, :depth], elements * scale)


def test_words_are_in_the_order_of_fragments():
    """Thread t of a warp has rows t / 4 and t / 4 + 8, columns 2 (t % 4), the next, and those 8 further, in four
    registers: the A operand of mma.m16n8k16."""
    data, scales = weights(32, 256, "mxfp4")
    w, _ = mxfp_pack(data, scales)
    codes = torch.stack([data & 15, data >> 4], -1).flatten(1).int().cpu()
    words = w.cpu().view(torch.int32)
    for chunk, tile, half, thread, step in itertools.product((0, 1), (0, 1), (0, 1), range(32), range(4)):
        q = int(words[chunk, tile, half * 128 + thread * 4 + step])
        for number, pair in enumerate((q, q << 6, (q << 3) ^ (q << 5), (q >> 6) ^ (q << 4))):
            row = 16 * tile + thread // 4 + 8 * (number % 2)
            k = 128 * chunk + 64 * half + 16 * step + thread % 4 * 2 + 8 * (number // 2)
            for upper in (0, 1):
                bits = pair >> 16 * upper
                assert (bits >> 6 & 7) | (bits >> 12 & 8) == int(codes[row, k + upper])


def test_scales_of_nvfp4_are_kept_without_sign():
    """Stored as bits of fp16. Elements get the sign; elements of a zero scale become zeros; NaN remains NaN."""
    scales = torch.arange(256, dtype=torch.uint8, device=DEVICE)[None].repeat(3, 1)
    data = torch.randint(0, 256, (3, 256 * 8), dtype=torch.uint8, device=DEVICE)
    w, kept = mxfp_pack(data, scales, "nvfp4")
    value = scales.view(torch.float8_e4m3fn).double()
    table = torch.tensor([*E2M1, *(-v for v in E2M1)], device=DEVICE, dtype=torch.float64)
    elements = table[torch.stack([data & 15, data >> 4], -1).flatten(1).long()]
    want = elements * value.repeat_interleave(16, 1)
    torch.testing.assert_close(dequantized(w, kept, "nvfp4"), want, rtol=0, atol=0, equal_nan=True)
    natural = kept.transpose(0, 1).flatten(1)
    assert (natural[value.isnan()] == 255).all()
    usual = value.isfinite() & (value != 0)
    assert torch.equal(((natural.short() << 7).view(torch.float16) / 128)[usual].double(), value.abs()[usual])


@EVERY
@pytest.mark.parametrize("dtype", XDTYPES)
def test_every_code_times_every_scale(format, dtype):
    """A row of the identity selects a column of weights: exact where x's dtype can represent the weight."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    data = codes.repeat_interleave(16).repeat(1, 16 if format == "mxfp4" else 8).view(-1, 64)
    scales = codes.repeat(-(-data.shape[0] * (128 // BLOCK[format]) // 256))[: data.shape[0] * (128 // BLOCK[format])]
    w, packed_scales = mxfp_pack(data, scales.view(data.shape[0], -1), format)
    picked = range(0, 128, 7)
    x = torch.zeros(len(picked), 128, dtype=dtype, device=DEVICE)
    for row, k in enumerate(picked):
        x[row, k] = 1
    dense = dequantized(w, packed_scales, format)[:, list(picked)].t()
    rounded = dense.to(dtype)
    usable = rounded.isfinite().all(0) & (rounded.double() == dense).all(0)
    # One NaN or infinity in a row of w makes all its results NaN, because 0 · inf is NaN.
    whole = dequantized(w, packed_scales, format).to(dtype).isfinite().all(1)
    y = mxfp_matmul(x, w, packed_scales, format, **one(format))
    assert int((usable & whole).sum()) > 16
    assert torch.equal(y[:, usable & whole], rounded[:, usable & whole])
    assert y[:, ~whole].isnan().all()


@EVERY
@pytest.mark.parametrize("splits", [1, 2, 3, 7])
def test_k_in_any_number_of_parts(format, splits, monkeypatch):
    """Also with so many split-K partitions that the last ones are empty."""
    config = configs.Config(16, 32, 16 * 2 ** (splits % 3), splits, 8, 4, 2)
    monkeypatch.setattr(configs, "pick_config", lambda *_: config)
    for rows, columns, depth in ((3, 40, 1024), (17, 33, 640), (1, 5, 96)):
        x = torch.randn(rows, depth, device=DEVICE)
        w, scales = mxfp_pack(*weights(columns, depth, format), format)
        expected = mxfp_matmul_reference(x.double(), w, scales, format, **one(format, 0.3)).float()
        y = mxfp_matmul(x, w, scales, format, **one(format, 0.3))
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_tiles_of_many_rows_are_each_computed_once(monkeypatch):
    monkeypatch.setattr(configs, "pick_config", lambda *_: configs.Config(16, 32, 64, 1, 3, 4, 2))
    x = torch.randn(5 * 16 + 3, 64, device=DEVICE)
    w, scales = mxfp_pack(*weights(70, 64, "mxfp4"))
    expected = mxfp_matmul_reference(x.double(), w, scales).float()
    torch.testing.assert_close(mxfp_matmul(x, w, scales), expected, rtol=1e-4, atol=1e-3 * float(expected.abs().max()))


@EVERY
def test_every_second_column(format):
    """Aligned rows of whole chunks, whose elements are not contiguous."""
    x = torch.randn(3, 512, device=DEVICE)[:, ::2]
    w, scales = mxfp_pack(*weights(33, 256, format), format)
    y, dense = (mxfp_matmul(t, w, scales, format, **one(format)) for t in (x, x.contiguous()))
    assert torch.equal(y, dense)


def test_no_gradient_and_autocast_changes_nothing():
    x = torch.randn(4, 128, device=DEVICE, requires_grad=True)
    w, scales = mxfp_pack(*weights(16, 128, "mxfp4"))
    with pytest.raises(RuntimeError, match="mxfp_matmul: x must not require grad"):
        mxfp_matmul(x, w, scales)
    y = mxfp_matmul(x.detach(), w, scales)
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
        assert torch.equal(mxfp_matmul(x, w, scales), y)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (dict(x=torch.arange(128)), TypeError, "x must be a tensor of float32"),
        (dict(x=torch.tensor(1.0)), ValueError, r"x must be \[..., K\]"),
        (dict(x=torch.randn(3, 129)), ValueError, r"scales must be \[2, N, 4\]"),
        (dict(w=torch.randn(1, 1, 1024)), TypeError, "w must be a tensor of uint8"),
        (dict(w=torch.ones(8, 64, dtype=torch.uint8)), ValueError, r"w must be \[1, 1, 1024\]"),
        (dict(scales=torch.ones(1, 8, 8, dtype=torch.uint8)), ValueError, r"scales must be \[1, N, 4\]"),
        (dict(scales=torch.ones(1, 17, 4, dtype=torch.uint8)), ValueError, r"w must be \[1, 2, 1024\]"),
        (dict(format="nvfp4"), ValueError, r"scales must be \[1, N, 8\]"),
        (dict(backend="cublas"), ValueError, "backend must be one of auto, triton, cuda"),
        (dict(format="int4"), ValueError, "format must be"),
        (dict(tensor_scale=torch.tensor(1.0)), ValueError, "tensor_scale must be given with 'nvfp4' only"),
    ],
)
def test_bad_input_raises_an_error_that_names_it(change, error, words):
    good = {"x": torch.randn(3, 128), "w": torch.ones(1, 1, 1024), "scales": torch.ones(1, 8, 4)}
    good = {name: t if name == "x" else t.to(torch.uint8) for name, t in good.items()}
    arguments = {n: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for n, v in {**good, **change}.items()}
    with pytest.raises(error, match=words):
        mxfp_matmul(**arguments)


@pytest.mark.parametrize(
    ("data", "scales", "error", "words"),
    [
        (torch.ones(4, 64), torch.ones(4, 4, dtype=torch.uint8), TypeError, "data must be"),
        (torch.ones(4, 64, dtype=torch.uint8), torch.ones(4, 4), TypeError, "scales must be"),
        (torch.ones(4, 64, dtype=torch.uint8), torch.ones(4, 5, dtype=torch.uint8), ValueError, "data and scales must"),
    ],
)
def test_bad_input_of_pack_raises_an_error_that_names_it(data, scales, error, words):
    with pytest.raises(error, match=words):
        mxfp_pack(data, scales)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (8, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_size_has_a_configuration(dtype, capability):
    for rows, columns, count in itertools.product((1, 16, 17, 64, 300, 70000), (1, 100, 8192), (1, 3, 64, 1000)):
        config = configs.pick_config(rows, columns, count, dtype, capability)
        assert 1 <= config.splits <= max(1, count // 4)
        assert config.block_m * config.block_n <= 64 * 32 * config.num_warps


def test_no_gradient_behind_torch_library_either(monkeypatch):
    x = torch.randn(4, 128, device=DEVICE, requires_grad=True)
    w, scales = mxfp_pack(*weights(16, 128, "mxfp4"))
    y = mxfp_matmul(x.detach(), w, scales)
    monkeypatch.setattr(op, "lean", lambda *_: False)
    with pytest.raises(RuntimeError, match="mxfp_matmul: x must not require grad"):
        mxfp_matmul(x, w, scales)
    with torch.no_grad():
        assert torch.equal(mxfp_matmul(x, w, scales), y)


def test_rows_are_copied_only_where_their_elements_are_not_neighbours():
    x = torch.randn(6, 8, device=DEVICE)
    for given, copied in ((x, False), (x[::2, :5], False), (x[:, :1], False), (x[:, ::2], True)):
        rows = plans._rows(given)
        assert torch.equal(rows, given) and (rows.data_ptr() != given.data_ptr()) == copied
        assert rows.stride(1) == 1 or rows.shape[1] == 1


def off_boundary(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy that is not 16-byte aligned."""
    room = tensor.new_empty(tensor.numel() + 1)[1:]
    return room.view(tensor.shape).copy_(tensor)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack((tensor, tensor), -1)[..., 0]


@EVERY
@pytest.mark.parametrize(
    "of_x, of_weights",
    [
        (lambda x: x, lambda w: w),
        (lambda x: torch.cat((x, x[:, :4]), 1)[:, :-4], off_boundary),
        (lambda x: strided(x), strided),
        (lambda x: off_boundary(x), off_boundary),
        (lambda x: x.view(2, 3, -1).transpose(0, 1), lambda w: w),
    ],
    ids=["plain", "pitch", "strided", "off-boundary", "leading"],
)
def test_what_the_product_of_few_rows_is_given(format, of_x, of_weights, monkeypatch):
    """Replaces few_rows.cu, which needs Hopper. Checks rows that TMA can read and contiguous, aligned weights."""

    def launch(like, columns, given_format, config):
        assert like.dim() == 2 and few_rows.in_place(like) and (columns, given_format) == (32, format)

        def run(x, w, scales, tensor_scale, y):
            assert few_rows.in_place(x.view(like.shape) if x.is_contiguous() else x)
            assert all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (w, scales, y))
            rest = {} if tensor_scale is None else {"tensor_scale": tensor_scale}
            y.view(len(like), 32).copy_(mxfp_matmul_reference(x.reshape(like.shape), w, scales, format, **rest))

        return run

    monkeypatch.setattr(few_rows, "unsupported_reason", lambda *_: None)
    monkeypatch.setattr(few_rows, "launch", launch)
    if DEVICE == "cpu":
        properties = SimpleNamespace(multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    x = of_x(torch.randn(6, 128, device=DEVICE))
    w, scales = (of_weights(t) for t in mxfp_pack(*weights(32, 128, format), format))
    want = mxfp_matmul_reference(x, w, scales, format, **one(format, 0.3))
    for _ in range(2):  # a call that creates the plan, and one that finds it in the cache
        y = mxfp_matmul(x, w, scales, format, **one(format, 0.3), backend="cuda")
        torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())
        assert y.is_contiguous()


@pytest.mark.parametrize("format", BLOCK if DEVICE == "cuda" else ["mxfp4"])
def test_weights_unpacked_into_memory(format, monkeypatch):
    """K that ends within a chunk, and leading dimensions. On a CPU torch.mm does not support out_dtype."""
    monkeypatch.setattr(configs, "pick_dense", lambda *problem: True)
    w, scales = mxfp_pack(*weights(41, 160, format), format)
    x = torch.randn(2, 5, 160, device=DEVICE).half()
    y = mxfp_matmul(x, w, scales, format, **one(format, 0.37))
    want = mxfp_matmul_reference(x.double(), w, scales, format, **one(format, 0.37))
    torch.testing.assert_close(y.double(), want, rtol=2e-3, atol=2e-3 * want.abs().max().item())
    again = mxfp_matmul(x, off_boundary(w), strided(scales), format, **one(format, 0.37))
    assert torch.equal(again, y)
    assert torch.equal(mxfp_matmul(x, strided(w), scales, format, **one(format, 0.37)), y)
