"""Formulas, figures and report of the memory benchmark. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvoy_cli.bench.goals import Goal
from kvoy_cli.bench.report import Report, Table
from kvoy_cli.bench.stats import ratio

CONTEXTS = (256, 1024, 2048, 4096, 8192)
_ELEMENT_BYTES = (2, 4, 8)
_SIM_MB = 80.0
_SIM_START_S = 2.0
_KEYS_AND_VALUES = 2
_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class Sizes:
    pools: tuple[int, int] = (64, 576)
    """KV blocks of two engines whose memory is compared once all blocks have been written."""
    fill_prompt_tokens: int = 1000
    fit_blocks: int = 96
    fit_context: int = 256
    """Tokens of each user in the check of how many fit."""
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class ModelShape:
    num_layers: int
    num_kv_heads: int
    head_dim: int

    def block_bytes(self, block_size: int, element_bytes: int) -> int:
        """Keys and values of `block_size` tokens in all layers."""
        return (
            self.num_layers
            * _KEYS_AND_VALUES
            * self.num_kv_heads
            * self.head_dim
            * block_size
            * element_bytes
        )

    def element_bytes(self, block_bytes: int, block_size: int) -> int:
        """The element size that explains `block_bytes`; 0 where none does."""
        for element_bytes in _ELEMENT_BYTES:
            if self.block_bytes(block_size, element_bytes) == block_bytes:
                return element_bytes
        return 0


@dataclass(frozen=True, slots=True)
class Footprint:
    """One engine as it describes itself, and as the system sees its process."""

    name: str
    start_s: float
    idle_bytes: int
    filled_bytes: int
    num_blocks: int
    block_size: int
    block_bytes: int
    max_num_seqs: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Fit:
    num_users: int
    predicted: int
    blocks_per_user: int
    ran_at_once: int
    num_preemptions: int

    @property
    def is_as_predicted(self) -> bool:
        """So many fit without preemption, and with more not all of them run undisturbed."""
        all_ran = self.ran_at_once == self.num_users and self.num_preemptions == 0
        return all_ran == (self.num_users <= self.predicted)


def blocks_needed(context_tokens: int, block_size: int) -> int:
    return -(-context_tokens // block_size)


def users_that_fit(num_blocks: int, block_size: int, context_tokens: int) -> int:
    """Users of so much context each, sharing nothing, that hold their blocks at the same time."""
    return num_blocks // blocks_needed(context_tokens, block_size)


def most_at_once(spans: Sequence[tuple[float, float]]) -> int:
    """The most spans that contain one moment."""
    return max(
        (sum(1 for a, b in spans if a <= start <= b) for start, _ in spans),
        default=0,
    )


def grown_bytes_per_block(small: Footprint, large: Footprint) -> float:
    """What each further block that holds work adds to the process."""
    grown = large.filled_bytes - small.filled_bytes
    return ratio(grown, large.num_blocks - small.num_blocks)


def build_report(
    shape: ModelShape,
    sizes: Sizes,
    sim: Footprint,
    pools: Sequence[Footprint],
    default: Footprint,
    fits: Sequence[Fit],
) -> Report:
    small, large = pools
    element_bytes = shape.element_bytes(default.block_bytes, default.block_size)
    by_formula = shape.block_bytes(default.block_size, element_bytes)
    grown = grown_bytes_per_block(small, large)
    return Report(
        name="memory",
        setting=f"{shape.num_layers} layers × keys and values × {shape.num_kv_heads} KV heads × "
        f"{shape.head_dim} dimensions × {default.block_size} tokens × {element_bytes} bytes = "
        f"{by_formula:,} bytes per KV block",
        tables=(
            _footprint_table([sim, small, large, default]),
            _users_table(default),
            _fit_table(fits, sizes),
        ),
        goals=(
            Goal(
                "bytes per KV block: engine ÷ formula",
                ratio(default.block_bytes, by_formula),
                "==",
                1,
            ),
            Goal(
                "bytes per KV block: what the process grows by ÷ what the engine says, off by",
                abs(ratio(grown, default.block_bytes) - 1),
                "<=",
                _TOLERANCE,
            ),
            Goal(
                "checks of how many users fit that came out as predicted",
                sum(fit.is_as_predicted for fit in fits),
                "==",
                len(fits),
            ),
            Goal("simulated engine, idle", sim.idle_bytes / 1e6, "<=", _SIM_MB, " MB"),
            Goal("simulated engine, start to ready", sim.start_s, "<=", _SIM_START_S, " s"),
        ),
        notes=(
            f"two engines whose pools differ by {large.num_blocks - small.num_blocks} blocks were "
            f"filled: their processes differ by {grown:,.0f} bytes per block",
            "users that fit: blocks in the pool ÷ blocks of one user's context, rounded down, and "
            "at most --max-num-seqs; users who share a prefix share its blocks, so more fit",
        ),
        figures={
            "idle_mb_sim": sim.idle_bytes / 1e6,
            "idle_mb_torch": default.idle_bytes / 1e6,
            "block_bytes": float(default.block_bytes),
            "grown_bytes_per_block": grown,
        },
    )


def _footprint_table(footprints: Sequence[Footprint]) -> Table:
    rows = tuple(
        (
            f.name,
            f.start_s,
            f.idle_bytes / 1e6,
            f.filled_bytes / 1e6,
            f.num_blocks,
            f.block_bytes,
            f.num_blocks * f.block_bytes / 1e6,
        )
        for f in footprints
    )
    columns = ("engine", "start s", "idle MB", "filled MB", "blocks", "bytes/block", "pool MB")
    return Table("Resident memory of one engine", columns, rows)


def _users_table(engine: Footprint) -> Table:
    rows = []
    for context_tokens in CONTEXTS:
        if context_tokens > engine.max_model_len:
            continue
        fit = users_that_fit(engine.num_blocks, engine.block_size, context_tokens)
        blocks = blocks_needed(context_tokens, engine.block_size)
        rows.append(
            (
                context_tokens,
                blocks,
                blocks * engine.block_bytes / 1e6,
                fit,
                min(fit, engine.max_num_seqs),
            )
        )
    columns = ("context tokens", "blocks", "MB per user", "fit in memory", "run at once")
    title = (
        f"Users of the default pool: {engine.num_blocks:,} blocks, "
        f"{engine.num_blocks * engine.block_size:,} tokens"
    )
    return Table(title, columns, tuple(rows))


def _fit_table(fits: Sequence[Fit], sizes: Sizes) -> Table:
    rows = tuple(
        (
            fit.num_users,
            fit.predicted,
            fit.ran_at_once,
            fit.num_preemptions,
            "yes" if fit.is_as_predicted else "NO",
        )
        for fit in fits
    )
    columns = ("users", "should fit", "ran at once", "preemptions", "as predicted")
    title = f"Check: a pool of {sizes.fit_blocks} blocks, {sizes.fit_context} tokens per user"
    return Table(title, columns, rows)
