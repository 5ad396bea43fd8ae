"""Compiles CUDA sources in the process by NVRTC, and keeps what was compiled on disk.

Any number of processes may do so at once, on a shared file system too: each writes a file of its own and renames it,
so that a reader finds a whole file or none.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from distscale.sweep.choice import Unavailable

__all__ = ["CACHE_SETTING", "SWEEP", "Built", "Program", "build", "cache_directory", "choose_target", "compile_for"]

CACHE_SETTING = "DISTSCALE_CACHE_DIR"
"""Environment variable: the directory of what was compiled."""

_STANDARD = "c++17"
_DIGEST_SIZE = hashlib.sha256().digest_size
_logger = logging.getLogger(__name__)


class Program(NamedTuple):
    """Kernels that are compiled together."""

    files: tuple[Path, ...]
    """All that they are made of, the source first: needed where they run."""
    kernels: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.files[0].name


_FILES = ("sweep.cu", "chunk.cuh", "packed.cuh", "sweep.h", "numerics.h")
SWEEP = Program(tuple(Path(__file__).parent / name for name in _FILES), ("sweep", "sweep_and_write", "scale"))


class Built(NamedTuple):
    """Code for one architecture."""

    code: bytes
    arch: str
    """``sm_90``: machine code for it; ``compute_90``: PTX, which the driver compiles for a newer one."""
    nvrtc: str
    """The version of the compiler."""
    origin: str
    """Where it came from, for people."""


def build(program: Program, capability: tuple[int, int]) -> Built:
    """Code of ``program`` for a GPU of a compute capability, from the cache if it is there.

    Raises:
        Unavailable: without NVRTC, for a GPU that NVRTC does not know any more, or if it finds an error.
    """
    version, known = _nvrtc()
    arch = choose_target(capability, known, version)
    directory = cache_directory()
    if directory is None:
        return Built(compile_for(program, arch), arch, version, "compiled in memory")
    path = directory / f"{_key(program, arch, version)}.bin"
    code = _read(path)
    if code is not None:
        return Built(code, arch, version, f"cached in {path.parent}")
    code = compile_for(program, arch)
    if _write(path, code):
        return Built(code, arch, version, f"compiled into {path.parent}")
    return Built(code, arch, version, "compiled in memory")


def cache_directory() -> Path | None:
    """``$DISTSCALE_CACHE_DIR``, else ``$XDG_CACHE_HOME/distscale``, else ``~/.cache/distscale``; None: no home."""
    if setting := os.environ.get(CACHE_SETTING):
        path = os.path.expanduser(setting)
    else:
        path = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "distscale")
    # A container's user may have neither $HOME nor an entry in the list of users: then "~" stays.
    return None if path.startswith("~") else Path(path)


def choose_target(capability: tuple[int, int], known: Sequence[int], version: str) -> str:
    """The architecture to compile for: the GPU's own, or the nearest older one as PTX.

    Args:
        capability: of the GPU, major and minor.
        known: architectures that NVRTC compiles for, such as 90.
        version: of NVRTC.

    Raises:
        Unavailable: if NVRTC knows only newer ones.
    """
    wanted = capability[0] * 10 + capability[1]
    if wanted in known:
        return f"sm_{wanted}"
    older = [arch for arch in known if arch < wanted]
    if not older:
        raise Unavailable(
            f"NVRTC {version} compiles for sm_{min(known)} and newer, and this GPU is sm_{wanted};"
            " install an older nvidia-cuda-nvrtc"
        )
    return f"compute_{max(older)}"


def compile_for(program: Program, arch: str, ptxas_options: Sequence[str] = (), log: object = None) -> bytes:
    """Compiles for ``sm_90`` or the like to machine code, for ``compute_90`` to PTX.

    Args:
        arch: as chosen by :func:`choose_target`.
        ptxas_options: such as ``-v``, for a report of the resources.
        log: has a ``write`` method, and receives what the compiler says.

    Raises:
        Unavailable: if the compiler finds an error.
    """
    from cuda.core import Program as Compiler
    from cuda.core import ProgramOptions

    options = ProgramOptions(
        name=program.name,
        arch=arch,
        std=_STANDARD,
        device_as_default_execution_space=True,  # NVRTC 13.0 takes lambdas for functions of the host
        include_path=sorted({str(path.parent) for path in program.files}),
        ptxas_options=list(ptxas_options) or None,
    )
    source = program.files[0].read_text(encoding="utf-8")
    try:
        compiler = Compiler(source, "c++", options)
        return bytes(compiler.compile("ptx" if arch.startswith("compute_") else "cubin", logs=log).code)
    except Exception as error:  # cuda.core's errors have no public class in common
        raise Unavailable(f"{program.name} cannot be compiled for {arch}: {error}") from error


def _nvrtc() -> tuple[str, list[int]]:
    """The version of NVRTC, and what it compiles for."""
    install = "the CUDA kernel needs NVRTC and cuda.core: pip install distscale[cuda]"
    try:
        import cuda.core  # noqa: F401  (that it is there, before anything is compiled)
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise Unavailable(f"{install} ({error})") from error
    try:
        _, major, minor = nvrtc.nvrtcVersion()
        _, known = nvrtc.nvrtcGetSupportedArchs()
    except Exception as error:  # of the loader that looks for the library, likewise
        raise Unavailable(f"{install} ({error})") from error
    return f"{major}.{minor}", list(known)


def _key(program: Program, arch: str, version: str) -> str:
    digest = hashlib.sha256(f"{arch} {version} {_STANDARD}".encode())
    for path in program.files:
        digest.update(b"\0" + path.read_bytes())
    return digest.hexdigest()


def _read(path: Path) -> bytes | None:
    """What is behind the checksum that a file begins with; None for a file that is not there or not whole."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, code = content[:_DIGEST_SIZE], content[_DIGEST_SIZE:]
    if hashlib.sha256(code).digest() == digest:
        return code
    _logger.info("%s is damaged and is compiled again", path)
    return None


def _write(path: Path, code: bytes) -> bool:
    """Whether it could be written; a directory that cannot be written to is no error."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem[:16]}.")
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        _logger.info("the compiled CUDA kernel is not kept: %s", error)
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        return False
    return True
