"""The settings of `kvoy bench`: one frozen value each for the named benchmarks and for `run`."""

from __future__ import annotations

from dataclasses import dataclass

from kvoy_contract.settings import setting

NAMES = (
    "conversation",
    "batching",
    "interference",
    "shared-prefix",
    "router-cost",
    "memory",
    "equality",
    "index",
    "reports",
    "tokenise",
    "calibrate",
)
RUN_WORKLOADS = ("short", "no-reuse", "shared-prefix", "conversation")
MIN_REPEATS = 5


@dataclass(frozen=True, slots=True)
class BenchConfig:
    name: str = setting(
        positional=True,
        choices=(*NAMES, "all"),
        help=f"one of {', '.join(NAMES)}; all: one after the other; run: load on an endpoint of "
        "yours, see `kvoy bench run --help`",
    )
    model: str = setting(
        "smollm2-135m-instruct",
        help="name, folder, GGUF file or hf://org/name@revision of the model that engines serve",
    )
    repeats: int = setting(
        MIN_REPEATS,
        help="repeats of each measurement; figures are medians, ratios are of neighbouring repeats",
    )
    json: bool = setting(False, help="print JSON instead of tables")
    check: bool = setting(
        False, help="exit 1 where a goal is missed, naming the goal and the figure"
    )
    output: str | None = setting(
        None, metavar="FILE", help="also write the JSON to this file, after each benchmark"
    )
    logs: str | None = setting(
        None,
        metavar="FOLDER",
        help="keep the logs of engines and routers here (default: a temporary folder)",
    )
    limit: float = setting(2400.0, help="seconds that one benchmark may take before it is given up")
    smoke: bool = setting(
        False, help="tiny sizes, to see that a benchmark runs here; its figures mean nothing"
    )

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"--repeats must be at least 1, not {self.repeats}")
        if self.limit <= 0:
            raise ValueError(f"--limit must be above 0, not {self.limit}")


@dataclass(frozen=True, slots=True)
class RunConfig:
    url: str = setting(
        "http://127.0.0.1:8000", help="base URL of an OpenAI endpoint, with or without /v1"
    )
    served_model: str | None = setting(
        None, help="the model's name in requests (default: the first that the endpoint lists)"
    )
    workload: str = setting(
        "short",
        choices=RUN_WORKLOADS,
        help="short and no-reuse: prompts that share nothing; shared-prefix: groups of questions; "
        "conversation: chats whose history grows (takes --concurrency)",
    )
    rate: float | None = setting(
        None, help="requests per second, Poisson arrivals that do not wait for answers"
    )
    concurrency: int | None = setting(
        None, help="users that each wait for their answer before the next request"
    )
    duration: float = setting(30.0, help="seconds of load")
    prompt_tokens: int = setting(64, help="tokens of a prompt (of a prefix: five times as many)")
    output_tokens: int = setting(64, help="tokens of an answer; end tokens are ignored")
    seed: int = setting(0, help="fixes arrivals and prompts")
    ignore_eos: bool = setting(
        True, help="send ignore_eos, so that answers have their full length; vLLM and Kvoy know it"
    )
    json: bool = setting(False, help="print JSON instead of a table")

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.concurrency is None):
            raise ValueError("give one of --rate and --concurrency")
        if self.workload == "conversation" and self.concurrency is None:
            raise ValueError("--workload conversation takes --concurrency, not --rate")
        for name in ("rate", "concurrency", "duration", "prompt_tokens", "output_tokens"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0, not {value}")
