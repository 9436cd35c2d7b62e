#!/usr/bin/env bash
# A command (make test without one) on two cores beside six busy processes of others. Its exit status is that of the command.
set -uo pipefail
cd "$(dirname "$0")/.."
cores=$(taskset -pc $$ | sed 's/.*: //' | tr ',' '\n' \
    | awk -F- '{for (core = $1; core <= ($2 == "" ? $1 : $2); core++) print core}' | head -2 | paste -sd,)
busy=()
trap 'kill "${busy[@]}" 2>/dev/null' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
for _ in 1 2 3 4 5 6; do
    # ends with this script even when that is killed
    taskset -c "$cores" bash -c "while kill -0 $$ 2>/dev/null; do for _ in {1..100000}; do :; done; done" &
    busy+=($!)
done
[ $# -gt 0 ] || set -- make test
taskset -c "$cores" "$@"
