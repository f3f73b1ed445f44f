"""The `--megascale*` flags."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

import megatron_ext
from megascale_omni.config import ComputeConfig, MegaScaleConfig, PagingConfig

MIB = 2**20


def parse(*words: str, **others: object) -> argparse.Namespace:
    """As a script of Megatron's parses, whose other flags come along in the namespace."""
    parser = megatron_ext.add_megascale_args(argparse.ArgumentParser())
    return parser.parse_args(words, argparse.Namespace(**others))


class TestConfigFromArgs:
    def test_without_the_flag_there_is_none(self) -> None:
        assert megatron_ext.config_from_args(parse()) is None
        assert megatron_ext.config_from_args(argparse.Namespace()) is None, "scripts without our flags, too"

    def test_the_flag_alone_is_the_default(self) -> None:
        assert megatron_ext.config_from_args(parse("--megascale")) == MegaScaleConfig()

    def test_flags_win_over_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "c.yaml"
        path.write_text("paging: {page_size_bytes: 2MiB}\ncompute: {cpu_products: onednn}\n")
        from_file = megatron_ext.config_from_args(parse("--megascale", "--megascale-config", str(path)))
        assert from_file == MegaScaleConfig(PagingConfig(page_size_bytes=2 * MIB), ComputeConfig(cpu_products="onednn"))
        both = parse("--megascale", "--megascale-config", str(path), "--megascale-page-size", "4MiB")
        config = megatron_ext.config_from_args(both)
        assert config is not None
        assert (config.paging.page_size_bytes, config.compute.cpu_products) == (4 * MIB, "onednn")
        config = megatron_ext.config_from_args(parse("--megascale", "--megascale-cpu-products", "blas"))
        assert config == MegaScaleConfig(compute=ComputeConfig(cpu_products="blas"))

    @pytest.mark.parametrize(
        ("words", "named"),
        [
            (["--megascale-page-size", "1MiB"], r"--megascale-page-size=1MiB"),
            (["--megascale-config", "c.yaml"], r"--megascale-config=c\.yaml"),
            (["--megascale-cpu-products", "blas"], r"--megascale-cpu-products=blas"),
        ],
    )
    def test_flags_without_megascale_are_a_mistake(self, words: list[str], named: str) -> None:
        with pytest.raises(ValueError, match=named + r" has no effect without --megascale; add --megascale"):
            megatron_ext.enable_from_args(parse(*words, num_experts=4))
        assert not megatron_ext.is_enabled()

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--megascale-page-size", "big"], r"--megascale-page-size='big' is not a size"),
            (["--megascale-page-size", "1KiB"], r"--megascale-page-size=1KiB is outside .*64KiB.*64MiB"),
            (["--megascale-page-size", "1GiB"], r"--megascale-page-size=1GiB is outside .*64KiB.*64MiB"),
            (["--megascale-config", "/no/such/file.json"], r"/no/such/file\.json cannot be read"),
        ],
    )
    def test_bad_values(self, words: list[str], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            megatron_ext.enable_from_args(parse("--megascale", *words, num_experts=4))
        assert not megatron_ext.is_enabled()

    def test_an_unknown_library_of_products_is_a_mistake_of_the_command_line(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit):
            parse("--megascale", "--megascale-cpu-products", "mkl")
        assert "invalid choice: 'mkl'" in capsys.readouterr().err


class TestEnableFromArgs:
    def test_it_enables_what_the_flags_ask_for(self) -> None:
        runtime = megatron_ext.enable_from_args(parse("--megascale", "--megascale-page-size", "1MiB", num_experts=4))
        assert runtime is not None
        assert runtime.config.paging.page_size_bytes == MIB
        assert megatron_ext.is_enabled()

    def test_without_the_flag_stock_stays(self) -> None:
        assert megatron_ext.enable_from_args(parse(num_experts=4)) is None
        assert not megatron_ext.is_enabled()
