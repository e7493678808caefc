"""An operator as a child process over a real API server, with exactly its chart's rights."""

from kvoy_operated.kubelet import PretendedKubelet
from kvoy_operated.operator_process import OperatorProcess
from kvoy_operated.site import Site

__all__ = ["OperatorProcess", "PretendedKubelet", "Site"]
