"""Two hosts joined by a wire, which is cut while they train, and under mpirun: network namespaces on this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
from patience import DEADLINE_S, Patient
from test_pretrain import prepare, record

from checkpoints import checkpoints_of

ROOT = Path(__file__).parents[2]
PORT = 29400
# Of the exchange, and of the ranks' first meeting, to which they do not come at the same time on a busy machine.
TIMEOUT_S = 15
# With these begin the names of the variables that are handed on to other hosts.
HANDED_ON = ("DISTSCALE", "GLOO", "MASTER", "NCCL", "OMP", "PYTHON", "TORCH")
# Called as ssh is, HOST COMMAND..., but with the environment of the caller. The host has the name of its network
# namespace, knows that of the other, and has files for itself at the path {own}.
ON_HOST = """#!/bin/sh
exec ip netns exec "$1" unshare --uts sh -c '
hostname "$1" && mount --bind {names} /etc/hosts && mount -t tmpfs none {own} && shift && exec sh -c "$*"' - "$@"
"""
AGENT = """#!/bin/sh
exec env -i HOME="$HOME" PATH=/usr/sbin:/usr/bin:/sbin:/bin {on_host} "$@"
"""


class Host(NamedTuple):
    name: str
    interface: str
    address: str
    num_ranks: int

    def ip(self, *arguments: str) -> None:
        subprocess.run(["ip", "-netns", self.name, *arguments], check=True)


def why_not() -> str:
    """Says why there can be no hosts of our making here; "" if there can."""
    if shutil.which("ip") is None:
        return "iproute2 is not installed here: there is no ip"
    name = f"distscale-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces are not allowed here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


def remove_hosts_of_killed_tests() -> None:
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    for name, process in re.findall(r"^(distscale-(\d+)-\d)\b", listed, re.M):
        if not Path(f"/proc/{process}").exists():
            subprocess.run(["ip", "netns", "delete", name], check=True)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that see each other and nothing else."""
    if reason := why_not():
        pytest.skip(reason)
    remove_hosts_of_killed_tests()
    # 10.203.0.0/24 is theirs alone: a namespace does not see the addresses of this machine.
    first, second = (
        Host(f"distscale-{os.getpid()}-{number}", f"wire{number}", f"10.203.0.{number}", num_ranks)
        for number, num_ranks in ((1, 2), (2, 1))
    )
    with ExitStack() as stack:
        for host in (first, second):
            subprocess.run(["ip", "netns", "add", host.name], check=True)
            stack.callback(subprocess.run, ["ip", "netns", "delete", host.name], check=True)
        first.ip("link", "add", first.interface, "type", "veth", "peer", second.interface, "netns", second.name)
        for host in (first, second):
            host.ip("address", "add", f"{host.address}/24", "dev", host.interface)
            host.ip("link", "set", "lo", "up")
            host.ip("link", "set", host.interface, "up")
        yield first, second


def torchrun(host: Host, head: Host, folder: Path) -> Patient:
    """Starts torchrun on a host."""
    environment = [f"GLOO_SOCKET_IFNAME={host.interface}", "PYTHONUNBUFFERED=1"]
    options = [
        *("--nnodes", "2", "--nproc-per-node", str(host.num_ranks), "--local-addr", host.address),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{head.address}:{PORT}", "--rdzv-id", "two-hosts"),
        *("--rdzv-conf", f"is_host={int(host is head)}"),
    ]
    settings = ["--set", "run.steps=100000", "--set", f"parallel.timeout_s={TIMEOUT_S}"]
    return Patient(
        [
            *("ip", "netns", "exec", host.name, "env", *environment, sys.executable, "-m", "torch.distributed.run"),
            *(*options, str(ROOT / "launch" / "pretrain.py"), "tiny.toml", *settings),
        ],
        folder,
    )


@pytest.mark.timeout(DEADLINE_S + 60)
def test_a_cut_wire_ends_every_rank_with_an_error(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    head, other = hosts
    prepare(tmp_path)
    with ExitStack() as stack:
        programs = []
        for host in hosts:
            programs.append(torchrun(host, head, tmp_path))
            stack.callback(programs[-1].close)
        programs[0].wait_for("step 12/")
        other.ip("link", "set", other.interface, "down")
        lines = [program.wait_for(r"^error: rank \d") for program in programs]
        # The first host has two ranks, and either may be the first to say it.
        lines.append(programs[0].wait_for(r"^error: rank \d"))
        for line in lines:
            # In a collective of FSDP's, mostly, or in the exchange.
            assert re.match(r"error: rank \d at step \d+: .*a peer died(, was stopped,)? or did not answer", line, re.I)
        assert sorted(int(line.split()[2]) for line in lines) == [0, 1, 2]
        # torchrun itself ends where the rendezvous is; the other one looks for it for long, and is ended here.
        assert programs[0].end() == 1
        rows = record(tmp_path / "runs" / "tiny")
        assert [row["step"] for row in rows] == list(range(len(rows)))


def ranks_on(host: Host) -> dict[str, set[str]]:
    """The ranks that mpirun has started on a host, and the environment of each, as NAME=VALUE."""
    pids = subprocess.run(["ip", "netns", "pids", host.name], check=True, capture_output=True, text=True).stdout
    ranks = {}
    for pid in pids.split():
        environ = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        if rank := next((word for word in environ if word.startswith("OMPI_COMM_WORLD_RANK=")), ""):
            ranks[rank.partition("=")[2]] = set(environ)
    return ranks


@pytest.mark.timeout(DEADLINE_S + 60)
def test_mpirun_trains_on_both_hosts_and_stops_where_no_rank_is(
    hosts: tuple[Host, Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = hosts
    prepare(tmp_path)
    (tmp_path / "own").mkdir()
    names = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in hosts)]
    (tmp_path / "names").write_text("\n".join(names) + "\n")
    on_host, agent = tmp_path / "on_host", tmp_path / "agent"
    on_host.write_text(ON_HOST.format(names=tmp_path / "names", own=tmp_path / "own"))
    agent.write_text(AGENT.format(on_host=on_host))
    for script in (on_host, agent):
        script.chmod(0o755)
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", str(agent))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "own"))
    monkeypatch.setenv("NPROC", "3")
    call = [
        *(str(on_host), first.name, f"exec {ROOT / 'launch' / 'mpirun.sh'} tiny.toml"),
        *("--set", "run.steps=100000", "--set", "train.checkpoint_every=5", "--set", f"parallel.timeout_s={TIMEOUT_S}"),
    ]

    # The fault is told to the other host, where the rank is that it strikes.
    with monkeypatch.context() as patch, ExitStack() as stack:
        patch.setenv("MPIRUN_FLAGS", f"--host {first.name}:1,{second.name}:2 --bind-to none")
        patch.setenv("DISTSCALE_FAULTS", "kill step=7 rank=2")
        program = Patient(call, tmp_path)
        stack.callback(program.close)
        program.wait_for("3 ranks on the CPU, gloo")
        program.wait_for(rf"rank 2 with PID \d+ on node {second.name}")
        assert program.end() not in (0, None)

    # All ranks are on the other host, and the request to stop comes on this one.
    for name in (*HANDED_ON, "ELSE"):
        monkeypatch.setenv(f"{name}_MARK", "x y")
    monkeypatch.setenv("MPIRUN_FLAGS", f"--host {second.name}:3 --bind-to none")
    with ExitStack() as stack:
        program = Patient([*call, "--resume"], tmp_path)
        stack.callback(program.close)
        program.wait_for("resumed runs/tiny at step 5")
        environs = ranks_on(second)
        assert (ranks_on(first), environs.keys()) == ({}, {"0", "1", "2"})
        for environ in environs.values():
            marks = {word for word in environ if "_MARK=" in word}
            assert marks == {f"{name}_MARK=x y" for name in HANDED_ON}
        program.process.terminate()
        assert f"{ROOT / 'launch' / 'mpirun.sh'} tiny.toml --resume" in program.wait_for("to continue: ")
        assert program.end() == 0, program.output
    assert len(record(tmp_path / "runs" / "tiny")) == max(checkpoints_of(tmp_path / "runs" / "tiny")) > 5
    assert not list(tmp_path.glob(".distscale-*"))
