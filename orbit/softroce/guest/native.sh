#!/bin/bash
# native.sh check|up|down: the lab's layout on the running kernel, in the first network namespace.
# "check" makes sure that "down" will remove nothing but what "up" made; "up" prints the same status
# lines as a guest. This folder is the base.
base=$(dirname "$(readlink -f "$0")")
guest=$base/bin
. "$base/lab.env"
say() { printf '%s\n' "$*"; }
stage() { say "stage $*"; }
# The message may come from a subshell of a pipeline: the whole script has to end.
fail() { say "fail $1 ${*:2}"; kill $$; exit 1; }
. "$base/layout.sh"

case $1 in
check)
    while read -r rdma net; do
        for path in /sys/class/infiniband/$rdma /sys/class/net/$net; do
            [ ! -e "$path" ] || fail layout "$path exists already: is another lab running?"
        done
    done < <(rail_devices)
    for host in A B; do
        [ ! -e /run/netns/$host ] || fail layout "network namespace $host exists already"
    done ;;
up)
    layout_check_modules
    layout_up
    layout_prove
    layout_netem
    say verified ;;
down) layout_down ;;
esac
exit 0
