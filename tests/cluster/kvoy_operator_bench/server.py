"""The first layer of a test cluster, made for load: controllers without narrow limits of their own,
and an API server that writes down every call that changes something."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from kvoy_cluster.api_server import ApiServer
from kvoy_operator_bench.audit import POLICY

# A limit on the controllers' calls would be measured as the operator's slowness.
_UNLIMITED = ("--kube-api-qps=5000", "--kube-api-burst=10000")
# They take memory for time, and leave more of a small machine to the operator.
_LESS_COLLECTION = {"GOGC": "400"}


class BenchServer(ApiServer):
    @property
    def audit_log(self) -> Path:
        return self.folder / "audit.jsonl"

    def _start_part(self, name: str, argv: Sequence[str | Path]) -> None:
        more = self._more_arguments(name)
        self.processes.start(name, [*argv, *more], environment=_LESS_COLLECTION)

    def _more_arguments(self, name: str) -> Sequence[str]:
        if name == "kube-controller-manager":
            return _UNLIMITED
        if name != "kube-apiserver":
            return ()
        policy = self.folder / "audit-policy.json"
        policy.write_text(json.dumps(POLICY))
        return (f"--audit-policy-file={policy}", f"--audit-log-path={self.audit_log}")
