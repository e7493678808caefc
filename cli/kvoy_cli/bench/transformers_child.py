"""The baseline of the engine: transformers' own `generate`, in a process of its own.

`python -m kvoy_cli.bench.transformers_child FOLDER DTYPE THREADS` reads one JSON object per line
({"prompt_ids", "max_new_tokens"}) and answers each with {"seconds", "token_ids", "margins"}:
what `generate` took, what it chose greedily, and how far apart the two best logits were at each
position.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvoy_cli.bench.processes import BenchError, Child, child

_LOAD_S = 180.0
_GENERATE_S = 300.0


@dataclass(frozen=True, slots=True)
class Generated:
    seconds: float
    token_ids: list[int]
    margins: list[float]


class Transformers:
    """The parent's side of the conversation."""

    def __init__(self, process: Child) -> None:
        self._child = process

    async def generate(self, prompt_ids: Sequence[int], max_new_tokens: int) -> Generated:
        """Exactly `max_new_tokens` greedy tokens. Raises BenchError when the child fails."""
        request = {"prompt_ids": list(prompt_ids), "max_new_tokens": max_new_tokens}
        return Generated(**await self._ask(json.dumps(request), _GENERATE_S))

    async def wait_loaded(self) -> None:
        await self._ask(None, _LOAD_S)

    async def _ask(self, line: str | None, limit_s: float) -> dict[str, Any]:
        stdin, stdout = self._child.process.stdin, self._child.process.stdout
        assert stdin is not None
        assert stdout is not None
        if line is not None:
            stdin.write(line.encode() + b"\n")
            stdin.flush()
        try:
            async with asyncio.timeout(limit_s):
                answer = await asyncio.to_thread(stdout.readline)
        except TimeoutError:
            self._child.process.kill()  # the thread that reads ends with the pipe
            raise self._child.failure(f"said nothing for {limit_s:.0f} s") from None
        if not answer:
            raise self._child.failure("ended early")
        value: dict[str, Any] = json.loads(answer)
        return value


@asynccontextmanager
async def transformers(
    folder: Path, dtype: str, num_threads: int, logs: Path
) -> AsyncIterator[Transformers]:
    command = [sys.executable, "-m", "kvoy_cli.bench.transformers_child"]
    command += [str(folder), dtype, str(num_threads)]
    env = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(num_threads)}
    name = f"transformers-{dtype}-{folder.name}"
    pipe = subprocess.PIPE
    async with child(name, command, logs, env, stdin=pipe, stdout=pipe) as process:
        baseline = Transformers(process)
        await baseline.wait_loaded()
        yield baseline


def _serve(folder: str, dtype: str, num_threads: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(num_threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.eval()
    model.generation_config.eos_token_id = None
    _say({"loaded": True})
    for line in sys.stdin:
        request = json.loads(line)
        _say(_generate(model, request["prompt_ids"], request["max_new_tokens"]))


def _generate(model: Any, prompt_ids: list[int], max_new_tokens: int) -> dict[str, Any]:
    import torch

    ids = torch.tensor([prompt_ids])
    start_s = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    seconds = time.perf_counter() - start_s
    best = [torch.topk(logits[0].double(), 2).values for logits in out.logits]
    return {
        "seconds": seconds,
        "token_ids": out.sequences[0, len(prompt_ids) :].tolist(),
        "margins": [float(pair[0] - pair[1]) for pair in best],
    }


def _say(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(BenchError("usage: transformers_child FOLDER DTYPE THREADS"))
    _serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))
