"""Routers and engines of neighbouring versions understand each other.

`GOLDEN` holds messages as version 0.1 wrote them, with every field set. They must be read as what
they said for ever; a change of one is a change that breaks running fleets.
"""

import pytest
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from kvoy_contract.proto.kvoy.v1 import telemetry_pb2 as pb

EPOCH = b"e" * 16
DESCRIPTION = pb.EngineDescription(
    epoch=bytes(range(16)),
    served_model="m",
    aliases=["a", "b"],
    model_identity="sha256:1",
    adapters=["l"],
    role=pb.ROLE_BOTH,
    block_size=16,
    hash_stride=64,
    num_blocks=1000,
    block_bytes=4096,
    max_model_len=8192,
    max_num_seqs=256,
    max_num_batched_tokens=2048,
    tokenizer_digest="t",
    numerics="n",
    parallel=pb.ParallelSizes(tensor=2, pipeline=3, data=4),
    transfer_addresses=[pb.TransferAddress(rank=1, address="h:1")],
    engine_kind="kvoy",
    engine_version="0.1.0",
    capabilities=pb.Capabilities(
        envelope=True,
        token_ids=True,
        resume=True,
        transfer_ids=True,
        cache_salt=True,
        admitted_through=True,
    ),
    device_memory_bytes=1 << 40,
    vocab_size=49152,
)
LOAD = pb.LoadReport(
    running=1,
    waiting=2,
    queued_prefill_tokens=3,
    free_blocks=4,
    evictable_blocks=5,
    total_blocks=6,
    free_device_bytes=7,
    prefill_tokens_per_s=8.5,
    step_time_s=0.25,
    draining=True,
    ready=True,
    admitted_through=12,
    admitted_beyond=[14, 16],
    running_tokens=15,
    num_preemptions=17,
    uptime_s=18.5,
    generated_tokens=19,
    last_step_age_s=0.5,
)
GOLDEN: dict[str, tuple[Message, str]] = {
    "description": (
        DESCRIPTION,
        "0a10000102030405060708090a0b0c0d0e0f12016d1a01611a016222087368613235363a312a016c30013810"
        "404048e8075080205880406080026880107201747a016e8201060802100318048a010708011203683a319201"
        "046b766f799a0105302e312e30a2010c080110011801200128013001a801808080808020b001808003",
    ),
    "tokenizer request": (pb.GetTokenizerRequest(digest="t"), "0a0174"),
    "tokenizer file": (
        pb.TokenizerFile(name="tokenizer.json", data=b"{}", last=True),
        "0a0e746f6b656e697a65722e6a736f6e12027b7d1801",
    ),
    "hello": (
        pb.WatchRequest(hello=pb.Hello(router_id="r", router_version="0.1.0")),
        "0a0a0a01721205302e312e30",
    ),
    "acknowledgement": (
        pb.WatchRequest(snapshot_ack=pb.SnapshotAck(epoch=EPOCH, seq=9)),
        "12140a10656565656565656565656565656565651009",
    ),
    "snapshot begin": (
        pb.WatchEvent(seq=1, epoch=EPOCH, snapshot_begin=pb.SnapshotBegin(num_hashes=2)),
        "08011210656565656565656565656565656565651a020802",
    ),
    "snapshot chunk": (
        pb.WatchEvent(seq=2, snapshot_chunk=pb.SnapshotChunk(hashes=b"h" * 32, tier=pb.TIER_HOST)),
        "080222240a2068686868686868686868686868686868686868686868686868686868686868681001",
    ),
    "snapshot end": (pb.WatchEvent(seq=3, snapshot_end=pb.SnapshotEnd()), "08032a00"),
    "blocks": (
        pb.WatchEvent(
            seq=4,
            blocks=pb.BlockDelta(
                cleared=True, removed=b"r" * 16, stored=b"s" * 16, tier=pb.TIER_DISK
            ),
        ),
        "0804322808011210727272727272727272727272727272721a10737373737373737373737373737373732002",
    ),
    "load": (
        pb.WatchEvent(seq=5, load=LOAD),
        "08053a45080110021803200428053006380741000000000000214049000000000000d03f50015801600c6a02"
        "0e10700f7811810100000000008032408801139101000000000000e03f",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_messages_of_the_first_version_are_read_as_what_they_said(name: str) -> None:
    expected, golden = GOLDEN[name]

    message = type(expected).FromString(bytes.fromhex(golden))

    assert message == expected
    assert len(UnknownFieldSet(message)) == 0


def test_an_engine_that_knows_no_pace_finds_no_message_in_it() -> None:
    """Field 1000 stands for what was not there in the first version, as `pace` was not."""
    later = pb.WatchRequest.FromString(b"\xc2\x3e\x05later")

    assert later.WhichOneof("message") is None


def test_a_pace_keeps_its_number() -> None:
    message = pb.WatchRequest(pace=pb.Pace(min_interval_s=0.5))

    assert message.SerializeToString().hex() == "1a0909000000000000e03f"


@pytest.mark.parametrize("name", GOLDEN)
def test_what_a_later_version_adds_is_passed_over(name: str) -> None:
    expected, golden = GOLDEN[name]
    field_1000 = b"\xc2\x3e\x05later"

    message = type(expected).FromString(bytes.fromhex(golden) + field_1000)

    assert message != expected
    message.DiscardUnknownFields()
    assert message == expected


def test_services_and_methods_keep_their_names() -> None:
    service = pb.DESCRIPTOR.services_by_name["Telemetry"]

    assert service.full_name == "kvoy.v1.Telemetry"
    assert {"Describe", "GetTokenizer", "Watch"} <= set(service.methods_by_name)
