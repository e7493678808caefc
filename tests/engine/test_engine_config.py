"""Flags of `kvoy serve`."""

from __future__ import annotations

import pytest

from kvoy_contract.settings import read_settings
from kvoy_engine.__main__ import take_group_variables
from kvoy_engine.config import ByteSize, EngineConfig

GROUP = ("--runner", "sim", "--nnodes", "2", "--tensor-parallel-size", "2")


def parse(*argv: str) -> EngineConfig:
    return read_settings(EngineConfig, "kvoy serve", "", argv)


def test_the_flags_have_vllms_names() -> None:
    config = parse(
        "model",
        *("--max-model-len", "4096", "--max-num-seqs", "8", "--max-num-batched-tokens", "512"),
        *("--gpu-memory-utilization", "0.5", "--dtype", "bfloat16", "--kv-cache-dtype", "auto"),
        *("--block-size", "32", "--no-enable-prefix-caching", "--seed", "7"),
        *("--kv-cache-memory-bytes", "1.5GiB", "--num-gpu-blocks-override", "99"),
        *("--tensor-parallel-size", "1", "--served-model-name", "a", "b"),
    )

    assert config.model == "model"
    assert config.served_model_name == ("a", "b")
    assert config.kv_cache_memory_bytes == 3 << 29
    assert not config.enable_prefix_caching


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (["model", "--tensor-parallel-size", "2"], "--tensor-parallel-size"),
        (["model", "--pipeline-parallel-size", "2"], "--pipeline-parallel-size"),
        (["model", "--nnodes", "2"], "--nnodes"),
        (["--runner", "sim", "--nnodes", "2"], "--nnodes"),
        (["--runner", "sim", "--node-rank", "1"], "--node-rank"),
        ([*GROUP, "--node-rank", "1"], "--master-addr"),
        ([*GROUP, "--node-rank", "1", "--master-addr", " "], "--master-addr"),
        ([*GROUP, "--node-rank", "2", "--master-addr", "a"], "--node-rank"),
        (["--runner", "sim", "--tensor-parallel-size", "0"], "--tensor-parallel-size"),
        (["model", "--role", "encode"], "--role"),
        (["model", "--master-port", "0"], "--master-port"),
        (["model", "--gpu-memory-utilization", "0"], "--gpu-memory-utilization"),
        (["model", "--hash-stride", "40"], "--hash-stride"),
        (["model", "--port", "70000"], "--port"),
        (["model", "--max-num-seqs", "0"], "--max-num-seqs"),
        (["model", "--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization"),
        (["model", "--port", "65000"], "--telemetry-port"),
        (["model", "--kv-cache-memory-bytes", "much"], "--kv-cache-memory-bytes"),
        (["model", "--drain-timeout-s", "-1"], "--drain-timeout-s"),
        (["model", "--secret", "s\n"], "--secret"),
        (["model", "--no-such-flag"], "--no-such-flag"),
        ([], "MODEL"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_flag(
    argv: list[str], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse(*argv)

    assert exit_info.value.code == 2
    assert flag in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [("17", 17), ("4GiB", 4 << 30), ("512MB", 512_000_000), ("1.5g", 1_500_000_000), ("2Ki", 2048)],
)
def test_sizes_may_carry_a_unit(text: str, expected: int) -> None:
    assert ByteSize(text) == expected


def test_the_telemetry_port_follows_the_http_port() -> None:
    assert parse("m", "--port", "8100").grpc_port(8100) == 9100
    assert parse("m", "--port", "8100", "--telemetry-port", "7").grpc_port(8100) == 7
    assert parse("m", "--port", "0").grpc_port(43210) == 0


def test_what_a_leader_worker_set_injects_names_the_group() -> None:
    environment = {
        "LWS_GROUP_SIZE": "4",
        "LWS_WORKER_INDEX": "3",
        "LWS_LEADER_ADDRESS": "qwen-0.qwen.default",
        "KVOY_NODE_RANK": "2",
    }

    take_group_variables(environment)

    assert environment["KVOY_NNODES"] == "4"
    assert environment["KVOY_MASTER_ADDR"] == "qwen-0.qwen.default"
    assert environment["KVOY_NODE_RANK"] == "2", "our own variable goes before theirs"


def test_without_a_group_nothing_is_set() -> None:
    environment: dict[str, str] = {}

    take_group_variables(environment)

    assert environment == {}


def test_a_simulated_engine_may_say_that_it_has_several_devices() -> None:
    config = parse(*GROUP, "--pipeline-parallel-size", "3")

    assert (config.nnodes, config.node_rank, config.is_worker) == (2, 0, False)
    assert (config.tensor_parallel_size, config.pipeline_parallel_size) == (2, 3)
