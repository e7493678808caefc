"""`python -m kvoy_cluster`: a Kubernetes cluster on this machine, for people and for builds."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kvoy_cluster import build, standing
from kvoy_cluster.build import BuildError
from kvoy_cluster.cluster import why_not
from kvoy_cluster.namespaces import CommandError
from kvoy_cluster.standing import StandingError


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (BuildError, CommandError, StandingError) as error:
        print(f"kvoy_cluster: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvoy_cluster", description=__doc__)
    commands = parser.add_subparsers(required=True)

    up = commands.add_parser("up", help="start a cluster; prints its kubeconfig's path")
    up.add_argument("--nodes", type=int, default=2, choices=range(1, 10), metavar="N")
    up.set_defaults(run=_up)

    down = commands.add_parser("down", help="stop it, and remove every trace")
    down.set_defaults(run=lambda options: standing.stop())

    status = commands.add_parser("status", help="show its nodes and pods")
    status.set_defaults(run=lambda options: _kubectl(["get", "nodes,pods", "-A", "-o", "wide"]))

    kubectl = commands.add_parser("kubectl", help="run kubectl on it", add_help=False)
    kubectl.add_argument("arguments", nargs=argparse.REMAINDER)
    kubectl.set_defaults(run=lambda options: _kubectl(options.arguments))

    load = commands.add_parser("load", help="add the images of OCI or Docker archives to its nodes")
    load.add_argument("archives", nargs="+", type=Path)
    load.set_defaults(run=lambda options: standing.load(options.archives))

    building = commands.add_parser("build", help="build all programs that are not built yet")
    building.set_defaults(run=lambda options: build.build())

    hold = commands.add_parser("hold", help="be the process that owns a cluster, until SIGTERM")
    hold.add_argument("--nodes", type=int, required=True)
    hold.set_defaults(run=lambda options: standing.hold(options.nodes))
    return parser


def _up(options: argparse.Namespace) -> None:
    if reason := why_not():
        raise StandingError(reason)
    build.build()
    cluster = standing.start(options.nodes)
    print(f"{options.nodes} nodes are ready; for kubectl, helm and the like:")
    print(f"  export KUBECONFIG={cluster.kubeconfig}")
    print(f"  export PATH={Path(cluster.kubectl).parent}:$PATH")
    print("`make cluster-down` stops it.")


def _kubectl(arguments: Sequence[str]) -> None:
    cluster = standing.find()
    sys.stdout.flush()
    os.execv(cluster.kubectl, [cluster.kubectl, f"--kubeconfig={cluster.kubeconfig}", *arguments])


if __name__ == "__main__":
    sys.exit(main())
