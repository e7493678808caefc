"""All of it in order: each part starts its engines and every route to them, measures, and ends
them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from kvoy_cli.bench.context import BenchContext
from kvoy_cli.bench.fake_answers import MODEL
from kvoy_cli.bench.report import Report
from kvoy_cli.bench.router_cost import fake_engines
from kvoy_contract.prompt import PromptEncoder, TokenizerFiles, byte_tokenizer_files
from kvoy_peers.catalogue import PEERS
from kvoy_peers.config import PeersConfig
from kvoy_peers.cost import CostRun, CostSizes
from kvoy_peers.environment import default_folder
from kvoy_peers.figures import Placement, RouteCosts
from kvoy_peers.names import DIRECT, KVOY, RELAY
from kvoy_peers.peer import Peer
from kvoy_peers.placement import PlacementRun, PlacementSizes, placement_engines
from kvoy_peers.report import Row, build_report
from kvoy_peers.routes import Absent, Backends, Roster, start_routes, version_of
from kvoy_peers.traffic import ChatUsers, Conversation, Groups, conversations

_NUM_ENGINES = 4
_SMOKE_COST = CostSizes(
    num_streams=2,
    chunks_per_stream=20,
    concurrencies=(1, 2),
    seconds=0.1,
    histories=(32,),
    turn_users=2,
    settle_s=0.05,
)
_SMOKE_PLACEMENT = PlacementSizes(
    num_engines=2,
    groups=Groups(4, 2, 64, 32),
    warmed_groups=Groups(2, 2, 64, 32),
    users=ChatUsers(2, 2, 64, 32, 0.05),
    output_tokens=4,
    rate=20.0,
    unique_chars=64,
    hot_prefix_chars=128,
    seconds=0.3,
    drain_s=2.0,
    step_s=0.002,
    prefill_tokens_per_s=50_000.0,
)
_SAMPLE_WORDS = 2000


async def compare(config: PeersConfig, context: BenchContext) -> Report:
    load_before = os.getloadavg()[0]
    peers = tuple(peer for peer in PEERS if peer.name in config.peers)
    folder = Path(config.environments) if config.environments else default_folder()
    costs: dict[str, RouteCosts] = {}
    placements: dict[str, dict[str, Placement]] = {}
    absent: dict[str, Absent] = {}
    if "cost" in config.parts:
        costs, missing = await _measure_costs(context, peers, folder)
        absent |= {one.name: one for one in missing}
    if "placement" in config.parts:
        placements, missing = await _measure_placement(context, peers, folder)
        absent |= {one.name: one for one in missing}
    return build_report(
        _setting(config),
        _rows(peers, absent),
        costs,
        placements,
        (load_before, os.getloadavg()[0]),
    )


async def _measure_costs(
    context: BenchContext, peers: Sequence[Peer], folder: Path
) -> tuple[dict[str, RouteCosts], tuple[Absent, ...]]:
    sizes = _SMOKE_COST if context.is_smoke else CostSizes()
    tokenizer = None if context.is_smoke else context.model_folder()
    flags = ["--count", str(_NUM_ENGINES), "--gap-s", str(sizes.gap_s)]
    if tokenizer is not None:
        flags += ["--tokenizer", str(tokenizer)]
    per_word = _tokens_per_word(tokenizer)
    patience = {peer.name: peer.patience for peer in peers}
    async with AsyncExitStack() as stack:
        entries = await stack.enter_async_context(fake_engines(context, *flags))
        backends = Backends(tuple(entries), MODEL, tokenizer)
        roster: Roster = await start_routes(stack, context, backends, peers, folder)
        measurement = CostRun(
            context,
            sizes,
            MODEL,
            lambda tokens, count: conversations(tokens, count, per_word),
            lambda name: patience.get(name, 1),
        )
        return await measurement.measure(roster.routes), roster.absent


async def _measure_placement(
    context: BenchContext, peers: Sequence[Peer], folder: Path
) -> tuple[dict[str, dict[str, Placement]], tuple[Absent, ...]]:
    """Of all that can route to Kvoy's engines."""
    sizes = _SMOKE_PLACEMENT if context.is_smoke else PlacementSizes()
    able = [peer for peer in peers if not peer.brings_engines]
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(placement_engines(context, sizes))
        entries = tuple(engine.router_entry for engine in fleet)
        backends = Backends(entries, context.served_name)
        roster = await start_routes(stack, context, backends, able, folder)
        routes = [route for route in roster.routes if route.name != DIRECT]
        placements = await PlacementRun(context, sizes, fleet).measure(routes)
        return placements, roster.absent


def _tokens_per_word(tokenizer: Path | None) -> float:
    """Of the words that histories are made of."""
    files = TokenizerFiles.from_folder(tokenizer) if tokenizer else byte_tokenizer_files()
    text = Conversation.of_words(_SAMPLE_WORDS, _SAMPLE_WORDS, 0).opening.decode()
    return len(PromptEncoder(files).encode_text(text)) / _SAMPLE_WORDS


def _rows(peers: Sequence[Peer], absent: dict[str, Absent]) -> list[Row]:
    own = [
        Row(DIRECT, "", "one engine", "measured"),
        Row(RELAY, "", "connections in turn", "measured"),
        Row(KVOY, "", "kv-aware", "measured"),
    ]
    others = [
        Row(
            peer.name,
            version_of(peer),
            peer.policy,
            f"not measured: {absent[peer.name].reason}" if peer.name in absent else "measured",
        )
        for peer in peers
    ]
    return own + others


def _setting(config: PeersConfig) -> str:
    return (
        f"parts: {', '.join(config.parts)}; {_NUM_ENGINES} engines each; cost on stand-in engines "
        f"in a process of their own with the tokenizer of {config.model}, {config.repeats} "
        "repeats, routes in turn; placement on simulated engines, one run of each mix"
    )
