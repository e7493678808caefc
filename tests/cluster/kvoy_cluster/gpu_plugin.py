"""A device plugin that offers GPUs which do not exist, to one kubelet.

Runs inside a node: `python -m kvoy_cluster.gpu_plugin COUNT [HOST_PATH:CONTAINER_PATH ...]`. Each
container that is given GPUs sees their ids in NVIDIA_VISIBLE_DEVICES, and the paths read-only.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from kvoy_cluster.node_config import GPU_RESOURCE

_FOLDER = Path("/var/lib/kubelet/device-plugins")
_SOCKET = "fake-gpus.sock"
_VERSION = "v1beta1"
_REGISTER_TIMEOUT_S = 10.0
_CHECK_INTERVAL_S = 0.5

# Made from the .proto when this module is loaded, as nothing but this fake needs them.
_messages, _services = grpc.protos_and_services("kvoy_cluster/device_plugin.proto")


class FakeGpus(_services.DevicePluginServicer):  # type: ignore[misc,name-defined]
    def __init__(self, count: int, mounts: Sequence[tuple[str, str]]) -> None:
        """`mounts`: pairs of a path on the node and one in containers."""
        self._ids = [f"gpu-{number}" for number in range(count)]
        self._mounts = [
            _messages.Mount(host_path=host, container_path=container, read_only=True)
            for host, container in mounts
        ]
        self.ended = threading.Event()
        """Set when the kubelet is gone, and its streams with it."""

    def GetDevicePluginOptions(self, request: Any, context: Any) -> Any:
        return _messages.DevicePluginOptions()

    def ListAndWatch(self, request: Any, context: Any) -> Iterator[Any]:
        context.add_callback(self.ended.set)
        devices = [_messages.Device(ID=id, health="Healthy") for id in self._ids]
        yield _messages.ListAndWatchResponse(devices=devices)
        self.ended.wait()

    def Allocate(self, request: Any, context: Any) -> Any:
        return _messages.AllocateResponse(
            container_responses=[
                _messages.ContainerAllocateResponse(
                    envs={"NVIDIA_VISIBLE_DEVICES": ",".join(container.devices_ids)},
                    mounts=self._mounts,
                )
                for container in request.container_requests
            ]
        )


def _serve_one_kubelet(count: int, mounts: Sequence[tuple[str, str]]) -> None:
    """Registers with the kubelet that runs now, and serves it until it ends."""
    gpus = FakeGpus(count, mounts)
    server = grpc.server(ThreadPoolExecutor(max_workers=4))
    _services.add_DevicePluginServicer_to_server(gpus, server)
    server.add_insecure_port(f"unix:{_FOLDER / _SOCKET}")
    server.start()
    request = _messages.RegisterRequest(
        version=_VERSION, endpoint=_SOCKET, resource_name=GPU_RESOURCE
    )
    with grpc.insecure_channel(f"unix:{_FOLDER}/kubelet.sock") as channel:
        registration = _services.RegistrationStub(channel)
        registration.Register(request, timeout=_REGISTER_TIMEOUT_S, wait_for_ready=True)
    gpus.ended.wait()
    server.stop(grace=None).wait()


def main() -> None:
    count = int(sys.argv[1])
    mounts = [(host, container) for host, _, container in map(_split, sys.argv[2:])]
    while True:
        try:
            _serve_one_kubelet(count, mounts)
        except grpc.RpcError as error:
            # The kubelet is starting: it removes the sockets of all plugins, then listens.
            print(error, flush=True)
        threading.Event().wait(_CHECK_INTERVAL_S)


def _split(mount: str) -> tuple[str, str, str]:
    return mount.partition(":")


if __name__ == "__main__":
    main()
