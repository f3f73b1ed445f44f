"""``python -m megatron_ext SCRIPT FLAGS``: runs a script of Megatron-LM, unmodified, with MegaScale's flags added."""

from __future__ import annotations

import ast
import multiprocessing
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, TracebackType
from typing import NoReturn

from megatron_ext.megatron_lm.hooks import MisuseError

FAILED, MISUSED, INTERRUPTED = 1, 2, 130
USAGE = "usage: torchrun --nproc_per_node N -m megatron_ext MEGATRON_LM/pretrain_gpt.py FLAGS [--megascale ...]"


def main(argv: Sequence[str], namespace: dict[str, object]) -> int:
    """Runs ``argv[0]`` in ``namespace`` (that of ``__main__``) as Python would; returns the exit status.

    A mistake on the command line is told once (see :func:`_speaks`) and ends every rank with status 2. Any other error
    is told by the rank that it struck, and ends its process at once with status 1: a normal exit would wait for
    messages that other ranks no longer send.
    """
    try:
        script = check_script(argv)
        code = prepare(script, argv)
        namespace.update(__file__=str(script), __cached__=None)
        exec(code, namespace)
        _check_used(argv)
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit:
        raise
    except BaseException as error:
        _fail(error)
    return 0


def check_script(argv: Sequence[str]) -> Path:
    """The script that is to be run.

    Raises:
        MisuseError: none is named, it is not there, it is no Megatron-LM script, or a flag of ours is misspelt.
    """
    if not argv or argv[0].startswith("-"):
        raise MisuseError(f"no script is named before the flags. {USAGE}")
    script = Path(argv[0])
    if not script.is_file():
        what = "is a folder" if script.is_dir() else "does not exist"
        raise MisuseError(f"the script {script} {what}. {USAGE}")
    script = script.resolve()
    try:
        imported = _imports(script)
    except (SyntaxError, ValueError) as error:
        raise MisuseError(f"{script} is no Python script: {error}") from error
    in_checkout = (script.parent / "megatron" / "training").is_dir()  # main's pretrain_mamba.py imports a neighbour
    if not in_checkout and not any(name.partition(".")[0] == "megatron" for name in imported):
        raise MisuseError(f"{script} is no script of Megatron-LM: it imports nothing of megatron")
    return script


def _imports(script: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(script.read_bytes(), str(script))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found


def prepare(script: Path, argv: Sequence[str]) -> CodeType:
    """Sets ``sys.argv`` and ``sys.path`` as Python would for ``script``, installs the hooks, and compiles it.

    Raises:
        MisuseError: ``megatron.training`` is not importable beside the script.
    """
    sys.argv = [str(script), *argv[1:]]
    sys.path.insert(0, str(script.parent))
    from megatron_ext.megatron_lm.arguments import check_spelling
    from megatron_ext.megatron_lm.imports import checkout_root
    from megatron_ext.megatron_lm.install import install
    from megatron_ext.megatron_lm.reword import reword

    check_spelling(argv[1:])
    root = checkout_root()
    if root is None:
        raise MisuseError(
            f"Megatron-LM is not importable: there is no megatron/training beside {script} nor on PYTHONPATH. "
            "Run the script where it lies in its checkout, or put the checkout on PYTHONPATH"
        )
    finder = install(root)
    assert finder is not None
    code = compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    return code if finder.rewords is None else reword(code)


def _check_used(argv: Sequence[str]) -> None:
    from megatron_ext.megatron_lm.arguments import wants
    from megatron_ext.megatron_lm.session import current

    if wants(argv) and current() is None:
        raise MisuseError("--megascale had no effect: the script built no model through megatron.training")


def end_scripts_alike() -> None:
    """Errors of a script whose first line imports the plug-in end its process as :func:`main` does.

    Before the ranks have met, an error that is no mistake of the user's is left to Python: it may be any script's.
    """
    before = sys.excepthook

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, MisuseError) or (isinstance(error, Exception) and _have_met()):
            _fail(error)
        before(kind, error, trace)

    sys.excepthook = uncaught


def _fail(error: BaseException) -> NoReturn:
    output = sys.__stderr__  # torch's hook for errors of ranks keeps sys.stderr back until it is over
    if not isinstance(error, MisuseError):
        traceback.print_exception(_without_launcher(error), file=output)
        _leave(FAILED)
    rank = os.environ.get("RANK", "0")
    if _speaks(rank):
        where = "" if rank == "0" else f" (on rank {rank})"
        print(f"megatron_ext: error: {error}{where}", file=output, flush=True)
    _leave(MISUSED)


def _speaks(rank: str) -> bool:
    """Whether this rank tells a mistake.

    Before the ranks have met, the first of every node: what the others of its node see, it sees. Afterwards, the first
    that comes to it: a mistake may be one of the last pipeline stage only.
    """
    if not _have_met():
        return os.environ.get("LOCAL_RANK", rank) == "0"
    from torch import distributed as dist

    try:
        return bool(dist.distributed_c10d._get_default_store().add("megascale/mistakes", 1) == 1)
    except RuntimeError:  # the rank that kept the store is gone
        return True


def _have_met() -> bool:
    from torch import distributed as dist

    return dist.is_available() and dist.is_initialized()


def _without_launcher(error: BaseException) -> BaseException:
    """The error with its traceback beginning in the script."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return error if trace is None else error.with_traceback(trace)


def _leave(status: int) -> NoReturn:
    for child in multiprocessing.active_children():  # stock's writers of checkpoints: a normal exit would end them
        child.terminate()
    sys.stdout.flush()
    if sys.__stderr__ is not None:
        sys.__stderr__.flush()
    os._exit(status)
