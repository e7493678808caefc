"""The settings of the comparison."""

from __future__ import annotations

from dataclasses import dataclass

from kvoy_contract.settings import setting
from kvoy_peers.catalogue import PEERS

PARTS = ("cost", "placement")
_NAMES = tuple(peer.name for peer in PEERS)


@dataclass(frozen=True, slots=True)
class PeersConfig:
    peers: tuple[str, ...] = setting(
        _NAMES, help=f"whom to compare with, of: {', '.join(_NAMES)}; nobody: `none`"
    )
    parts: tuple[str, ...] = setting(
        PARTS,
        help="cost: CPU, time added and memory, on stand-in engines; placement: hit rate, "
        "spread and TTFT, on simulated engines",
    )
    model: str = setting(
        "smollm2-135m-instruct", help="whose tokenizer and chat template the cost part uses"
    )
    repeats: int = setting(3, help="repeats of each measurement of cost; figures are medians")
    check: bool = setting(False, help="exit 1 where a goal is missed")
    json: bool = setting(False, help="print JSON instead of tables")
    output: str | None = setting(None, metavar="FILE", help="also write the JSON to this file")
    logs: str | None = setting(
        None, metavar="FOLDER", help="keep the logs of all processes here (default: temporary)"
    )
    environments: str | None = setting(
        None,
        metavar="FOLDER",
        help="where the peers' environments are kept (default: ~/.cache/kvoy/peers)",
    )
    limit: float = setting(2400.0, help="seconds after which all of it is given up")
    smoke: bool = setting(False, help="tiny sizes; the figures mean nothing")

    def __post_init__(self) -> None:
        for name in self.peers:
            if name not in (*_NAMES, "none"):
                raise ValueError(f"--peers knows {', '.join(_NAMES)}, not {name!r}")
        for part in self.parts:
            if part not in PARTS:
                raise ValueError(f"--parts knows {' and '.join(PARTS)}, not {part!r}")
        if self.repeats < 1:
            raise ValueError(f"--repeats must be at least 1, not {self.repeats}")
        if self.limit <= 0:
            raise ValueError(f"--limit must be above 0, not {self.limit}")
