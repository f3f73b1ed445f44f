"""The documents say what the code says: tables against code, examples against what they print, links against files."""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import pytest

from megascale_omni.config import MegaScaleConfig, parse_bytes
from megatron_ext import add_megascale_args, config_from_args
from megatron_ext.support import REFUSALS, Refusal

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PACKAGES = ("megascale_omni", "megatron_ext", "deepspeed_ext")


def table(document: str, first_column: str) -> list[list[str]]:
    """The cells of the tables whose header begins with a column of this name."""
    lines = iter((ROOT / document).read_text().splitlines())
    rows: list[list[str]] = []
    for line in lines:
        if line.startswith(f"| {first_column} |"):
            next(lines)
            rows += [[cell.strip() for cell in row.strip("|").split("|")] for row in takewhile(is_row, lines)]
    assert rows, f"{document} has no table of {first_column!r}"
    return rows


def is_row(line: str) -> bool:
    return line.startswith("|")


def code(cell: str) -> str:
    """What stands between the first backticks of a cell."""
    found = re.match(r"`([^`]+)`", cell)
    assert found, f"{cell!r} does not begin with code"
    return found[1]


def blocks(document: str, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / document).read_text(), flags=re.M | re.S)
    return [block for name, block in found if name == language]


# --- every document ---------------------------------------------------------------------------------


def anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", document.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        path, _, anchor = target.partition("#")
        there = document.parent / path if path else document
        assert there.is_file(), f"{document.name} links to {target}"
        assert not anchor or anchor in anchors(there), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_is_short(document: Path) -> None:
    limit = {"README.md": 260, "ARCHITECTURE.md": 300, "TOUR.md": 400}.get(
        document.name, 270
    )  # the tour names every file
    assert len(document.read_text().splitlines()) <= limit


@cache
def sources() -> dict[Path, str]:
    folders = (*PACKAGES, "scripts", "configs", "triton_kernels")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".sh")]
    return {path: path.read_text() for path in found if "__pycache__" not in path.parts}


def test_notes_that_are_cited_exist() -> None:
    cited = {n for d in DOCUMENTS for n in re.findall(r"\[Note:\s([^\]]+)\]", d.read_text().replace("\n", " "))}
    cited.discard("name")  # the pattern itself
    assert cited
    headings = [line.strip().strip('"#').strip() for text in sources().values() for line in text.splitlines()]
    assert not {note for note in cited if f"[Note: {note}]" not in headings}


# --- commands -----------------------------------------------------------------------------------------


def commands(script: str) -> list[list[str]]:
    """The words of every command line in the documents that runs a script."""
    text = "".join(block for document in DOCUMENTS for block in blocks(document.relative_to(ROOT).as_posix(), ""))
    lines = text.replace("\\\n", " ").splitlines()
    found = [line.split("#")[0].split() for line in lines if line.startswith(("python ", "torchrun "))]
    found = [words for words in found if f"scripts/{script}" in words]
    assert found, f"no command runs {script}"
    return found


def after(words: list[str], script: str) -> list[str]:
    return words[words.index(f"scripts/{script}") + 1 :]


def test_commands_of_the_trainer_parse(tmp_path: Path) -> None:
    from scripts.moe_trainer.arguments import parse_args

    text = tmp_path / "TEXT"
    text.write_text("a text")
    for words in commands("pretrain_moe.py"):
        ranks = int(words[words.index("--nproc_per_node") + 1]) if words[0] == "torchrun" else 1
        flags = [str(text) if word == "TEXT" else word for word in after(words, "pretrain_moe.py")]
        assert parse_args(flags, world_size=ranks).megascale


def test_commands_of_the_comparison_make_runs_that_parse(tmp_path: Path) -> None:
    from scripts.comparison.main import _parser, _plan
    from scripts.moe_trainer.arguments import parse_args

    for words in commands("compare_with_stock.py"):
        own, _, trainer = " ".join(after(words, "compare_with_stock.py")).partition(" -- ")
        plan = _plan(_parser().parse_args(own.split()), tmp_path, trainer.split())
        parse_args([*plan.flags, "--megascale", *plan.megascale_flags], world_size=plan.ranks)


def test_commands_of_the_fine_tuning_parse() -> None:
    from deepspeed_ext.config import section_of
    from scripts.deepspeed_runs.finetuning import read_config
    from scripts.deepspeed_runs.main import parser

    for words in commands("finetune_hf_moe.py"):
        args = parser().parse_args(after(words, "finetune_hf_moe.py"))
        assert section_of(read_config(ROOT / args.deepspeed)) is not None


def test_commands_of_proof_and_measurement_name_what_there_is() -> None:
    from scripts.exactness.layouts import select as layouts
    from scripts.exactness.main import _parser
    from scripts.measurements import deepspeed, house
    from scripts.measurements.rows import select as rows

    assert all(
        layouts(_parser().parse_args(after(w, "prove_exactness.py")).layout) for w in commands("prove_exactness.py")
    )
    for words in commands("measure.py"):
        topic, *flags = after(words, "measure.py")
        topics = {"house": house.ROWS, "deepspeed": deepspeed.ROWS}
        assert rows(topics[topic], [value for flag, value in pairwise(flags) if flag == "--row"])


# --- README -------------------------------------------------------------------------------------------


def toured() -> set[str]:
    """Every path of the tours, from the root of the project; a table lies in the folder named above it, if any."""
    found: set[str] = set()
    folder, inside = "", False
    for line in [line for d in ("README.md", "docs/TOUR.md") for line in (ROOT / d).read_text().splitlines()]:
        if line.endswith(":"):
            named = re.search(r"`(\w+/)`", line)
            folder = named[1] if named else ""
        inside = line == "| path | what |" or (inside and is_row(line))
        if inside and "`" in line:
            found.add(folder + code(line.strip("| ")))
    return found


def test_tour_names_what_there_is() -> None:
    missing = [path for path in sorted(toured()) if not (ROOT / path).exists()]
    assert len(toured()) > 40
    assert not missing


@pytest.mark.parametrize("package", PACKAGES)
def test_tour_leaves_out_no_module(package: str) -> None:
    modules = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py" and "kernels" not in path.relative_to(ROOT).parts
    }
    assert not modules - toured()


@pytest.mark.parametrize("folder", ["scripts", "configs"])
def test_readme_names_every_command_and_configuration(folder: str) -> None:
    text = (ROOT / "README.md").read_text()
    files = [path for path in (ROOT / folder).iterdir() if path.is_file() and path.name != "__init__.py"]
    assert files
    assert not [path.name for path in files if path.name not in text]


@cache
def messages() -> tuple[str, ...]:
    """Every text in what a user runs; what is filled in stands as a line break."""
    found = [text for path, text in sources().items() if path.suffix == ".sh"]
    for path, text in sources().items():
        if path.suffix != ".py" or {"exactness", "comparison", "measuring", "measurements"} & set(path.parts):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "\n" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return tuple(found)


def said_somewhere(message: str) -> bool:
    """Whether a text in the sources holds the fragments of ``message`` between ``...``, in order."""
    parts = message.split("...")
    pattern = re.compile(".*".join(map(re.escape, parts)), flags=re.S)
    return any(max(parts, key=len) in text and pattern.search(text) for text in messages())


def test_troubleshooting_names_messages_that_exist() -> None:
    shown = [message for seen, _ in table("README.md", "you see") for message in re.findall(r"`([^`]+)`", seen)]
    assert not [message for message in shown if not said_somewhere(message)]
    assert not said_somewhere("experts class ... is not supported with --megaskale")


# --- docs/SUPPORT.md ----------------------------------------------------------------------------------

WHEN: dict[str, tuple[Callable[[Refusal], bool], Callable[[Refusal], bool]]] = {
    # cell: (values that are refused, values that are not)
    "set": (lambda r: all(map(r.refused, (True, "x", 2))), lambda r: any(map(r.refused, (False, None, 0)))),
    "above 1": (lambda r: all(map(r.refused, (2, 8))), lambda r: any(map(r.refused, (None, 0, 1)))),
    "not `adam`": (lambda r: all(map(r.refused, ("sgd", "muon"))), lambda r: r.refused("adam")),
}


def test_support_table_is_the_one_in_force() -> None:
    rows = table("docs/SUPPORT.md", "where")
    assert [(r.where, r.option, r.remedy) for r in REFUSALS] == [(row[0], code(row[1]), row[3]) for row in rows]


@pytest.mark.parametrize("index", range(len(REFUSALS)), ids=lambda index: REFUSALS[index].option)
def test_support_table_says_when(index: int) -> None:
    refused, not_refused = WHEN[table("docs/SUPPORT.md", "where")[index][2]]
    assert refused(REFUSALS[index])
    assert not not_refused(REFUSALS[index])


# --- docs/CONFIGURATION.md ----------------------------------------------------------------------------

CONFIGURATION = "docs/CONFIGURATION.md"


def test_every_option_is_documented_with_its_default() -> None:
    defaults = {
        f"{section.name}.{option.name}": getattr(getattr(MegaScaleConfig(), section.name), option.name)
        for section in fields(MegaScaleConfig)
        for option in fields(getattr(MegaScaleConfig(), section.name))
    }
    documented = {code(row[0]): row[1] for row in table(CONFIGURATION, "key")}
    assert documented.keys() == defaults.keys()
    for key, default in defaults.items():
        shown = parse_bytes(documented[key], key=key) if key.endswith("_bytes") else documented[key]
        written = "none" if default is None else str(default).lower() if isinstance(default, bool) else default
        assert shown == (written if key.endswith("_bytes") else str(written)), key


def flags() -> list[argparse.Action]:
    parser = add_megascale_args(argparse.ArgumentParser(add_help=False))
    return parser._actions


def test_every_flag_is_documented_with_its_choices() -> None:
    documented = [code(row[0]) for row in table(CONFIGURATION, "flag")]
    expected = []
    for action in flags():
        values = "{" + ",".join(action.choices) + "}" if action.choices else action.metavar
        expected.append(action.option_strings[-1] + (f" {values}" if action.nargs != 0 else ""))
    assert documented == expected


def test_documents_name_no_flag_that_does_not_exist() -> None:
    known = {flag for action in flags() for flag in action.option_strings}
    for document in DOCUMENTS:
        named = set(re.findall(r"--megascale(?:-[a-z]+)*(?![a-z*-])", document.read_text()))
        assert named <= known, document.name


def test_examples_of_a_configuration_file_load(tmp_path: Path) -> None:
    yaml_file, json_file = tmp_path / "options.yaml", tmp_path / "options.json"
    (yaml_text,), (json_text,) = blocks(CONFIGURATION, "yaml"), blocks(CONFIGURATION, "json")
    yaml_file.write_text(yaml_text)
    json_file.write_text(json_text)
    loaded = MegaScaleConfig.from_file(yaml_file)
    assert loaded == MegaScaleConfig.from_file(json_file)
    assert loaded.paging.page_size_bytes == 2 * 2**20
    assert loaded.as_dict() == {**json.loads(json_text)}


@pytest.mark.parametrize("row", table(CONFIGURATION, "content"), ids=lambda row: row[0])
def test_errors_of_a_file_are_as_documented(row: list[str], tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(code(row[0]))
    with pytest.raises(ValueError, match=re.escape(row[1]) + "$"):
        MegaScaleConfig.from_file(path)


@pytest.mark.parametrize("row", table(CONFIGURATION, "flags"), ids=lambda row: row[0])
def test_errors_of_flags_are_as_documented(row: list[str]) -> None:
    args = add_megascale_args(argparse.ArgumentParser()).parse_args(code(row[0]).split())
    with pytest.raises(ValueError, match="^" + re.escape(row[1]) + "$"):
        config_from_args(args)


# --- docs/MEASURING.md --------------------------------------------------------------------------------


def keys(content: object) -> set[str]:
    """All keys of nested dictionaries."""
    if isinstance(content, dict):
        return {*content, *(key for value in content.values() for key in keys(value))}
    return {key for item in content for key in keys(item)} if isinstance(content, list | tuple) else set()


def documented_keys(beginning: str) -> set[str]:
    """Quoted names of the JSON block that begins so, values of ``name`` left out."""
    (block,) = [block for block in blocks("docs/MEASURING.md", "") if block.startswith(beginning)]
    return set(re.findall(r'"(\w+)"', re.sub(r': "\w+" \| "\w+"', "", block)))


def test_layouts_are_the_ones_that_are_proved() -> None:
    from scripts.exactness.layouts import LAYOUTS

    documented = [(code(row[0]), int(row[1])) for row in table("docs/MEASURING.md", "layout")]
    assert documented == [(layout.name, layout.ranks) for layout in LAYOUTS]


def test_json_of_a_comparison() -> None:
    from scripts.comparison.limited import Limited, LimitedRun
    from scripts.comparison.result import Comparison, Run
    from scripts.comparison.worker import Made, Step, Totals

    def run(name: str) -> Run:
        made = Made(experts="E", dispatcher="D", optimizer="O", tokens_per_step=8, parameters=1)
        step = Step(loss=1.0, grad_norm=1.0, seconds=1.0, sent_bytes=0)
        return Run(name, made, (step,), ((step,),), 0.0, (Totals(1, 1, 0, 0, 0),), (), None)

    limited = Limited(1, (LimitedRun("stock", (), "out of memory"),), 0.0)
    found: dict[str, Any] = Comparison({}, "coarse", (run("stock"), run("megascale")), limited).as_json()
    assert documented_keys('{"environment", "preset"') == keys(found)


def test_json_of_a_proof() -> None:
    from scripts.exactness.deviations import BOUNDS
    from scripts.exactness.layouts import LAYOUTS
    from scripts.exactness.verdict import FreeRun, Mutant, Verdict, Worst

    worst = {kind: Worst(kind, 0.0, "tensor", 1, 0) for kind in BOUNDS}
    free = FreeRun({side: [3.0, 1.0] for side in ("stock", "control", "megascale")}, [])
    mutant = Mutant("expert", worst["gradient"])
    verdict = Verdict(LAYOUTS[0], 2, 1.0, [], megascale=worst, control=worst, mutant=mutant, free=free)
    found: dict[str, Any] = verdict.as_json()
    assert found["free_run"].pop("losses").keys() == free.losses.keys()
    assert documented_keys('{"environment", "passes"') == keys(found) | {"environment", "layouts", "losses"}


def test_json_of_a_measurement() -> None:
    from scripts.measurements.rows import Context, Measured, Row

    def measure(context: Context) -> float:
        return 1.0

    rows = [Row(id="X", what="x", unit="x", kind=k, bound=1.0, measure=measure) for k in ("at_least", "at_most")]  # type: ignore[arg-type]
    entries = [Measured(row, None, 1.0, error="because").as_json() for row in rows]
    around = {"topic", "environment", "rows", "megatron_lm", "release", "commit"}
    assert documented_keys('{"topic", "environment"') == keys(entries) | around
