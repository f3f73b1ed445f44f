"""Runs a script of Megatron-LM as Python does; without an accelerator, with what lets it run on a CPU. No plug-in.

With `--in-halves` before the script each expert is computed in two halves: the control, which shows what rounding alone
does to a run.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    halves = sys.argv[1] == "--in-halves"
    sys.argv = sys.argv[1 + halves :]
    script = Path(sys.argv[0]).resolve()
    sys.path.insert(0, str(script.parent))

    from megatron_ext.megatron_lm.install import install, uninstall
    from megatron_ext.megatron_lm.reword import reword

    uninstall()  # what importing the plug-in did
    finder = install(script.parent, megascale=False)
    assert finder is not None
    if halves:
        from scripts.megatron_lm_runs.halves import compute_in_halves

        compute_in_halves()
    code = compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    globals().update(__file__=str(script))
    exec(code if finder.rewords is None else reword(code), globals())
