"""A pool with engines that exist only as telemetry, for tests of the decision core."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from random import Random

from kvoy_contract.blocks import BlockHash, block_hashes, seed_hash, stride_hashes
from kvoy_router.endpoint import Endpoint, EngineInfo, LoadView
from kvoy_router.policies import make_policy
from kvoy_router.pool import Pool, PoolConfig
from kvoy_router.request import InferenceRequest

MODEL = "model"
STRIDE = 64
BLOCK_SIZE = 16
TOTAL_BLOCKS = 20_000
IDLE = LoadView(
    free_blocks=TOTAL_BLOCKS,
    total_blocks=TOTAL_BLOCKS,
    prefill_tokens_per_s=10_000.0,
    step_time_s=0.02,
)


def prompt_hashes(num_tokens: int, *texts: object, shared_tokens: int = 0) -> list[BlockHash]:
    """Of a prompt told apart by `texts`; the first `shared_tokens` depend on `texts[0]` alone."""
    first = Random(str(texts[:1]))
    rest = Random(str(texts))
    tokens = [first.randrange(50_000) for _ in range(shared_tokens)]
    tokens += [rest.randrange(50_000) for _ in range(num_tokens - shared_tokens)]
    return stride_hashes(block_hashes(seed_hash(MODEL), tokens, BLOCK_SIZE), BLOCK_SIZE, STRIDE)


class Fleet:
    """Engines `e0`, `e1`, ... of one model, idle and in sync unless told otherwise. Time stands at
    `now_s` until a test moves it."""

    def __init__(
        self,
        num_engines: int,
        policy: str = "kv-aware",
        *,
        seed: int = 0,
        config: PoolConfig | None = None,
        info: EngineInfo | None = None,
    ) -> None:
        random = Random(seed)
        self.now_s = 100.0
        self.pool = Pool("router", make_policy(policy, random), config=config, random=random)
        self.info = info or EngineInfo(
            epoch=b"first", served_model=MODEL, max_num_seqs=256, settles_by_number=True
        )
        self.loads: dict[str, LoadView] = {}
        for number in range(num_engines):
            self.add(f"e{number}")
        self._num_requests = 0

    def add(self, name: str, *, load: LoadView | None = IDLE) -> Endpoint:
        """`load` of None: an engine that has described itself and reported nothing yet."""
        endpoint = self.pool.add_endpoint(name)
        self.pool.on_describe(name, self.info, self.now_s)
        if load is not None:
            self.sync(name)
            self.report(name, load)
        return endpoint

    def sync(self, name: str, hashes: Sequence[BlockHash] = ()) -> None:
        self.pool.on_snapshot_begin(name, self.now_s)
        self.pool.on_snapshot_chunk(name, hashes, self.now_s)
        self.pool.on_snapshot_end(name, self.now_s)

    def report(self, name: str, load: LoadView | None = None, **changes: object) -> None:
        """A load report: `load`, or the last one, with `changes`."""
        load = load or self.loads.get(name, IDLE)
        self.loads[name] = dataclasses.replace(load, **changes)  # type: ignore[arg-type]
        self.pool.on_load(name, self.loads[name], self.now_s)

    def store(self, name: str, hashes: Sequence[BlockHash]) -> None:
        self.pool.on_blocks(name, (), hashes, False, self.now_s)

    def request(
        self, hashes: Sequence[BlockHash], num_tokens: int = 0, max_tokens: int | None = 100
    ) -> InferenceRequest:
        self._num_requests += 1
        return InferenceRequest(
            request_id=f"r{self._num_requests}",
            model=MODEL,
            num_prompt_tokens=num_tokens or len(hashes) * STRIDE,
            hashes=hashes,
            stride=STRIDE,
            max_tokens=max_tokens,
        )
