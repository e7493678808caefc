"""The limits of an engine's core, validated once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """Raises ValueError, naming the field, when a value cannot work."""

    num_blocks: int
    """KV blocks of the runner."""
    max_model_len: int
    """Tokens of prompt and output together. A pool that holds less lowers it: see `token_limit`."""
    block_size: int = 16
    """Tokens per block."""
    hash_stride: int = 64
    """Tokens per reported hash: routers need no finer index."""
    max_num_seqs: int = 256
    """Sequences that run at once."""
    max_num_batched_tokens: int = 8192
    """Tokens of one step, decodes and prefill chunks together. At least `max_num_seqs`, so that
    every running sequence can decode in every step."""
    max_waiting: int = 1024
    """Sequences that wait; when so many do, further requests are refused as saturated. Preempted
    ones return to the queue regardless."""
    enable_prefix_caching: bool = True
    interference_ratio: float = 2.22
    """While sequences stream, a step with prefill chunks takes at most so many times the estimated
    time of its decodes alone. Leaves about half of the time to prefill, and room for slow steps
    below a threefold gap. 0: no bound."""
    max_step_s: float = 1.0
    """Estimated seconds that a step with prefill chunks may take. Commands are heard between steps,
    so on machines that prefill slowly this bounds how late an abort frees its blocks and how long a
    short prompt waits for a long one's chunk. 0: no bound."""
    background_ratio: float = 1.75
    """As `interference_ratio`, for prompts of less important requests while more important ones
    come, and whether or not anything streams: who comes during a step waits for its end. 0: no
    bound."""
    min_chunk_tokens: int = 2
    """The first prefill of a step makes at least this progress, whatever the bound says."""
    headroom_blocks: int = 2
    """Blocks for each running sequence that admitting another leaves available: without such room
    the next decodes would preempt what was just admitted. More means fewer preemptions and smaller
    batches."""
    watermark: float = 0.01
    """Share of all blocks that an admission leaves available besides."""

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_waiting", "min_chunk_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, not {self.max_model_len}")
        if self.hash_stride < 1 or self.hash_stride % self.block_size:
            raise ValueError(
                f"hash_stride must be a multiple of block_size {self.block_size}, "
                f"not {self.hash_stride}"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} must be at least "
                f"max_num_seqs {self.max_num_seqs}"
            )
        for name in ("interference_ratio", "background_ratio"):
            ratio = getattr(self, name)
            if ratio and ratio <= 1:
                raise ValueError(f"{name} must be above 1, or 0: no bound; not {ratio}")
        if self.max_step_s < 0:
            raise ValueError(f"max_step_s must be at least 0, not {self.max_step_s}")
        if self.headroom_blocks < 0:
            raise ValueError(f"headroom_blocks must be at least 0, not {self.headroom_blocks}")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark must be in 0 .. 1, not {self.watermark}")

    @property
    def token_limit(self) -> int:
        """Tokens that one sequence can have: what the model and what the whole pool holds."""
        return min(self.max_model_len, self.num_blocks * self.block_size)
