"""One run of a script of Megatron-LM, in processes of its own; what it wrote into TensorBoard."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 600.0
Launcher = Literal["megatron_ext", "none", "control"]
"""`none`: the script alone; on a machine without an accelerator with what lets it run on a CPU, and no more. `control`:
the same, with each expert computed in two halves."""
_ALONE = "scripts.megatron_lm_runs.alone"
_MODULES: dict[Launcher, tuple[str, ...]] = {
    "megatron_ext": ("megatron_ext",),
    "none": (_ALONE,),
    "control": (_ALONE, "--in-halves"),
}


@dataclass(frozen=True)
class Run:
    """What a run ended with."""

    status: int
    output: str
    scalars: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """By TensorBoard tag, in order of iterations; fp32 as they were."""

    @property
    def losses(self) -> Sequence[float]:
        """Of every iteration."""
        return self.scalars.get("lm loss", ())

    @property
    def error(self) -> str:
        """The last error in the output; the whole output's end where there is none."""
        found = [line for line in self.output.splitlines() if re.match(r"(\[rank\d+\]: ?)?\w*(Error|error)\b", line)]
        return found[-1] if found else self.output[-2000:]


class RunFailed(RuntimeError):
    """A run ended with a status other than 0."""


def checkout(path: Path) -> Path:
    """The checkout at ``path``.

    Raises:
        ValueError: it is none.
    """
    if not (path / "megatron" / "training").is_dir():
        raise ValueError(f"{path} is no checkout of Megatron-LM: it has no megatron/training")
    return path.resolve()


def release(path: Path) -> str:
    """The version that a checkout names."""
    text = (path / "megatron" / "core" / "package_info.py").read_text(encoding="utf-8")
    found = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", text, flags=re.M))
    return ".".join(found[part] for part in ("MAJOR", "MINOR", "PATCH"))


def revision(path: Path) -> dict[str, str | None]:
    """The release that a checkout names, and its commit where it has a history."""
    found = checkout(path)
    asked = subprocess.run(["git", "-C", str(found), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {"release": release(found), "commit": asked.stdout.strip() if asked.returncode == 0 else None}


def run(
    script: Path,
    flags: Sequence[str],
    *,
    ranks: int,
    launcher: Launcher = "megatron_ext",
    timeout_seconds: float = TIMEOUT_SECONDS,
    tensorboard: bool = True,
) -> Run:
    """Runs ``script`` under ``torchrun`` and returns what it ended with, whatever that is.

    Raises:
        subprocess.TimeoutExpired: it did not end in time; all of its processes are ended.
    """
    with tempfile.TemporaryDirectory(prefix="megascale-run-") as folder:
        given = list(flags)
        if tensorboard:
            given += ["--tensorboard-dir", folder]
        command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d"]
        command += ["--rdzv-endpoint", "localhost:0", "--nproc_per_node", str(ranks)]
        command += ["-m", *_MODULES[launcher], str(script)]
        status, output = _call(command + given, timeout_seconds)
        return Run(status, output, _scalars(Path(folder)) if tensorboard and not status else {})


def _call(command: Sequence[str], timeout_seconds: float) -> tuple[int, str]:
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(p for p in (str(ROOT), environment.get("PYTHONPATH", "")) if p)
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # stock demands it of tensor parallelism
    # Stock's Makefile asks python3 and python3-config, which a virtual environment lacks: both must be this Python's.
    folders = [str(Path(sys.executable).parent), str(Path(sys.base_prefix) / "bin"), environment.get("PATH", "")]
    environment["PATH"] = os.pathsep.join(folders)
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = process.communicate(timeout=timeout_seconds)
    except BaseException:
        process.terminate()  # torchrun ends its workers
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        raise
    return process.returncode, output


def _scalars(folder: Path) -> dict[str, list[float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
