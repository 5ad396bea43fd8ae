"""The CUDA kernels compile for every architecture without spills, and what was compiled is kept safely."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from distscale.fp8.wire_cuda import WIRE
from distscale.sweep import nvrtc
from distscale.sweep.choice import Unavailable
from downloads import download

PROGRAMS = [nvrtc.SWEEP, WIRE]
MOST_REGISTERS = {"scale": 64, "sweep": 64, "sweep_and_write": 128, "find_amax": 64, "quantize": 128, "sum_rows": 64}
"""For blocks of 256 threads, 4 or 2 of them on a multiprocessor at least."""

ROOT = Path(__file__).parents[2]
OLDEST = "13.0.88"
COMPILE = """
import ctypes, sys
for library in sys.argv[1:]:  # found before any other, since it is there
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
from cuda.bindings import nvrtc as bindings
print(*bindings.nvrtcVersion()[1:], sep=".")
from distscale.fp8.wire_cuda import WIRE
from distscale.sweep import nvrtc
for program in (nvrtc.SWEEP, WIRE):
    assert nvrtc.compile_for(program, "sm_90").startswith(b"\\x7fELF")
    print(program.name)
"""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_no_kernel_spills(program: nvrtc.Program, arch: str) -> None:
    report = io.StringIO()
    assert nvrtc.compile_for(program, arch, ["-v"], report).startswith(b"\x7fELF")
    check_report(program, report.getvalue(), arch)


@pytest.mark.timeout(300)
def test_the_oldest_nvrtc_compiles_them_too(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The one of torch 2.11. It takes a lambda for a function of the host, which later ones do not."""
    wheel = download(f"nvidia-cuda-nvrtc=={OLDEST}", f"*{OLDEST}*.whl", request.config, "--only-binary", ":all:")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(tmp_path)
    libraries = sorted(map(str, tmp_path.glob("nvidia/**/libnvrtc*.so*")), key=lambda path: "builtins" not in path)
    command = [sys.executable, "-W", "ignore", "-c", COMPILE, *libraries]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["13.0", "sweep.cu", "wire.cu"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_nvcc_compiles_it_too(program: nvrtc.Program, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("there is no nvcc here; NVRTC is what distscale uses")
    command = [nvcc, "-arch=sm_90", "-std=c++17", "-cubin", "-Xptxas", "-v", "-Werror", "all-warnings"]
    command += [f"-I{path.parent}" for path in program.files]
    command += [str(program.files[0]), "-o", str(tmp_path / "out.cubin")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check_report(program, done.stderr, "sm_90")


def check_report(program: nvrtc.Program, report: str, arch: str) -> None:
    """Of ptxas: no spills, no local memory, and registers for enough blocks on a multiprocessor."""
    assert sorted(re.findall(r"Compiling entry function '(\w+)' for '(\w+)'", report)) == [
        (name, arch) for name in sorted(program.kernels)
    ]
    for part in report.split("Compiling entry function ")[1:]:
        name = part.split("'")[1]
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in part, part
        assert "lmem" not in part and "cumulative stack" not in part, part
        (registers,) = re.findall(r"Used (\d+) registers", part)
        if arch in ("sm_90", "sm_100"):  # the others convert FP8 in more steps
            assert int(registers) <= MOST_REGISTERS[name], part


def test_a_gpu_newer_than_nvrtc_gets_ptx() -> None:
    assert nvrtc.choose_target((9, 0), [75, 80, 90], "12.0") == "sm_90"
    assert nvrtc.choose_target((10, 3), [75, 80, 90], "12.0") == "compute_90"
    assert nvrtc.choose_target((8, 7), [75, 80, 90], "12.0") == "compute_80"
    with pytest.raises(Unavailable, match=r"sm_75 and newer, and this GPU is sm_70"):
        nvrtc.choose_target((7, 0), [75, 80, 90], "13.0")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_a_library() -> None:
        raise RuntimeError("libnvrtc.so was not found")

    with monkeypatch.context() as patch:
        patch.setattr("cuda.bindings.nvrtc.nvrtcVersion", without_a_library)
        with pytest.raises(Unavailable, match=r"pip install distscale\[cuda\] \(libnvrtc.so was not found\)"):
            nvrtc.build(nvrtc.SWEEP, (9, 0))
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(Unavailable, match=r"pip install distscale\[cuda\]"):
        nvrtc.build(nvrtc.SWEEP, (9, 0))


def test_an_error_in_the_source_is_told(tmp_path: Path) -> None:
    (tmp_path / "some.cu").write_text("no kernel")
    with pytest.raises(Unavailable, match=r"(?s)some.cu cannot be compiled for sm_90.*identifier"):
        nvrtc.compile_for(nvrtc.Program((tmp_path / "some.cu",), ()), "sm_90")


# ---------------------------------------------------------------- the cache


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was compiled, by a quick compiler; the cache is in a directory that is not there yet."""
    done: list[str] = []

    def compile_for(program: nvrtc.Program, arch: str) -> bytes:
        done.append(arch)
        return f"code for {arch}".encode()

    monkeypatch.setattr(nvrtc, "compile_for", compile_for)
    monkeypatch.setenv(nvrtc.CACHE_SETTING, str(tmp_path / "a" / "cache"))
    return done


def test_what_was_compiled_is_found_again(compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, again = nvrtc.build(nvrtc.SWEEP, (9, 0)), nvrtc.build(nvrtc.SWEEP, (9, 0))
    assert first.code == again.code == b"code for sm_90" and compiled == ["sm_90"]
    assert first.origin == f"compiled into {tmp_path}/a/cache" and again.origin == f"cached in {tmp_path}/a/cache"
    nvrtc.build(nvrtc.SWEEP, (8, 0))
    assert compiled == ["sm_90", "sm_80"]
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: ("99.0", [90]))
    nvrtc.build(nvrtc.SWEEP, (9, 0))
    assert compiled == ["sm_90", "sm_80", "sm_90"]


def test_another_source_is_another_entry(tmp_path: Path) -> None:
    keys = {nvrtc._key(nvrtc.SWEEP, "sm_90", "13.0")}
    copied = nvrtc.Program(tuple(tmp_path / path.name for path in nvrtc.SWEEP.files), nvrtc.SWEEP.kernels)
    for changed in copied.files:
        for path, source in zip(copied.files, nvrtc.SWEEP.files, strict=True):
            path.write_bytes(source.read_bytes() + (b"\n" if path == changed else b""))
        keys.add(nvrtc._key(copied, "sm_90", "13.0"))
    assert len(keys) == 1 + len(copied.files)


@pytest.mark.parametrize("damage", ["cut", "emptied", "changed"])
def test_a_damaged_entry_is_replaced(
    compiled: list[str], damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nvrtc.build(nvrtc.SWEEP, (9, 0))
    (entry,) = (tmp_path / "a" / "cache").iterdir()
    whole = entry.read_bytes()
    entry.write_bytes({"cut": whole[:-1], "emptied": b"", "changed": whole[:-1] + b"!"}[damage])
    with caplog.at_level(logging.INFO, logger=nvrtc.__name__):
        assert nvrtc.build(nvrtc.SWEEP, (9, 0)).code == b"code for sm_90"
    assert "is damaged and is compiled again" in caplog.text
    assert compiled == ["sm_90", "sm_90"] and entry.read_bytes() == whole


def test_a_directory_that_cannot_be_written_to(
    compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file in its place, for the tests may run as root, whom no permission stops."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(nvrtc.CACHE_SETTING, str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.INFO, logger=nvrtc.__name__):
        built = nvrtc.build(nvrtc.SWEEP, (9, 0))
    assert built.code == b"code for sm_90" and built.origin == "compiled in memory"
    assert "the compiled CUDA kernel is not kept" in caplog.text


def test_a_full_disk_leaves_nothing_behind(
    compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert nvrtc.build(nvrtc.SWEEP, (9, 0)).origin == "compiled in memory"
    assert list((tmp_path / "a" / "cache").iterdir()) == []


def test_the_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(nvrtc.CACHE_SETTING, "/own")
    assert nvrtc.cache_directory() == Path("/own")
    monkeypatch.delenv(nvrtc.CACHE_SETTING)
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert nvrtc.cache_directory() == Path("/xdg/distscale")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert nvrtc.cache_directory() == Path("/home/me/.cache/distscale")


MANY = """
import os, sys, hashlib
from pathlib import Path
from distscale.sweep import nvrtc
print("ready", flush=True)
sys.stdin.readline()
nvrtc.compile_for = lambda program, arch: os.urandom(300_000)
built = nvrtc.build(nvrtc.SWEEP, (9, 0))
# Whoever reads while others write finds a whole file.
path = Path(sys.argv[1]) / "shared.bin"
for round in range(10):
    assert nvrtc._write(path, bytes([round]) * 1_000_000)
    code = nvrtc._read(path)
    assert code is not None and len(code) == 1_000_000 and len(set(code)) == 1
print(hashlib.sha256(built.code).hexdigest())
"""


@pytest.mark.timeout(300)
def test_many_processes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(nvrtc.CACHE_SETTING, str(tmp_path))
    command = [sys.executable, "-c", MANY, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen(command, **pipes) for _ in range(3)]  # type: ignore[call-overload]
    try:
        for rank in ranks:
            assert rank.stdout.readline() == "ready\n"
        for rank in ranks:
            rank.stdin.write("\n")
            rank.stdin.flush()
        outputs = [rank.communicate(timeout=240)[0].strip() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks)
    # Each compiled on its own, or found what another had; whoever came last is kept.
    again = nvrtc.build(nvrtc.SWEEP, (9, 0))
    assert again.origin == f"cached in {tmp_path}" and hashlib.sha256(again.code).hexdigest() in outputs
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".bin", ".bin"]
