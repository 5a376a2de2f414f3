"""What can be known of the compiled kernels without a GPU: machine code, keys, tiles, refusals (O9, O36)."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import jit

import ot_newton as otn
from ot_newton.backends.select import NAMES, choose_backend, get_backend
from ot_newton.backends.triton_kernels import aot, launch
from ot_newton.backends.triton_kernels.configs import (
    DEVICE_CLASSES,
    PRECISIONS,
    KernelKey,
    TileConfig,
    candidates,
    d_bucket,
    default_config,
    device_class,
    legal,
    width_block,
)
from ot_newton.backends.triton_kernels.packing import pack

ARCHS = (80, 90, 100)
DIMS = (16, 64, 128)
KEYS = {
    "lse": lambda dim, p: KernelKey("lse", dim, False, p),
    "transport": lambda dim, p: KernelKey("transport", dim, False, p, width=1 if p == "ieee" else 64),
    "hadamard": lambda dim, p: KernelKey("hadamard", dim, False, p, width=64, rank=16),
}
SMALL = {
    "lse-d3": KernelKey("lse", 3, True),
    "transport-d3": KernelKey("transport", 3, True, width=1),
    "hadamard-d3": KernelKey("hadamard", 3, True, width=4, rank=1),
    "transport-d64-tf32x3": KernelKey("transport", 64, False, "tf32x3", width=1),
    "hadamard-any-d-tf32x3": KernelKey("hadamard", 0, False, "tf32x3", width=64, rank=16),
    "lse-d64-fp16": KernelKey("lse", 64, False, "fp16"),
    "lse-any-d": KernelKey("lse", 0, False, "ieee"),
}


@cache
def _report(key: KernelKey, arch: int) -> aot.Report:
    return aot.compile_kernel(key, default_config(key, arch), arch)


def _check(report: aot.Report) -> None:
    key, config = report.key, report.config
    assert report.stack == 0, "spills to the stack"
    assert report.local == 0, "spills to local memory"
    assert 0 < report.registers <= 255
    assert report.shared <= DEVICE_CLASSES[report.arch]
    on_tensor_cores = not key.by_coordinate and key.precision != "ieee"
    assert (report.tensor_core > 0) == on_tensor_cores
    sweeps = [loop.count("MUFU.EX2") for loop in report.sweeps]
    assert sweeps, "no loop computes exponentials"
    # one EX2 per pair; with the running maximum also one per row held, at most one row per pair. The
    # assembler may lay out several copies of a step within one jump.
    rescales = min(config.block_m, report.pairs) if key.kernel == "lse" else 0
    assert min(sweeps) == report.pairs
    for count in sweeps:
        copies = count // report.pairs
        assert copies * report.pairs <= count <= copies * (report.pairs + rescales)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("kernel", KEYS)
def test_machine_code(kernel: str, precision: str, dim: int, arch: int) -> None:
    _check(_report(KEYS[kernel](dim, precision), arch))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", SMALL)
def test_machine_code_of_special_buckets(name: str, arch: int) -> None:
    _check(_report(SMALL[name], arch))


def test_warm_sweep_at_d_3_is_bound_by_exponentials() -> None:
    """One add, three multiply-adds and one accumulation per pair, nothing else that grows with the tile."""
    report = _report(SMALL["lse-d3"], 90)
    warm = report.sweeps[0]
    assert warm.count("FFMA") == 4 * report.pairs
    assert warm.count("FADD") == report.pairs
    assert warm.count("SHFL") == 0
    assert sum(warm.instructions.values()) <= 9 * report.pairs


def test_addresses_are_64_bit() -> None:
    """Bases of tiles are computed in int64 (O16); only offsets within a tile are 32 bits wide."""
    text = _report(SMALL["transport-d3"], 90).ttir
    assert "arith.extsi" in text
    scalar = [line for line in text.splitlines() if "tt.addptr" in line and "tensor<" not in line]
    assert scalar
    assert all("i64" in line for line in scalar if "q_ptr" in line or "k_ptr" in line or "v_ptr" in line)


def test_fma_is_asked_for_by_name() -> None:
    assert TileConfig(32, 32).options["enable_fp_fusion"] is True


def _key_of(function, target: GPUTarget, **sizes: int) -> object:
    """The specialization part of the key that Triton's own launcher forms for a call."""
    backend = make_backend(target)
    bind = jit.create_function_from_signature(function.signature, function.params, backend)
    tensor = torch.zeros(64)
    given = {}
    for name in function.arg_names:
        if name.endswith("_ptr"):
            given[name] = tensor.int() if name == "trips_ptr" else tensor
        elif name in sizes:
            given[name] = sizes[name]
        elif name.isupper():
            given[name] = "ieee" if name == "PRECISION" else 1
        else:
            given[name] = 7
    return bind(**given)[1]


@pytest.mark.parametrize("kernel", ["lse", "transport", "hadamard"])
def test_sizes_never_enter_the_key(kernel: str) -> None:
    """n, m = 1, 1000, 1001, 1008 and odd pointers share one compiled kernel (O36)."""
    function, target = aot.FUNCTIONS[kernel], GPUTarget("cuda", 90, 32)
    keys = {
        str(_key_of(function, target, n=n, m=m, d=d, p=p))
        for n in (1, 1000, 1001, 1008)
        for m in (1, 1008)
        for d, p in ((64, 1), (1024, 16))
    }
    assert len(keys) == 1
    assert str(_key_of(function, target, DIM=16)) != str(_key_of(function, target, DIM=32))


def test_one_bucket_per_range_of_d() -> None:
    for dtype in (torch.float32, torch.float64):
        for d in (1, 3, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 128, 129, 700, 1025):
            bucket = d_bucket(d, dtype)
            assert bucket.stored >= d
            assert bucket.dim in (0, bucket.stored)
    assert d_bucket(65, torch.float32) == d_bucket(128, torch.float32)
    assert d_bucket(700, torch.float32).stored == 704
    assert [width_block(p, torch.float32) for p in (1, 2, 3, 5, 17, 65)] == [1, 2, 4, 16, 32, 64]
    assert width_block(65, torch.float64) == 4


def test_half_clouds_do_not_overflow() -> None:
    """1/eps is in k: a power of two moves to q, exactly, before both are rounded to fp16."""
    q, k = torch.randn(1, 7, 16), 3e6 * torch.randn(1, 9, 16)
    packed = pack(q, k, "fp16")
    assert packed.q.dtype == packed.k.dtype == torch.float16
    found, exact = packed.q.double() @ packed.k.double().mT, q.double() @ k.double().mT
    limit = 2 * 2.0**-11 * (q.double().abs() @ k.double().abs().mT)
    assert bool(((found - exact).abs() <= limit).all())
    assert pack(q, k, "tf32").k.dtype == torch.float32


def test_every_tile_obeys_the_law() -> None:
    for key, config, arch in aot.table():
        assert legal(key, config, arch) == ""
        assert len({*candidates(key, arch)}) == len(candidates(key, arch)) > 1
        assert candidates(key, arch)[0] == config
    key = KernelKey("lse", 64, False, "tf32x3")
    assert "shared memory" in legal(key, TileConfig(128, 128, 64, warps=8, stages=3), 80)
    assert "divide" in legal(KernelKey("lse", 16, False), TileConfig(64, 64, 64), 80)
    assert "FMA" in legal(KernelKey("lse", 3, True), TileConfig(64, 64, 16), 80)
    assert "registers" in legal(KernelKey("transport", 3, True, width=4), TileConfig(128, 128), 80)


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"block_m": 48}, "block_m.*48"),
        ({"block_n": 8}, "block_n.*8"),
        ({"block_d": 8}, "block_d.*8"),
        ({"warps": 3}, "warps.*3"),
        ({"stages": 0}, "stages.*0"),
        ({"registers": 400}, "registers.*400"),
    ],
)
def test_bad_tiles_are_refused(bad: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        TileConfig(**{"block_m": 64, "block_n": 64, **bad})


def test_old_gpu_is_refused_with_advice() -> None:
    assert [device_class(c) for c in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))] == [80, 80, 90, 100, 80]
    with pytest.raises(ValueError, match="7.5.*torch_tiles"):
        device_class((7, 5))


def test_cpu_tensors_are_refused_with_advice() -> None:
    problem = otn.OTProblem(torch.randn(3, 2), torch.randn(4, 2), eps=1.0)
    with pytest.raises(ValueError, match="triton.*CUDA.*cpu"):
        otn.sinkhorn(problem, backend="triton")


def test_names_and_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name in NAMES if name.startswith("triton")]
    assert names == ["triton", *(f"triton:{precision}" for precision in PRECISIONS[1:])]
    assert all(get_backend(name).name == name for name in names)
    cuda = torch.device("cuda")
    assert choose_backend("auto", cuda, 10**5, 10**5) == "torch_tiles"  # no GPU here
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, chosen in (((7, 5), "torch_tiles"), ((9, 0), "triton")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None, c=capability: c)
        assert choose_backend("auto", cuda, 10**5, 10**5) == chosen
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert choose_backend("auto", cuda, 10**5, 10**5) == "torch_tiles"
    with pytest.raises(ValueError, match="triton.*install"):
        get_backend("triton")


def test_tuning_times_each_key_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opt in; the fastest tile wins, one that does not fit is passed over, the answer is kept."""
    key = KernelKey("lse", 3, True)
    slow, fast, broken = TileConfig(32, 64), TileConfig(64, 64), TileConfig(128, 128)
    timed: list[TileConfig] = []

    def bench(run, **_: int) -> float:
        run()
        if timed[-1] == broken:
            raise triton.runtime.errors.OutOfResources(2, 1, "shared memory")
        return 1.0 if timed[-1] == fast else 2.0

    monkeypatch.setattr(triton.testing, "do_bench", bench)
    monkeypatch.setattr(launch, "candidates", lambda key, kind: (slow, broken, fast))
    monkeypatch.setattr(launch, "_tuned", {})
    launcher = launch._Launcher(torch.device("cpu"), 90, autotune=True)
    assert launcher.config(key, timed.append) == fast
    assert launcher.config(key, timed.append) == fast
    assert timed == [slow, broken, fast]
    assert launch._Launcher(torch.device("cpu"), 90, autotune=False).config(key, timed.append) != fast
    monkeypatch.setenv("OT_NEWTON_AUTOTUNE", "1")
    assert launch.TritonBackend().autotune
    monkeypatch.delenv("OT_NEWTON_AUTOTUNE")
    assert not launch.TritonBackend().autotune


def test_table_and_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    key = SMALL["lse-d3"]
    monkeypatch.setattr(
        aot, "table", lambda archs: [(key, default_config(key, arch), arch) for arch in archs]
    )
    lines: list[str] = []
    aot.kernels_command([80, 90], lines.append)
    assert lines[0].startswith("| kernel | d | precision |")
    starts = [f"| lse | 3 | ieee | float32 |  | sm_{arch} | 32 x 64 x 1 | 4 |" for arch in (80, 90)]
    assert all(line.startswith(start) for line, start in zip(lines[2:], starts, strict=True))
    assert all(line.count("|") == lines[0].count("|") for line in lines)
    with pytest.raises(ValueError, match="arch must be among 80, 90, 100, got .70"):
        aot.kernels_command([70], lines.append)


def test_importing_the_package_leaves_triton_alone() -> None:
    code = "import sys, ot_newton, ot_newton.backends.select; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
