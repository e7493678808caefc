#!/bin/bash
# The first process of a node's own mount, network and process namespaces; lives as long as the node.
# $1: the node's folder. Nothing that this does is seen outside of the namespaces.
set -euo pipefail
node=$1

# Kubelets share mounts with containers; util-linux has made them private to the namespace.
mount --make-rshared /
mount -t proc proc /proc
mount -t tmpfs tmpfs /run
mkdir -p "$node"/{kubelet,log} /var/lib/kubelet
mount --bind "$node/kubelet" /var/lib/kubelet
mount --bind "$node/log" /var/log

ip link set lo up
sysctl --quiet --write net.ipv4.ip_forward=1
touch "$node/ready"

trap 'exit 0' TERM
# Bash reaps the orphans meanwhile.
while :; do
  sleep 3600 &
  wait $! || true
done
