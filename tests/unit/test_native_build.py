"""What users install: the wheel built from the source distribution, with a C++ compiler and without."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
NEEDED_AT_RUN_TIME = {"numerics.h", "sweep.h", "wire.h"} | {file.name for file in ROOT.glob("distscale/*/*.cu*")}
"""Sources: NVRTC compiles the CUDA kernels where they run."""

TRY = """
import pathlib, sys, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch, distscale.sweep
    from distscale.sweep.choice import choose
    cpu = torch.device("cpu")
    assert pathlib.Path(distscale.__file__).is_relative_to(sys.argv[1]), distscale.__file__
    for _ in range(2):
        part = distscale.sweep.Part(torch.tensor([3.0, -4.0]), 0, 1.0, False)
        swept = distscale.sweep.sweep([part], 1, torch.tensor(1.0, dtype=torch.float64), True, cpu)
        assert (swept.slots.view(torch.float32).item(), swept.sums.item()) == (4.0, 25.0)
print(choose(cpu).name)
print(*(warning.message for warning in caught if "swept" in str(warning.message)), sep="\\n")
"""


def run(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the source distribution, and the wheel that was built from it."""
    directory = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", directory, ROOT)
    return directory


def try_wheel(wheel: Path, directory: Path) -> tuple[list[str], set[str]]:
    """What a sweep with the unpacked wheel says, and what the wheel has in distscale/sweep besides Python files."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    # Not the distscale that is installed here (-S) or lies here (-P), but its dependencies.
    path = os.pathsep.join([str(directory), str(Path(np.__file__).parents[1])])
    said = run(sys.executable, "-S", "-P", "-c", TRY, directory, PYTHONPATH=path, DISTSCALE_SWEEP="").splitlines()
    return said, {file.name for file in directory.glob("distscale/**/*") if file.suffix not in (".py", "", ".typed")}


@pytest.mark.timeout(300)
def test_wheel_of_the_source_distribution(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name.startswith("distscale-")
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    said, others = try_wheel(wheel, tmp_path)
    assert said == ["native", ""]
    assert others == NEEDED_AT_RUN_TIME | {"libdistscale.so"}


@pytest.mark.timeout(300)
def test_without_a_compiler(built: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--no-deps", "--no-cache-dir"]
    log = run(*pip, "--verbose", "--wheel-dir", tmp_path / "wheel", sdist, CXX="/there/is/no/compiler")
    assert "distscale was installed without its native library" in log
    (wheel,) = (tmp_path / "wheel").iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    said, others = try_wheel(wheel, tmp_path / "unpacked")
    assert said[0] == "reference"
    (warning,) = said[1:]
    assert "install a C++17 compiler" in warning
    assert others == NEEDED_AT_RUN_TIME
