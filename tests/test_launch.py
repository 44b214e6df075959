"""parts/launch.py and parts/cuda_driver.py without a GPU: Triton's kernels, its launcher and libcuda are replaced.

They are imported as rmsnorm's copies, which tests/test_vendor.py holds equal to the parts and to all others.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.rmsnorm import cuda_driver, launch

META = b"packed metadata"
FUNCTION = 77  # the driver's handle of a kernel


# --- Launch of a Triton kernel -------------------------------------------------------------------------------------


class Runner:
    """A compiled kernel's launcher: notes what it is called with, and what its `launch` is."""

    launch_cooperative_grid, launch_pdl = False, True

    def __init__(self, scratch: int = 0) -> None:
        self.global_scratch_size, self.profile_scratch_size = scratch, 0
        self.called, self.launched = [], []

    def __call__(self, *arguments) -> None:
        self.called.append(arguments)

    def launch(self, *arguments) -> None:
        self.launched.append(arguments)


class Kernel:
    """What `Launch` uses of a JITFunction."""

    arg_names = ("x_ptr", "y_ptr", "rows", "BLOCK")

    def __init__(self, compiled: object) -> None:
        self.compiled, self.pre_run_hooks, self.through_triton = compiled, [], []

    def __getitem__(self, grid):
        def run(*arguments, **options):
            self.through_triton.append((grid, arguments, options))
            return self.compiled

        return run


def a_kernel(scratch: int = 0) -> tuple[Kernel, Runner]:
    runner = Runner(scratch)
    return Kernel(SimpleNamespace(function=FUNCTION, packed_metadata=META, run=runner)), runner


def a_launch(kernel: Kernel, device: str = "cuda:0") -> launch.Launch:
    return launch.Launch(kernel, (4, 2), torch.device(device), (128,), BLOCK=32, num_warps=4)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Two devices, of which 0 is the current one; the stream of device n is 1000 + n."""
    state = SimpleNamespace(current=0, entered=[])

    @contextlib.contextmanager
    def device(index):
        before, state.current = state.current, index
        state.entered.append(index)
        yield
        state.current = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: state.current)
    for module, stream in ((launch, "raw_stream"), (cuda_driver, "_raw_stream")):
        monkeypatch.setattr(module, "_current_device", lambda: state.current)
        monkeypatch.setattr(module, stream, lambda index: 1000 + index)
    monkeypatch.setattr(launch, "_TRITON", "3.7")
    return state


def test_the_first_launch_compiles_and_later_ones_are_held(machine) -> None:
    kernel, runner = a_kernel()
    run = a_launch(kernel)
    run("x", "y")
    assert kernel.through_triton == [((4, 2), ("x", "y", 128), {"BLOCK": 32, "num_warps": 4})]
    assert runner.called == []
    run("z", None)
    assert len(kernel.through_triton) == 1
    # Grid, stream, kernel, metadata, no launch metadata, no hooks, then every parameter, constexprs too.
    assert runner.called == [(4, 2, 1, 1000, FUNCTION, META, None, None, None, "z", None, 128, 32)]


@pytest.mark.parametrize("scratch", [0, 64])
def test_triton_3_6_is_called_below_its_look_for_scratch_memory(scratch, machine, monkeypatch) -> None:
    monkeypatch.setattr(launch, "_TRITON", "3.6")
    kernel, runner = a_kernel(scratch)
    run = a_launch(kernel)
    run("x", "y")
    run("x", "y")
    hooks = (META, None, None, None)
    if scratch:  # then it has to look
        assert runner.called == [(4, 2, 1, 1000, FUNCTION, *hooks, "x", "y", 128, 32)]
        assert runner.launched == []
    else:
        assert runner.called == []
        assert runner.launched == [(4, 2, 1, 1000, FUNCTION, False, True, None, None, *hooks, "x", "y", 128, 32)]


def test_the_launcher_of_this_triton_takes_what_a_held_launch_gives(machine, monkeypatch) -> None:
    """Its own `__call__` ends in the same launch: from what is given here, and as Triton calls it."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    version = ".".join(triton.__version__.split(".")[:2])
    if version not in launch._KNOWN:
        pytest.skip(f"launches of Triton {version} are left to Triton")
    monkeypatch.setattr(launch, "_TRITON", version)

    class Real(Runner):
        __call__ = driver.CudaLauncher.__call__
        num_ctas, global_scratch_align, profile_scratch_align = 1, 1, 1
        arg_annotations, kernel_signature = "annotations", "signature"

    runner = Real()
    kernel = Kernel(SimpleNamespace(function=FUNCTION, packed_metadata=META, run=runner))
    run = a_launch(kernel)
    run("x", "y")
    run("x", "y")
    runner(4, 2, 1, 1000, FUNCTION, META, None, None, None, "x", "y", 128, 32)
    held, by_triton = runner.launched
    assert held == by_triton


def test_hooks_of_a_profiler_hear_of_every_launch(machine) -> None:
    kernel, runner = a_kernel()
    run, hook = a_launch(kernel), lambda metadata: None
    run("x", "y")
    for chain in (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook):
        through = len(kernel.through_triton)
        chain.add(hook)
        try:
            run("x", "y")
        finally:
            chain.remove(hook)
        assert len(kernel.through_triton) == through + 1
        run("x", "y")
        assert len(kernel.through_triton) == through + 1
    kernel.pre_run_hooks.append(hook)
    run("x", "y")
    assert len(kernel.through_triton) == 4
    assert len(runner.called) == 2


def test_a_hook_that_was_there_first_is_gone_later(machine) -> None:
    kernel, runner = a_kernel()
    run = a_launch(kernel)
    kernel.pre_run_hooks.append(lambda: None)
    run("x", "y")
    kernel.pre_run_hooks.clear()
    run("x", "y")
    assert (len(kernel.through_triton), len(runner.called)) == (1, 1)


def test_an_unknown_triton_launches_by_itself(machine, monkeypatch) -> None:
    monkeypatch.setattr(launch, "_TRITON", "9.9")
    kernel, runner = a_kernel()
    run = a_launch(kernel)
    for _ in range(3):
        run("x", "y")
    assert len(kernel.through_triton) == 3
    assert runner.called == runner.launched == []


@pytest.mark.parametrize("compiled", [None, SimpleNamespace(function=object())])
def test_what_has_no_handle_is_not_held(compiled, machine) -> None:
    """As the interpreter, which returns nothing, and the ahead-of-time build."""
    kernel = Kernel(compiled)
    run = a_launch(kernel)
    run("x", "y")
    run("x", "y")
    assert len(kernel.through_triton) == 2


def test_tensors_of_the_cpu_go_through_triton(machine) -> None:
    kernel, runner = a_kernel()
    run = a_launch(kernel, "cpu")
    run("x", "y")
    run("x", "y")
    assert len(kernel.through_triton) == 2
    assert runner.called == []


def test_the_interpreter_takes_no_tensors_that_a_compiled_kernel_would_not(machine) -> None:
    kernel, _ = a_kernel()
    start, row = a_launch(kernel, "cpu"), torch.zeros(9)
    start(row, None)
    start(torch.ones(9), None)
    for other, more in ((row[1:], None), (row.double(), None), (row, row)):
        with pytest.raises(AssertionError, match="compiled for .*, called with"):
            start(other, more)


def test_a_launch_goes_to_its_own_device(machine) -> None:
    kernel, runner = a_kernel()
    run = a_launch(kernel, "cuda:1")
    run("x", "y")
    run("x", "y")
    assert machine.entered == [1, 1]
    assert machine.current == 0
    assert [arguments[3] for arguments in runner.called] == [1001]
    machine.current = 1
    run("x", "y")
    assert machine.entered == [1, 1]


# --- lean, signature, Plans ----------------------------------------------------------------------------------------


class Sub(torch.Tensor):
    pass


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def asked(transform) -> bool:
    """What `lean` says of the argument of a function that `transform` runs."""
    answers = []

    def f(x):
        answers.append(launch.lean(x))
        return x.sum() * 2

    transform(f)
    return all(answers)


def test_plain_tensors_are_lean() -> None:
    x = torch.randn(2, 3)
    assert launch.lean(x, None, torch.nn.Parameter(x), x.t(), x[1:])
    assert launch.lean(torch.nn.Parameter(x))
    with torch.no_grad():
        assert launch.lean(x)
    with torch.inference_mode():
        assert launch.lean(torch.randn(3))
    with torch.autocast("cpu", torch.bfloat16):
        assert launch.lean(x)


NEGATED = torch.randn(3, dtype=torch.complex64).conj().imag


@pytest.mark.parametrize("make", [lambda: NEGATED, lambda: torch.ones(3).as_subclass(Sub), lambda: fake()])
def test_other_tensors_are_not_lean_wherever_they_stand(make) -> None:
    x, other = torch.ones(3), make()
    assert not launch.lean(other)
    assert not launch.lean(x, other)
    assert not launch.lean(x, None, x, other)


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


@pytest.mark.parametrize("mode", [Functions, Dispatches, forward_ad.dual_level, lambda: torch.device("cpu")])
def test_no_call_is_lean_under(mode) -> None:
    x = torch.ones(3)
    with mode():
        assert not launch.lean(x)
    assert launch.lean(x)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.func.vmap(f)(torch.ones(2, 3)),
        lambda f: torch.func.grad(f)(torch.ones(3)),
        lambda f: torch.func.functionalize(f)(torch.ones(3)),
        lambda f: torch.jit.trace(f, torch.ones(3), check_trace=False),
    ],
    ids=["vmap", "grad", "functionalize", "trace"],
)
def test_no_transformed_call_is_lean(transform) -> None:
    assert not asked(transform)
    assert asked(lambda f: f(torch.ones(3)))


def test_batches_of_gradients_are_not_lean() -> None:
    answers = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            answers.append((launch.lean(grad), launch.lean(torch.ones(3), grad)))
            return 2 * grad

    x = torch.ones(3, requires_grad=True)
    torch.autograd.grad(Double.apply(x), x, torch.eye(3), is_grads_batched=True)
    Double.apply(x).sum().backward()
    assert answers == [(False, False), (True, True)]


def test_compiled_and_exported_calls_are_not_lean() -> None:
    class Asks(torch.nn.Module):
        def forward(self, x):
            return x * 2 if launch.lean(x) else x * 3

    x, module = torch.ones(3), Asks()
    assert module(x)[0] == 2
    assert torch.compile(module, backend="eager", fullgraph=True)(x)[0] == 3
    assert torch.export.export(module, (x,), strict=True).module()(x)[0] == 3
    assert torch.export.export(module, (x,), strict=False).module()(x)[0] == 3


def test_a_signature_tells_apart_what_a_plan_may_depend_on() -> None:
    memory = torch.zeros(64)
    x = memory[:12].view(3, 4)
    others = [
        memory[:12].view(4, 3),
        memory[:12].view(4, 3).t(),
        memory[1:13].view(3, 4),  # off a boundary of 16 bytes
        torch.zeros(3, 4, dtype=torch.float16),
        torch.zeros(3, 4, device="meta"),
        None,
    ]
    assert launch.signature(x) == launch.signature(memory[16:28].view(3, 4))
    assert len({launch.signature(t) for t in (x, *others)}) == 1 + len(others)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> launch.Plans:
    monkeypatch.setattr(launch, "_EVERY", [])
    return launch.Plans(size=16)


def test_the_oldest_plan_goes_first(plans) -> None:
    for key in range(20):
        assert plans.keep(key, f"plan {key}") == f"plan {key}"
    assert list(plans) == list(range(4, 20))
    assert (plans.find(3), plans.find(4)) == (None, "plan 4")


def test_a_key_that_cannot_be_hashed_has_no_plan(plans) -> None:
    assert plans.find(([1, 2],)) is None


def test_every_plan_is_forgotten(plans) -> None:
    other = launch.Plans()
    plans.keep(1, "a")
    other.keep(2, "b")
    launch.forget()
    assert not plans
    assert not other


def test_plans_stay_few_with_several_threads(plans) -> None:
    threads, failed, before = 8, [], sys.getswitchinterval()

    def work(first: int) -> None:
        try:
            for key in range(2000):
                plan = plans.keep((first, key), (first, key))
                assert plan == (first, key)
                assert plans.find((first, key)) in (plan, None)
                if key % 500 == 0:
                    launch.forget()
        except BaseException as error:
            failed.append(error)

    sys.setswitchinterval(1e-6)
    try:
        running = [threading.Thread(target=work, args=(first,)) for first in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert failed == []
    assert len(plans) < plans.size + threads  # each may enter one between another's look and its entry


# --- CUDA C++: parameters, launches, contexts ----------------------------------------------------------------------

TYPES = {"P": ctypes.c_uint64, "q": ctypes.c_int64, "i": ctypes.c_int32, "I": ctypes.c_uint32, "f": ctypes.c_float}
VALUES = {"P": 0x7F0012345678, "q": -(1 << 40), "i": -7, "I": 0xFFFFFFF0, "f": 0.5}


def struct_of(letters: str) -> type[ctypes.Structure]:
    """A struct of these members, as C lays it out."""
    fields = [(f"m{n}", TYPES[letter]) for n, letter in enumerate(letters)]
    return type("Members", (ctypes.Structure,), {"_fields_": fields})


def parameters_of(members: list[str]) -> tuple[type[ctypes.Structure], tuple[tuple[int, int], ...]]:
    """All parameters of a kernel, and where the compiler puts each: like members of a struct."""
    kinds = [(f"p{n}", TYPES[m] if len(m) == 1 else struct_of(m.strip("()"))) for n, m in enumerate(members)]
    whole = type("Parameters", (ctypes.Structure,), {"_fields_": kinds})
    return whole, tuple((getattr(whole, name).offset, ctypes.sizeof(kind)) for name, kind in kinds)


@pytest.mark.parametrize(
    "members",
    [
        ["P"],
        ["i", "P"],
        ["P", "P", "q", "i", "f", "I"],
        ["f", "q", "i"],
        ["(Pi)", "i"],
        ["i", "(iPi)", "f"],
        ["(ii)", "(iii)", "P"],
        ["(if)", "i", "(Pqi)", "(f)"],
    ],
    ids="".join,
)
def test_parameters_are_packed_as_c_lays_them_out(members) -> None:
    whole, places = parameters_of(members)
    expected, values = whole(), []
    for n, letters in enumerate(members):
        inside = [VALUES[letter] for letter in letters.strip("()")]
        values += inside
        if len(letters) == 1:
            setattr(expected, f"p{n}", inside[0])
        else:
            for m, value in enumerate(inside):
                setattr(getattr(expected, f"p{n}"), f"m{m}", value)
    packed = cuda_driver._packer("".join(members), places)(*values)
    offset, size = places[-1]
    assert packed == bytes(expected)[: offset + size]


def test_places_that_the_compiler_moved_are_kept() -> None:
    """A tensor map lies on 64 bytes of the constant bank, in which parameters begin on 16: 48 bytes are left first."""
    map_ = bytes(range(128))
    packed = cuda_driver._packer("M(Pi)i", ((48, 128), (176, 16), (208, 4)))(map_, 5, -1, 9)
    assert packed[:48] == bytes(48)
    assert packed[48:176] == map_
    assert packed[176:192] == (5).to_bytes(8, "little") + b"\xff" * 4 + bytes(4)
    assert packed[192:208] == bytes(16)
    assert packed[208:] == (9).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("layout", "places"),
    [
        ("Pi", ((0, 8), (8, 8))),
        ("Pi", ((0, 8),)),
        ("P", ((0, 8), (8, 4))),
        ("(Pi)", ((0, 8), (8, 4))),
        ("M", ((0, 64),)),
        ("", ((0, 4),)),
    ],
)
def test_a_layout_of_other_parameters_is_refused(layout, places) -> None:
    with pytest.raises(ValueError, match=r"rmsnorm: the layout .* is not that of parameters of"):
        cuda_driver._packer(layout, places)


class Library:
    """libcuda: notes what is called, and answers a launch with the codes that it is given."""

    def __init__(self, codes: tuple[int, ...] = (), places: tuple[tuple[int, int], ...] = (), context: int = 0) -> None:
        self.codes, self.places, self.context, self.called, self.launches = list(codes), places, context, [], []

    def __getattr__(self, name):
        def call(*arguments) -> int:
            self.called.append((name, arguments))
            return 0

        return call

    def names(self) -> list[str]:
        return [name for name, _ in self.called]

    def cuCtxGetCurrent(self, context) -> int:
        self.called.append(("cuCtxGetCurrent", ()))
        context._obj.value = self.context
        return 0

    def cuFuncGetParamInfo(self, function, index, offset, size) -> int:
        if index.value >= len(self.places):
            return 1
        offset._obj.value, size._obj.value = self.places[index.value]
        return 0

    def cuLaunchKernel(self, *arguments) -> int:
        extra = arguments[-1]._obj
        length = ctypes.c_size_t.from_address(extra.size).value
        address = ctypes.c_void_p.from_address(ctypes.addressof(extra) + type(extra).buffer.offset).value
        assert (extra.buffer_follows, extra.size_follows, extra.end) == (1, 2, None)
        self.launches.append((arguments[:-1], ctypes.string_at(address, length)))
        self.called.append(("cuLaunchKernel", ()))
        return self.codes.pop(0) if self.codes else 0

    def cuGetErrorString(self, code, text) -> int:
        text._obj.value = b"what went wrong"
        return 0


@pytest.fixture
def library(machine, monkeypatch: pytest.MonkeyPatch):
    """Makes libcuda a `Library` with these settings."""

    def replace(**settings) -> Library:
        found = Library(**settings)
        monkeypatch.setattr(cuda_driver, "_driver", lambda: found)
        return found

    return replace


PLACES = ((48, 8), (56, 4))
PACKED = bytes(48) + (256).to_bytes(8, "little") + (3).to_bytes(4, "little")


def test_a_launch_passes_its_parameters_as_one_buffer(library, machine) -> None:
    cuda = library(places=PLACES)
    run = cuda_driver.Launch(0, FUNCTION, 132, 256, 4096, "Pi")
    run(256, 3)
    assert cuda.launches == [((FUNCTION, 132, 1, 1, 256, 1, 1, 4096, 1000, None), PACKED)]
    assert machine.entered == []
    assert cuda.names() == ["cuLaunchKernel"]


def test_a_launch_of_cuda_goes_to_its_own_device(library, machine) -> None:
    cuda = library(places=PLACES)
    cuda_driver.Launch(1, FUNCTION, 132, 256, 0, "Pi")(256, 3)
    assert machine.entered == [1]
    assert machine.current == 0
    assert cuda.launches == [((FUNCTION, 132, 1, 1, 256, 1, 1, 0, 1001, None), PACKED)]


def test_a_launch_knows_the_layout_of_its_kernel(library) -> None:
    library(places=PLACES)
    with pytest.raises(ValueError, match="the layout P is not that"):
        cuda_driver.Launch(0, FUNCTION, 1, 1, 0, "P")


def test_a_thread_without_a_context_enters_it_and_tries_again(library) -> None:
    cuda = library(codes=(201,), places=PLACES)
    cuda_driver.Launch(0, FUNCTION, 1, 32, 0, "Pi")(256, 3)
    order = ["cuLaunchKernel", "cuCtxGetCurrent", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuLaunchKernel"]
    assert cuda.names() == order
    assert cuda.launches[0] == cuda.launches[1]


@pytest.mark.parametrize(("codes", "tries"), [((700,), 1), ((201, 201), 2)])
def test_a_launch_that_fails_says_why(codes, tries, library) -> None:
    cuda = library(codes=codes, places=PLACES)
    with pytest.raises(RuntimeError, match=rf"rmsnorm: cuLaunchKernel failed: what went wrong \({codes[-1]}\)"):
        cuda_driver.Launch(0, FUNCTION, 1, 32, 0, "Pi")(256, 3)
    assert len(cuda.launches) == tries


@pytest.mark.parametrize("has_context", [False, True])
def test_who_asks_for_kernels_has_a_context_each_time(has_context, library, monkeypatch) -> None:
    """Not the first time alone, when they are loaded: another thread may have loaded them."""
    cuda = library(context=int(has_context))
    monkeypatch.setattr(cuda_driver, "_compiled", lambda source, defines: b"")
    for _ in range(2):
        cuda_driver.kernels(-1, "source.cu", ("kernel",), (f"HAS_CONTEXT={has_context}",), 0)
    assert cuda.names().count("cuModuleLoadData") == 1
    assert cuda.names().count("cuCtxSetCurrent") == (0 if has_context else 2)


def test_a_map_is_made_once_for_an_address(monkeypatch) -> None:
    made = []

    def encoded(address, *layout) -> bytes:
        made.append((address, layout))
        return f"{address}".encode()

    monkeypatch.setattr(cuda_driver, "_encoded", encoded)
    maps = cuda_driver.TensorMap("layout", 1)
    assert [maps(a) for a in (16, 32, 16, 32)] == [b"16", b"32", b"16", b"32"]
    assert made == [(16, ("layout", 1)), (32, ("layout", 1))]
    for address in range(64, 64 + 3 * cuda_driver._MAPS_KEPT):
        assert maps(address) == f"{address}".encode()
    assert len(maps._made) <= cuda_driver._MAPS_KEPT


def test_a_map_describes_its_tensor(library, monkeypatch) -> None:
    cuda = library()
    x = torch.empty(2, 1, 5, 128, dtype=torch.bfloat16)[..., :64]
    found = cuda_driver.tensor_map(x, rows=4, block_rows=16)(4096)
    assert len(found) == 128
    ((name, arguments),) = [call for call in cuda.called if call[0] == "cuTensorMapEncodeTiled"]
    buffer, kind, rank, address, sizes, strides, box, steps, *rest = arguments
    assert name == "cuTensorMapEncodeTiled"
    assert ctypes.addressof(buffer) % 64 == 0
    assert (kind, rank, address.value) == (9, 4, 4096)
    assert list(sizes) == [64, 4, 1, 2]
    assert list(strides) == [256, 16, 5 * 256]  # bytes; that of one head is arbitrary, and a multiple of 16
    assert list(box) == [64, 16, 1, 1]
    assert list(steps) == [1, 1, 1, 1]
    assert rest == [0, 3, 3, 0]  # no interleaving, a swizzle of 128 bytes, promotion to 256 in L2, zeros beyond


def test_the_address_of_nothing_is_null() -> None:
    x = torch.ones(3)
    assert cuda_driver.address(x) == x.data_ptr()
    assert cuda_driver.address(None) == 0
