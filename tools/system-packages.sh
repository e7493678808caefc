#!/usr/bin/env bash
# Installs the Debian packages that the tests and the test cluster need, where they are missing.
#
#   tools/system-packages.sh           needs root and Debian (or a relative with apt); else it only says what is missing
#
# No service that comes with a package is started: the tests start what they need themselves.
set -euo pipefail

# What is needed -> the package that has it. What is there counts, wherever it came from: a machine
# with Docker has a containerd that Debian's package would replace.
needs=(
  containerd=containerd
  runc=runc
  /usr/lib/cni/ptp=containernetworking-plugins
  ip=iproute2
  iptables=iptables
  nft=nftables
  conntrack=conntrack
  ethtool=ethtool
  socat=socat
  sysctl=procps
  setpriv=util-linux
  buildah=buildah
  mmdebstrap=mmdebstrap
  prometheus=prometheus
  prometheus-alertmanager=prometheus-alertmanager
)

missing=()
PATH=$PATH:/usr/sbin:/sbin
for need in "${needs[@]}"; do
  command -v "${need%%=*}" >/dev/null || missing+=("${need#*=}")
done
if [ ${#missing[@]} -eq 0 ]; then
  exit 0
fi
if ! command -v apt-get >/dev/null || [ "$(id -u)" -ne 0 ]; then
  echo "not installed, as that needs root and apt: ${missing[*]}; tests that need them are skipped or fail"
  exit 0
fi

# What Debian's packages ask before they start a service; an answer that is there already stays.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  trap 'rm -f "$policy"' EXIT
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod 755 "$policy"
fi

echo "installing packages: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update --quiet=2
apt-get install --quiet=2 --yes --no-install-recommends "${missing[@]}" >/dev/null
