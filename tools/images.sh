#!/usr/bin/env bash
# Builds Kvoy's container images, and brings them to a cluster.
#
#   tools/images.sh build [NAME...]       by docker, podman or buildah, whichever is there
#   tools/images.sh load kind [NAME...]   what was built, into a kind cluster
#   tools/images.sh load containerd [NAME...]   into this machine's containerd, for Kubernetes
#   tools/images.sh archives [NAME...]    as OCI archives, without any image registry: prints paths
#
# A NAME is operator, router, engine-sim, engine-cpu or engine-cuda; without one: the first three and
# engine-cpu. `archives` also takes NAME=DOCKERFILE for an image of somebody else's.
#
# Variables: BASE_IMAGE (what the images stand on), TORCH_INDEX (a package index for torch alone),
# IMAGE_REGISTRY and IMAGE_TAG (what they are called), BUILDER, KIND_CLUSTER, CONTAINERD_ADDRESS.
#
# `archives` is for tests and for machines without a registry. It makes its base of Debian packages,
# builds by buildah as root with the machine's own CA certificates, package index settings and uv
# cache, none of which gets into an image, and keeps everything in ~/.cache/kvoy/images: an archive is
# made again only when what it is made of has changed, and layers whose inputs stay are reused.
# Delete that folder for a fresh base.
set -euo pipefail
cd "$(dirname "$0")/.."

registry=${IMAGE_REGISTRY:-localhost/kvoy}
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
tag=${IMAGE_TAG:-$version}
default_names=(operator router engine-sim engine-cpu)
cache=${KVOY_HOME:-$HOME/.cache/kvoy}/images

fail() {
  echo "images: $*" >&2
  exit 1
}

reference_of() {
  case $1 in
    engine-*) echo "$registry/engine:$tag-${1#engine-}" ;;
    *) echo "$registry/$1:$tag" ;;
  esac
}

dockerfile_of() {
  local file=deploy/docker/$1.Dockerfile
  [[ $1 == *=* ]] && file=${1#*=}
  [ -f "$file" ] || fail "there is no $file"
  echo "$file"
}

# The first of docker, podman and buildah that works: a docker client alone is not enough.
find_builder() {
  if [ -n "${BUILDER:-}" ]; then
    echo "$BUILDER"
  elif docker version > /dev/null 2>&1; then
    echo docker
  elif command -v podman > /dev/null; then
    echo podman
  elif command -v buildah > /dev/null; then
    echo buildah
  else
    fail "this takes docker, podman or buildah"
  fi
}

build_arguments() {
  local arguments=(--build-arg "VERSION=$version")
  [ -z "${BASE_IMAGE:-}" ] || arguments+=(--build-arg "BASE_IMAGE=$BASE_IMAGE")
  [ -z "${TORCH_INDEX:-}" ] || arguments+=(--build-arg "TORCH_INDEX=$TORCH_INDEX")
  printf '%s\n' "${arguments[@]}"
}

build() {
  local builder name arguments
  builder=$(find_builder)
  mapfile -t arguments < <(build_arguments)
  [ "$builder" = docker ] || arguments+=(--layers)
  for name in "$@"; do
    echo "images: $(reference_of "$name") by $builder"
    "$builder" build "${arguments[@]}" --file "$(dockerfile_of "$name")" \
      --tag "$(reference_of "$name")" .
  done
}

load() {
  local target=$1 builder folder name reference
  shift
  builder=$(find_builder)
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  for name in "$@"; do
    reference=$(reference_of "$name")
    case $builder in
      docker) docker save --output "$folder/image.tar" "$reference" ;;
      podman) podman save --format oci-archive --output "$folder/image.tar" "$reference" ;;
      buildah) buildah push --quiet "$reference" "oci-archive:$folder/image.tar:$reference" ;;
    esac
    case $target in
      kind) kind load image-archive "$folder/image.tar" --name "${KIND_CLUSTER:-kvoy}" ;;
      containerd)
        ctr --address "${CONTAINERD_ADDRESS:-/run/containerd/containerd.sock}" \
          --namespace k8s.io images import "$folder/image.tar"
        ;;
      *) fail "load takes kind or containerd, not '$target'" ;;
    esac
    rm "$folder/image.tar"
  done
}

# buildah with a store of its own, so that deleting the cache folder leaves nothing behind.
own_buildah() {
  TMPDIR=$cache/tmp buildah --root "$cache/store" --runroot "$cache/run" --storage-driver overlay "$@"
}

ensure_base() {
  own_buildah inspect --type image kvoy-base > /dev/null 2>&1 && return
  echo "images: a base of Debian packages" >&2
  mmdebstrap --quiet --variant=minbase --include=python3,python3-venv,ca-certificates \
    bookworm "$cache/tmp/base.tar" >&2
  local container
  container=$(own_buildah from scratch)
  own_buildah add --quiet "$container" "$cache/tmp/base.tar" / > /dev/null
  own_buildah commit --quiet "$container" kvoy-base > /dev/null
  own_buildah rm "$container" > /dev/null
  rm "$cache/tmp/base.tar"
}

# Layers of images that are no more, unless they are of today: the next build may well go on from them.
forget_old_layers() {
  local oldest id day
  oldest=$(date --utc --date='1 day ago' '+%Y-%m-%d')
  own_buildah images --filter dangling=true --format '{{.ID}} {{.CreatedAtRaw}}' |
    while read -r id day _; do
      [ -z "$id" ] || [[ ! $day < $oldest ]] || own_buildah rmi "$id" > /dev/null
    done
}

# A digest of all that an image is made of, the base and this machine's settings apart.
content_key() {
  local dockerfile=$1 reference=$2
  {
    echo "$reference $version ${BASE_IMAGE:-} ${TORCH_INDEX:-}"
    sha256sum "$dockerfile" .dockerignore pyproject.toml README.md LICENSE
    find contract engine router operator simulate cli -type f -not -path '*/__pycache__/*' -print0 |
      sort --zero-terminated | xargs --null sha256sum
  } | sha256sum | cut -c 1-20
}

archive() {
  local given=$1 name=${1%%=*} dockerfile reference folder container arguments
  dockerfile=$(dockerfile_of "$given")
  reference=$(reference_of "$name")
  folder=$cache/$name/$(content_key "$dockerfile" "$reference")
  if [ ! -f "$folder/image.tar" ]; then
    echo "images: $reference as an archive" >&2
    ensure_base
    mapfile -t arguments < <(BASE_IMAGE=${BASE_IMAGE:-kvoy-base} build_arguments)
    # No registry, no container network: the build sees the machine's network and certificates.
    arguments+=(--layers --isolation chroot --network host
      --volume /etc/ssl/certs:/etc/ssl/certs:ro --volume "$uv_cache:/var/cache/uv")
    for file in /etc/pip.conf /root/.config/pip/pip.conf /root/.config/uv/uv.toml; do
      [ ! -f "$file" ] || arguments+=(--volume "$file:$file:ro")
    done
    own_buildah build "${arguments[@]}" --file "$dockerfile" --tag "$reference" . > "$cache/$name.log" 2>&1 ||
      { tail -n 30 "$cache/$name.log" >&2 && fail "cannot build $reference: see $cache/$name.log"; }
    mkdir -p "$folder"
    # Older archives of the same image, unless somebody may be reading them.
    find "$cache/$name" -mindepth 1 -maxdepth 1 -not -path "$folder" -mmin +60 -exec rm -rf {} +
    forget_old_layers
    container=$(own_buildah from "$reference")
    # Not compressed: containers start from it on this machine.
    own_buildah commit --quiet --disable-compression "$container" \
      "oci-archive:$folder/unfinished.tar:$reference" > /dev/null
    own_buildah rm "$container" > /dev/null
    mv "$folder/unfinished.tar" "$folder/image.tar"
  fi
  echo "$folder/image.tar"
}

archives() {
  local name
  for name in buildah mmdebstrap; do
    command -v "$name" > /dev/null || fail "archives take $name (Debian: apt install $name)"
  done
  uv_cache=${UV_CACHE_DIR:-$HOME/.cache/uv}
  mkdir -p "$cache/tmp" "$uv_cache"
  exec 9> "$cache/lock"
  flock 9
  # What a run that was ended has left: its layers could not be removed else.
  own_buildah rm --all > /dev/null
  for name in "$@"; do
    archive "$name"
  done
}

command=${1:-}
case $command in
  build | archives) shift 1 ;;
  load) target=${2:?load takes kind or containerd} && shift 2 ;;
  *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
esac
[ $# -gt 0 ] || set -- "${default_names[@]}"
case $command in
  load) load "$target" "$@" ;;
  *) "$command" "$@" ;;
esac
