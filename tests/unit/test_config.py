"""The configuration: sizes, sections, files; every mistake names key, value and remedy."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_omni.config import ComputeConfig, MegaScaleConfig, PagingConfig, parse_bytes

KIB, MIB = 2**10, 2**20


class TestSizes:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            (65536, 65536),
            ("65536", 65536),
            ("64KiB", 64 * KIB),
            ("16MiB", 16 * MIB),
            ("16mib", 16 * MIB),
            (" 16 MiB ", 16 * MIB),
            ("0.5MiB", MIB // 2),
            ("1.5 GiB", 3 * 2**29),
            ("1TiB", 2**40),
            ("2MB", 2_000_000),
            ("70kb", 70_000),
            ("100B", 100),
        ],
    )
    def test_what_is_a_size(self, text: object, expected: int) -> None:
        assert parse_bytes(text, key="k") == expected

    @pytest.mark.parametrize(
        "text", ["", "x", "MiB", "1e3", "-1MiB", "1QiB", "1,5MiB", "0x10", True, None, 1.5, [1], "9" * 400, "1MiB2"]
    )
    def test_what_is_none(self, text: object) -> None:
        with pytest.raises(ValueError, match=r"paging\.page_size_bytes=.* is not a size; write bytes or a unit"):
            PagingConfig(page_size_bytes=text)  # type: ignore[arg-type]

    @given(st.text(max_size=12))
    def test_any_text_is_a_size_or_a_value_error(self, text: str) -> None:
        try:
            size = parse_bytes(text, key="k")
        except ValueError:
            return
        assert size >= 0

    @pytest.mark.parametrize("size", [64 * KIB, 16 * MIB, 64 * MIB])
    def test_page_sizes_from_the_smallest_to_the_largest(self, size: int) -> None:
        assert PagingConfig(page_size_bytes=size).page_size_bytes == size

    @pytest.mark.parametrize("size", [0, -5, 64 * KIB - 1, "63KiB", 64 * MIB + 1, "65MiB", "1TiB"])
    def test_page_sizes_that_are_too_small_or_too_large(self, size: object) -> None:
        with pytest.raises(ValueError, match=rf"paging\.page_size_bytes={size} is outside .*64KiB.*64MiB.*, e\.g"):
            PagingConfig(page_size_bytes=size)  # type: ignore[arg-type]


MISTAKES = [
    ({"pagin": {}}, r"unknown configuration key pagin; did you mean paging\?"),
    ({"paging": {"page_size": "1MiB"}}, r"key paging\.page_size; did you mean paging\.page_size_bytes\?"),
    ({"compute": {"cpu_product": "blas"}}, r"key compute\.cpu_product; did you mean compute\.cpu_products\?"),
    ({"page_size_bytes": "1MiB"}, r"key page_size_bytes; did you mean paging\.page_size_bytes\?"),
    ({"paging": {"cpu_products": "blas"}}, r"key paging\.cpu_products; did you mean compute\.cpu_products\?"),
    ({"zzz": 1}, r"unknown configuration key zzz; known: paging, compute"),
    ({"paging": {"zz": 1}}, r"unknown configuration key paging\.zz; known: paging\.page_size_bytes"),
    ({"paging": 3}, r"paging=3 must be a section of options"),
    ({"paging": None}, r"paging=None must be a section of options"),
    ({"paging": ["page_size_bytes"]}, r"paging=\['page_size_bytes'\] must be a section"),
    ({"paging": {"page_size_bytes": "1QiB"}}, r"paging\.page_size_bytes='1QiB' is not a size"),
    ({"compute": {"cpu_products": "mkl"}}, r"compute\.cpu_products='mkl' is unknown; choose one of auto, blas, onednn"),
    ({"observe": {"report": 5}}, r"observe\.report=5 must be the path of a folder"),
    ({"observe": {"trace": ""}}, r"observe\.trace='' must be the path of a file"),
    ({"distributed": {"dispatcher": "groups", "topology": 5}}, r"distributed\.topology=5 must be the path of a file"),
    ({"compute": {"cpu_products": ["blas"]}}, r"compute\.cpu_products=\['blas'\] is unknown"),
]


class TestMappings:
    @pytest.mark.parametrize(("values", "message"), MISTAKES)
    def test_mistakes(self, values: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            MegaScaleConfig.from_mapping(values)

    @pytest.mark.parametrize("values", [{1: 2}, {"paging": {3: 4}}, {None: 1}])
    def test_keys_that_are_no_text(self, values: dict[str, object]) -> None:
        with pytest.raises(ValueError, match="unknown configuration key"):
            MegaScaleConfig.from_mapping(values)

    def test_nothing_is_the_default(self) -> None:
        assert MegaScaleConfig.from_mapping({}) == MegaScaleConfig()
        assert MegaScaleConfig.from_mapping({"paging": {}}) == MegaScaleConfig()

    def test_plain_values_and_back(self) -> None:
        config = MegaScaleConfig(PagingConfig(page_size_bytes=MIB), ComputeConfig(cpu_products="blas"))
        plain = json.loads(json.dumps(config.as_dict()))
        assert plain["paging"]["page_size_bytes"] == MIB
        assert plain["compute"] == {"cpu_products": "blas", "backend": "auto", "optimizer_device": "auto"}
        assert MegaScaleConfig.from_mapping(plain) == config

    def test_every_option_of_every_section_can_be_set(self) -> None:
        plain = MegaScaleConfig().as_dict()
        assert set(plain) == {item.name for item in dataclasses.fields(MegaScaleConfig)}
        assert MegaScaleConfig.from_mapping(plain) == MegaScaleConfig()  # type: ignore[arg-type]

    def test_replacing_an_option_checks_it_and_leaves_the_rest(self) -> None:
        config = MegaScaleConfig(compute=ComputeConfig(cpu_products="blas"))
        changed = config.replace("paging", page_size_bytes="1MiB")
        assert (changed.paging.page_size_bytes, changed.compute.cpu_products) == (MIB, "blas")
        assert config.paging == PagingConfig()
        with pytest.raises(ValueError, match="is outside"):
            config.replace("paging", page_size_bytes="1KiB")

    def test_configurations_do_not_change(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            MegaScaleConfig().paging = PagingConfig()  # type: ignore[misc]


class TestFiles:
    @pytest.mark.parametrize("name", ["c.json", "c.yaml", "c.yml"])
    def test_a_file(self, tmp_path: Path, name: str) -> None:
        path = tmp_path / name
        path.write_text('{"paging": {"page_size_bytes": "1MiB"}, "compute": {"cpu_products": "onednn"}}')
        config = MegaScaleConfig.from_file(path)
        assert (config.paging.page_size_bytes, config.compute.cpu_products) == (MIB, "onednn")

    def test_yaml_as_people_write_it(self, tmp_path: Path) -> None:
        path = tmp_path / "c.yaml"
        path.write_text("# pages\npaging:\n  page_size_bytes: 2MiB\n")
        assert MegaScaleConfig.from_file(path).paging.page_size_bytes == 2 * MIB

    @pytest.mark.parametrize("name", ["c.json", "c.yaml"])
    @pytest.mark.parametrize(("values", "message"), MISTAKES)
    def test_mistakes_name_the_file_too(
        self, tmp_path: Path, name: str, values: dict[str, object], message: str
    ) -> None:
        path = tmp_path / name
        path.write_text(json.dumps(values))
        with pytest.raises(ValueError, match=message) as error:
            MegaScaleConfig.from_file(path)
        assert str(path) in str(error.value)

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("c.json", b"{", "is not valid"),
            ("c.yaml", b"a: b: c", "is not valid"),
            ("c.yaml", b"? [a]\n: 1\n", "is not valid"),
            ("c.yaml", b"!!python/object:os.system {}", "is not valid"),
            ("c.json", b"[]", "must hold a mapping of sections, not list"),
            ("c.yaml", b"16MiB", "must hold a mapping of sections, not str"),
            ("c.json", b"\xff\xfe", "cannot be read.*give a JSON or YAML file"),
        ],
    )
    def test_unreadable_content(self, tmp_path: Path, name: str, content: bytes, message: str) -> None:
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message) as error:
            MegaScaleConfig.from_file(path)
        assert str(path) in str(error.value)

    @pytest.mark.parametrize(("name", "content"), [("c.yaml", ""), ("c.yaml", "# nothing\n"), ("c.json", "null")])
    def test_an_empty_file_is_the_default(self, tmp_path: Path, name: str, content: str) -> None:
        path = tmp_path / name
        path.write_text(content)
        assert MegaScaleConfig.from_file(path) == MegaScaleConfig()

    def test_no_file(self, tmp_path: Path) -> None:
        for path in (tmp_path, tmp_path / "missing.json"):
            with pytest.raises(ValueError, match=r"cannot be read.*give a JSON or YAML file"):
                MegaScaleConfig.from_file(path)
