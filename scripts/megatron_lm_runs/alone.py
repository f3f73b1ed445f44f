"""Runs a script of Megatron-LM as Python does; without an accelerator, with what lets it run on a CPU. No plug-in."""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.argv = sys.argv[1:]
    script = Path(sys.argv[0]).resolve()
    sys.path.insert(0, str(script.parent))

    from megatron_ext.megatron_lm.install import install, uninstall
    from megatron_ext.megatron_lm.reword import reword

    uninstall()  # what importing the plug-in did
    finder = install(script.parent, megascale=False)
    assert finder is not None
    code = compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    globals().update(__file__=str(script))
    exec(code if finder.rewords is None else reword(code), globals())
