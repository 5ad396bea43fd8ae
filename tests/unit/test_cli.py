"""The command line: as a process by its entry point, and in this process for all that a user can get wrong."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from distscale import bench, cli, diagnose
from distscale.sweep import reference
from distscale.sweep.choice import Choice, choose
from distscale.sweep.parts import INF_BITS, Request, Swept

COMMAND = str(Path(sys.executable).with_name("distscale"))
CPU = torch.device("cpu")


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def in_process(capsys: pytest.CaptureFixture[str], *arguments: str) -> Ended:
    """What the process would end with; its messages without line breaks and the frame that rich draws around them."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["distscale", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    code, (out, err) = ended.value.code, capsys.readouterr()
    if isinstance(code, str):
        code, err = 1, err + code
    return Ended(int(code or 0), out, " ".join(err.replace("│", " ").split()))


def test_check_as_a_process() -> None:
    ended = subprocess.run([COMMAND, "check", "--json"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["passed"] is True
    assert found["versions"]["torch"] == torch.__version__
    first = found["devices"][0]
    assert (first["device"], first["faults"]) == ("cpu", [])
    assert (first["sweep"], first["why"]) == choose(CPU)[1:]
    assert len(found["devices"]) == 1 + torch.cuda.device_count()


def test_bench_as_a_process() -> None:
    ended = subprocess.run(
        [
            *(COMMAND, "bench", "--numel", "64Ki", "--tensors", "5", "--repeats", "3", "--threads", "1"),
            *("--dtype", "fp32,e4m3", "--json", "-"),
        ],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert "fp32: 65,536 elements in 5 tensors" in ended.stderr  # the table makes way for the JSON
    found = json.loads(ended.stdout)
    assert found["arguments"] == {
        "device": "cpu",
        "numel": 65536,
        "num_tensors": 5,
        "dtypes": ["fp32", "e4m3"],
        "rounds": 3,
        "threads": 1,
    }
    assert found["hardware"]["cores"] >= 1
    assert found["device"] == found["hardware"]["cpu"] != ""
    assert found["sweep"]["name"] == choose(CPU).name
    fp32, e4m3 = found["results"]
    assert (fp32["gradient_bytes"], e4m3["gradient_bytes"]) == (4 * 65536, 65536)
    moved = {key: one["bytes"] / fp32["gradient_bytes"] for key, one in fp32["measured"].items()}
    assert (moved["sweep"], moved["copy"], moved["torch_sequence"]) == (1, 2, 5)  # read, and once more where written
    for one in fp32["measured"].values():
        low, high = one["quartiles_ms"]
        assert 0 < low <= one["median_ms"] <= high
        assert len(one["samples_ms"]) == 3
        assert one["gb_per_s"] == pytest.approx(one["bytes"] / one["median_ms"] / 1e6)
    assert e4m3["measured"]["sweep"]["median_ms"] > 0
    assert e4m3["measured"]["torch_unscale"]["median_ms"] is None


def test_a_missing_extra_is_one_sentence() -> None:
    without = "import sys; sys.modules['typer'] = None; import distscale.cli"
    ended = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr == (
        'distscale: this command needs typer, which is not installed: pip install "distscale[cli]"\n'
    )


def test_check_says_what_is_in_use(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTSCALE_SWEEP", "reference")
    ended = in_process(capsys, "check")
    assert ended.code == 0
    assert "DISTSCALE_SWEEP=reference is set" in ended.out
    assert "passed" in ended.out


def test_check_reads_the_files_also_when_it_is_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    there, absent = "a.toml", "[b].toml"
    Path(there).write_text("[run]\n")
    digest = hashlib.sha256(b"[run]\n").hexdigest()
    ended = in_process(capsys, "check", "--json", there, absent)
    found = json.loads(ended.out)
    assert (ended.code, found["passed"]) == (1, False)
    assert found["files"] == {there: digest[:16], absent: None}
    assert not any(device["faults"] for device in found["devices"])
    table = " ".join(in_process(capsys, "check", there, absent).out.split())
    assert f"a.toml │ digest {digest[:8]} " in table
    assert "[b].toml │ cannot be read " in table
    good = in_process(capsys, "check", there)
    assert good.code == 0
    assert "this process is alone; started on all ranks of a job, it compares the files" in good.out


@pytest.mark.parametrize("arguments", [("check",), ("check", "--json"), ("bench",)])
def test_a_bad_setting_is_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setenv("DISTSCALE_SWEEP", "fast")
    assert in_process(capsys, *arguments) == (
        1,
        "",
        "distscale: DISTSCALE_SWEEP='fast' cannot be used: set it to native or reference, or unset it",
    )


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--numel", "10x"], 2, "'--numel': '10x' is not a number of elements; write one like 4096, 4Ki, 64Mi or 1Gi"),
        (["--numel", "0"], 2, "'0' is not a number of elements"),
        (["--dtype", "fp32,int8"], 2, "'int8' is not a dtype; write some of fp32,fp16,bf16,e4m3,e5m2"),
        (["--tensors", "0"], 2, "'--tensors'"),
        (["--repeats", "2"], 2, "'--repeats'"),
        (["--json", "/nowhere/bench.json"], 2, "'/nowhere/bench.json' cannot be written"),
        (["--json", "/tmp"], 2, "'/tmp' cannot be written: it is a folder"),
        (["--numel", "4", "--tensors", "8"], 1, "4 elements cannot be split into 8 tensors"),
        (["--numel", "16384Gi"], 1, "give a smaller --numel"),
    ],
)
def test_mistakes_are_sentences(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, sentence: str
) -> None:
    ended = in_process(capsys, "bench", *arguments)
    assert ended.code == code
    assert sentence in ended.err
    assert ended.out == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, so --device cuda is no mistake")
def test_a_missing_gpu_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    ended = in_process(capsys, "bench", "--device", "cuda")
    assert ended == (1, "", "distscale: --device cuda needs a GPU, and torch sees none here: use --device cpu")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_numbers_that_cannot_be_written(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "memory_growth", lambda *arguments: 0)
    ended = in_process(
        capsys, "bench", "--numel", "64", "--tensors", "2", "--dtype", "fp32", "--repeats", "3", "--json", "/dev/full"
    )
    assert ended.code == 1
    assert "fp32: 64 elements in 2 tensors" in ended.out
    assert ended.err == "distscale: the numbers cannot be written to /dev/full: No space left on device"


class Faulty:
    """The reference with one fault."""

    def __init__(self, fault: Callable[[Swept], Swept] = lambda swept: swept, factor: float = 1.0) -> None:
        self._fault, self._factor = fault, factor

    def takes(self, parts: Sequence[Any]) -> bool:
        return True

    def sweep(self, parts: Sequence[Any], request: Request) -> Swept:
        swept = reference.sweep(parts, request)
        for part in parts:
            if part.out is not None and self._factor != 1.0:
                part.out.mul_(self._factor)
        return self._fault(swept)

    def scale_(self, tensors: Sequence[torch.Tensor], factor: torch.Tensor, found_inf: torch.Tensor | None) -> None:
        reference.scale_(tensors, factor * self._factor, found_inf)


def fail(swept: Swept) -> Swept:
    raise RuntimeError("no such kernel image")


@pytest.mark.parametrize(
    ("backend", "fault"),
    [
        (Faulty(lambda swept: swept._replace(slots=swept.slots + 1)), "the amax of (3, -4) is not 4"),
        (Faulty(lambda swept: swept._replace(slots=swept.slots + 1)), "the amax of random values differs"),
        (Faulty(lambda swept: swept._replace(slots=swept.slots.clamp(max=INF_BITS))), "a NaN was not found"),
        (Faulty(lambda swept: swept._replace(slots=swept.slots.clamp(max=INF_BITS - 1))), "an inf was not found"),
        (Faulty(lambda swept: swept._replace(counts=swept.counts * 2)), "values that are not finite were counted"),
        (Faulty(lambda swept: swept._replace(sums=swept.sums * 1.00001)), "the norm of (3, -4) is not 5"),
        (Faulty(lambda swept: swept._replace(sums=swept.sums * 1.00001)), "the norm of random values differs"),
        (Faulty(factor=1.5), "unscaled values differ"),
        (Faulty(factor=1.5), "multiplied values differ"),
        (Faulty(fail), "RuntimeError: no such kernel image"),
    ],
)
def test_check_finds_a_faulty_sweep(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, backend: Faulty, fault: str
) -> None:
    monkeypatch.setattr(diagnose, "choose", lambda device: Choice(backend, "native", "a test"))
    ended = in_process(capsys, "check", "--json")
    assert ended.code == 1
    found = json.loads(ended.out)
    assert found["passed"] is False
    assert any(f"float32: {fault}" in line for line in found["devices"][0]["faults"])
