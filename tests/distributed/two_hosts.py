"""Two hosts in two network namespaces, two ranks each, a slow link between. Run inside a namespace of its own:

    unshare --user --map-root-user --net python -m tests.distributed.two_hosts FOLDER

The parent lays the link, starts the ranks and prints what they found as JSON. Nothing outside the two namespaces can be
reached from inside.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HOSTS = ("near", "far")
LINK_MBIT = 800
_TIMEOUT_SECONDS = 90.0


def lay_and_run(folder: Path) -> list[object]:
    """The whole run; what each rank found."""
    first = _start(folder, 2, [])  # the far host's namespace is made with its first rank
    assert first.stdout is not None
    assert first.stdout.readline() == b"here\n"
    far = ["nsenter", "--target", str(first.pid), "--net"]
    _ip("link add near0 type veth peer name far0")
    _ip(f"link set far0 netns {first.pid}")
    for inside, name, number in (([], "near0", 1), (far, "far0", 2)):
        for command in (f"addr add 10.77.0.{number}/24 dev {name}", f"link set {name} up", "link set lo up"):
            _ip(command, inside)
        shaped = f"tc qdisc add dev {name} root tbf rate {LINK_MBIT}mbit burst 64kb latency 200ms"
        subprocess.run([*inside, *shaped.split()], check=True, timeout=10)
    ranks = [_start(folder, 0, None), _start(folder, 1, None), first, _start(folder, 3, far)]
    for process in ranks:
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.close()
        process.stdin = None
    try:
        answers = [process.communicate(timeout=_TIMEOUT_SECONDS)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait(timeout=10)
    return [json.loads(answer.splitlines()[-1]) for answer in answers]


def _start(folder: Path, rank: int, inside: list[str] | None) -> subprocess.Popen[bytes]:
    """A rank: here (None), in a namespace of its own (empty), or in that of a command."""
    prefix = [] if inside is None else inside or ["unshare", "--net"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "near0" if rank < 2 else "far0"}
    command = [*prefix, sys.executable, "-m", "tests.distributed.two_hosts", str(folder), str(rank)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _ip(command: str, inside: list[str] | None = None) -> None:
    subprocess.run([*(inside or []), "ip", *command.split()], check=True, timeout=10)


def be_a_rank(folder: Path, rank: int) -> object:
    """Probes the links, then dispatches in every mode, deciding by them."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from megascale_omni.groups.channel import Channel
    from megascale_omni.groups.dispatch import GroupOptions
    from megascale_omni.topology.probe import probe
    from tests.distributed.group_side import LOCAL, GroupSide, random_map

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=4, timeout=timedelta(seconds=60)
    )
    topology, missing = probe(HOSTS[rank // 2])
    channel = Channel(dist.group.WORLD)
    worst: dict[str, float] = {}
    for move in ("tokens", "pages", "auto"):
        options = GroupOptions(move=move, links=topology.link_costs(range(4)))  # type: ignore[arg-type]
        side = GroupSide(channel, options)
        worst[move] = max(side.step(random_map(20 + rank, 4 * LOCAL, seed=rank), seed=rank).values())
    dist.barrier()
    return {"topology": topology.as_mapping(), "missing": missing, "worst": worst}


def main(argv: list[str]) -> None:
    """The parent, or a rank."""
    folder = Path(argv[0])
    if len(argv) == 1:
        print(json.dumps(lay_and_run(folder)))
        return
    print("here", flush=True)
    sys.stdin.readline()
    print(json.dumps(be_a_rank(folder, int(argv[1]))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
