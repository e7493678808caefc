"""The settings of `kvoy up`: what they refuse, and what they become for the children."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoy_cli.up_config import UpConfig
from kvoy_contract.settings import read_settings


def test_without_arguments_two_engines_serve_the_built_in_model() -> None:
    config = UpConfig()

    assert config.model_ref == "smollm2-135m-instruct"
    assert config.engine_ports == [8100, 8101]
    assert [use.port for use in config.port_uses()] == [8000, 8100, 9100, 8101, 9101]


def test_the_timing_runner_needs_no_model() -> None:
    assert UpConfig(runner="sim").model_ref == "sim"


def test_engines_get_their_share_and_their_port() -> None:
    config = UpConfig(dtype="float32", engine_args="--max-num-seqs 8")

    command = config.engine_command(8101, Path("/models/m"), "m", 3)

    assert command == [
        *["serve", "/models/m", "--runner", "torch", "--port", "8101", "--host", "127.0.0.1"],
        *["--served-model-name", "m", "--expect-router", "--num-threads", "3"],
        *["--dtype", "float32", "--max-num-seqs", "8"],
    ]


def test_the_router_gets_every_engine() -> None:
    command = UpConfig(engines=3, policy="random", port=9).router_command()

    assert command == [
        *["router", "--host", "127.0.0.1", "--port", "9", "--policy", "random", "--engine"],
        *["127.0.0.1:8100", "127.0.0.1:8101", "127.0.0.1:8102"],
    ]


def test_children_get_the_secret_and_not_this_command_s_settings() -> None:
    environment = {"KVOY_PORT": "1", "KVOY_CONFIG": "x", "KVOY_LOG_LEVEL": "debug", "PATH": "/bin"}

    child = UpConfig().child_environment("s3cret", environment)

    assert child["KVOY_SECRET"] == "s3cret"
    assert child["KVOY_LOG_LEVEL"] == "debug"
    assert child["PATH"] == "/bin"
    assert "KVOY_PORT" not in child
    assert "KVOY_CONFIG" not in child


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--engines", "0"], "--engines"),
        (["--port", "70000"], "--port"),
        (["--engine-port", "64600"], "--engine-port"),
        (["--num-threads", "0"], "--num-threads"),
        (["--engine-args", "'"], "--engine-args"),
        (["--policy", "luck"], "--policy"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_a_wrong_value_is_refused_by_its_flag(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        read_settings(UpConfig, "kvoy up", "", arguments)

    assert end.value.code == 2
    assert words in capsys.readouterr().err


def test_a_flag_wins_over_the_environment_and_that_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "up.yaml").write_text("engines: 3\nport: 7000\npolicy: random\n")
    monkeypatch.setenv("KVOY_PORT", "7001")
    monkeypatch.setenv("KVOY_POLICY", "least-load")

    config = read_settings(
        UpConfig, "kvoy up", "", ["--config", str(tmp_path / "up.yaml"), "--policy", "round-robin"]
    )

    assert (config.engines, config.port, config.policy) == (3, 7001, "round-robin")
