#!/usr/bin/env bash
# Runs all checks and all tests, and says how long each part took.
#
#   tools/test.sh [OPTIONS OF PYTEST...]
#
# Tests that mostly wait run side by side, WORKERS at a time (default 4). Those of containers come
# after them and one at a time: they have the machine for themselves. Each of the two says what
# failed; the end is a failure when either has failed. A test that hangs fails after ten minutes
# (pyproject.toml); LIMIT (default 40m, for each of the two) is a net below that.
set -euo pipefail
cd "$(dirname "$0")/.."

make=(make --no-print-directory)
pytest=(timeout --foreground --signal=INT --kill-after=2m "${LIMIT:-40m}" .venv/bin/python -m pytest)
readonly no_tests=5  # pytest's status when nothing was selected
table=()

# Runs a command and notes its time. Its status is the command's.
part() {
  local name=$1 start=$SECONDS status=0
  shift
  "$@" || status=$?
  table+=("$(printf '%6d s  %s' $((SECONDS - start)) "$name")")
  return $status
}

summary() {
  local status=$? line
  echo
  echo "seconds by part:"
  for line in "${table[@]}"; do
    echo "$line"
  done
  printf '%6d s  in all\n' "$SECONDS"
  exit $status
}
trap summary EXIT

part "packages of Debian" "${make[@]}" system-packages
part "packages of Python" "${make[@]}" .venv/stamps/dev
part "format, lint, types, layers" "${make[@]}" lint
part "model" "${make[@]}" model
part "programs of the test cluster" "${make[@]}" cluster-programs

statuses=()
side_by_side() {
  "${pytest[@]}" --containers=without --numprocesses="${WORKERS:-4}" --dist=worksteal "$@"
}
one_at_a_time() {
  "${pytest[@]}" --containers=only "$@"
}
for pass in side_by_side one_at_a_time; do
  status=0
  part "tests ${pass//_/ }" "$pass" "$@" || status=$?
  statuses+=("$status")
done

# Options may well leave one of the two without tests, but not both.
[ "${statuses[*]}" != "$no_tests $no_tests" ] || exit $no_tests
for status in "${statuses[@]}"; do
  [ "$status" -eq 0 ] || [ "$status" -eq $no_tests ] || exit "$status"
done
