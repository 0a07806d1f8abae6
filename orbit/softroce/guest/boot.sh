#!/bin/bash
# Runs as the guest's root: builds the layout, proves that RDMA works, then runs the command with
# its output on the virtio ports. Every line written to the pipe `status` reaches the host: "stage
# NAME TEXT", "fail NAME TEXT", "verified", "kill-peer" and "rc N".
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 HOME=/root
base=/run/orbit
control=$base/control
guest=$control/guest
. "$control/lab.env"

port() {
    local p name
    for p in /sys/class/virtio-ports/*; do
        read -r name <"$p/name"
        if [ "$name" = "orbit.$1" ]; then echo "/dev/${p##*/}"; return; fi
    done
    echo "orbit-boot: no port orbit.$1" >/dev/console
    echo /dev/null
}
# One port can be opened once only, so that a pipe stands before each: programs may open /dev/stdout
# again.
mkfifo $base/status $base/stdout $base/stderr
chmod 622 $base/status
exec 9<>$base/status
cat <&9 >"$(port status)" &
say() { printf '%s\n' "$*" >&9; }
# The host ends the machine when it has read the verdict; the long sleep is for a host that does
# not.
fail() { say "fail $1 ${*:2}"; sleep 20; exit; }
stage() { say "stage $*"; }

ip link set lo up
ulimit -l unlimited
ulimit -Hn 1048576
mkdir $base/bin
cp "$guest"/orbit-* $base/bin
chmod 755 $base/bin/*
cp "$guest/layout.sh" "$control/lab.env" /run/orbit
. $base/layout.sh

layout_check_modules
layout_up
layout_sabotage
layout_prove
layout_netem
say verified

forward() {  # pipe, port, file that tells when it is done
    local marker=$'\036orbit-end\036'
    { cat "$1"; printf %s "$marker"; } >"$2"
    : >"$3"
}
forward $base/stdout "$(port stdout)" $base/stdout.done &
forwarders=($!)
forward $base/stderr "$(port stderr)" $base/stderr.done &
forwarders+=($!)
(
    exec 9>&-
    while IFS= read -r -d '' assignment; do export "${assignment?}"; done <"$control/environ"
    export ORBIT_LAB ORBIT_LAB_HOSTS ORBIT_LAB_VMS ORBIT_LAB_RAILS ORBIT_RESULTS=$base/results
    export PATH=$base/bin:$PATH
    mapfile -d '' -t command <"$control/argv"
    directory=$(cat "$control/directory")
    cd "$directory" || exit 126
    exec "${command[@]}"
) >$base/stdout 2>$base/stderr </dev/null
rc=$?
# A background process of the command may keep the pipes open: its output after the command's end is
# not waited for.
for _ in $(seq 40); do
    [ -e $base/stdout.done ] && [ -e $base/stderr.done ] && break
    sleep 0.05
done
for forwarder in "${forwarders[@]}"; do  # end what is left: its cat, so that the marker follows
    child=
    { read -r child _ <"/proc/$forwarder/task/$forwarder/children"; } 2>/dev/null
    [ -z "$child" ] || kill "$child"
done
sync
say "rc $rc"
sleep 20
