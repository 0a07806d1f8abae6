#!/usr/bin/env bash
# Run the suites that every device must pass on the device that ORBIT_DEVICE names (README.md beside this file).
#
#   ORBIT_DEVICE=mlx5_0 [ORBIT_PORT=1] [ORBIT_GID_INDEX=3] hardware/smoke.sh [--allow-software] [pytest options]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    printf 'smoke: %s\n' "$@" >&2
    exit 2
}

allow_software=no
if [ "${1:-}" = --allow-software ]; then
    allow_software=yes
    shift
fi

[ -n "${ORBIT_DEVICE:-}" ] || fail "set ORBIT_DEVICE to a device that ibv_devices lists"
readonly facts=/sys/class/infiniband/$ORBIT_DEVICE
[ -d "$facts" ] || fail "there is no device $ORBIT_DEVICE; there are:" "  $(ls /sys/class/infiniband 2>/dev/null || echo none)"
# A device without a bus device behind it is made of software (rxe, siw).
if [ ! -e "$facts/device" ] && [ $allow_software = no ]; then
    fail "$ORBIT_DEVICE is a software device; --allow-software runs it all the same"
fi
[ -x .venv/bin/python ] || fail "run make setup first"

status=0
.venv/bin/python -m pytest -p no:cacheprovider "$@" hardware || status=$?
.venv/bin/orbit demo --transport rdma --size 64MiB || status=$?

echo
echo "device    $ORBIT_DEVICE port ${ORBIT_PORT:-(best)} gid ${ORBIT_GID_INDEX:-(best)}"
echo "board     $(cat "$facts/board_id" 2>/dev/null || echo unknown), firmware $(cat "$facts/fw_ver" 2>/dev/null || echo unknown)"
echo "kernel    $(uname -r) $(uname -m)"
[ $status -eq 0 ] && echo "result    passed" || echo "result    FAILED ($status)"
exit $status
