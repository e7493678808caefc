"""The settings of `kvoy bench soak`."""

from __future__ import annotations

from dataclasses import dataclass

from kvoy_contract.settings import setting

NAMES = ("streams", "prompts")
_DURATIONS_S = {"streams": 600.0, "prompts": 3600.0}
_RATES = {"streams": 20_000.0, "prompts": 15.0}
_WARMUP_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class SoakConfig:
    name: str = setting(
        positional=True,
        choices=NAMES,
        help="streams: many open streams whose every chunk is checked; prompts: prompts that "
        "nobody has sent before, until all that a router remembers is full",
    )
    duration: float | None = setting(
        None, help="seconds of load (default: 600 for streams, 3600 for prompts)"
    )
    warmup: float | None = setting(
        None,
        help="of these, seconds until memory counts (default: a quarter of the duration; streams: "
        "twice the time of the longest one, if that is more and leaves half; prompts: until all "
        "caches are full as well)",
    )
    streams: int = setting(5000, help="streams that are open at once (streams)")
    rate: float | None = setting(
        None,
        help="chunks per second of all streams (default 20000), or prompts per second (default 15)",
    )
    chunks: int = setting(
        240, help="chunks of a stream, in the mean; the longest have half as many again (streams)"
    )
    prompt_tokens: int = setting(1500, help="tokens of a prompt, about (prompts)")
    model: str = setting(
        "smollm2-135m-instruct",
        help="whose tokenizer the router gets; bytes: one token for each byte, no model needed",
    )
    json: bool = setting(False, help="print JSON instead of tables")
    check: bool = setting(False, help="exit 1 where a goal is missed")
    output: str | None = setting(None, metavar="FILE", help="also write the JSON to this file")
    logs: str | None = setting(
        None,
        metavar="FOLDER",
        help="keep the logs of all processes here (default: a temporary folder)",
    )

    def __post_init__(self) -> None:
        for name in ("duration", "rate", "streams", "chunks", "prompt_tokens"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0, not {value}")
        if not 0 <= self.warmup_s < self.duration_s:
            raise ValueError(
                f"--warmup must be from 0 to less than the duration of {self.duration_s:g}, not "
                f"{self.warmup_s:g}"
            )

    @property
    def duration_s(self) -> float:
        return _DURATIONS_S[self.name] if self.duration is None else self.duration

    @property
    def warmup_s(self) -> float:
        if self.warmup is not None:
            return self.warmup
        warmup_s = _WARMUP_SHARE * self.duration_s
        if self.name == "streams":
            # From then on as much of old streams is remembered at any time as at any other.
            two_lives_s = 2 * 1.5 * self.chunks * self.streams / self.per_s
            warmup_s = max(warmup_s, min(two_lives_s, self.duration_s / 2))
        return warmup_s

    @property
    def per_s(self) -> float:
        return _RATES[self.name] if self.rate is None else self.rate
