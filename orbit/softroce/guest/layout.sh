# Sourced by boot.sh (in a guest) and native.sh (on the running kernel), which define stage() and
# fail() and set base, LAYOUT, ROLE, RAILS, NUMA, MTU, NETEM and SABOTAGE. Builds and removes the lab's net devices, RDMA
# devices and hosts.
#
# Net devices stay in the first network namespace: rdma_rxe of Linux 6.1 sends and receives nowhere
# else. In the layout "pair" the two ends of each veth are one kernel's, so that policy routing has
# to push the packets through the link.

rail_devices() {  # prints "RDMA-device net-device" per line, for the devices of this kernel
    local n
    case $LAYOUT in
    single) for ((n = 0; n < RAILS; n++)); do echo "rxe$n roce$n"; done ;;
    pair) for ((n = 1; n <= RAILS; n++)); do echo "rxa$n a$n"; echo "rxb$n b$n"; done ;;
    machines) for ((n = 1; n <= RAILS; n++)); do echo "rx${ROLE,,}$n ${ROLE,,}$n"; done ;;
    esac
}

layout_check_modules() {
    [ -d /sys/module/rdma_rxe ] || modprobe rdma_rxe 2>/dev/null
    [ -d /sys/module/rdma_rxe ] ||
        fail kernel-module "rdma_rxe is not loaded in kernel $(uname -r):" \
            "the plain distribution kernel has it, a cloud flavour does not"
    [ -d /sys/module/ib_uverbs ] || fail kernel-module "ib_uverbs is not loaded: no /dev/infiniband"
    stage kernel-module "rdma_rxe in $(uname -r)"
}

add_rxe() {  # reads "RDMA-device net-device" lines; arguments are a prefix for the command
    local rdma net text
    while read -r rdma net; do
        text=$("$@" rdma link add "$rdma" type rxe netdev "$net" 2>&1) && continue
        grep -q '^name *: *crc32$' /proc/crypto ||
            fail kernel-module "the kernel has no crc32 (module crc32_generic)," \
                "which rdma_rxe needs: $text"
        fail device "rdma link add $rdma type rxe netdev $net: $text"
    done
}

configure() {  # reads ip commands; arguments go to ip itself
    local text
    text=$(ip "$@" -batch - 2>&1) || fail device "the net devices cannot be set up: $text"
}

layout_up() {
    # The default of 1000 packets drops some of a 1 MiB READ's.
    echo 100000 >/proc/sys/net/core/netdev_max_backlog
    case $LAYOUT in
    single) single_links | configure ;;
    pair) pair_up ;;
    machines) machine_links | configure ;;
    esac
    if [ "$SABOTAGE" = namespaces ]; then rxe_in_namespaces; else add_rxe < <(rail_devices); fi
    chmod 666 /dev/infiniband/uverbs* 2>/dev/null
    [ "$LAYOUT" != pair ] || hosts_up
}

single_links() {
    local n
    for ((n = 0; n < RAILS; n++)); do
        if [ "$NUMA" = 1 ]; then
            echo "link add roce$n type dummy"
        else
            name_card "$(printf '52:54:00:0b:%02x:01' $n)" roce$n
        fi
        echo "addr add 198.18.$n.1/24 dev roce$n"
        echo "link set roce$n mtu $MTU up"
    done
}

pair_up() {
    local name
    for name in all default; do
        echo 1 >/proc/sys/net/ipv4/conf/$name/accept_local
        echo 0 >/proc/sys/net/ipv4/conf/$name/rp_filter
    done
    pair_links | configure
}

pair_links() {
    local n
    # The local table answers after the rails' own tables, else packets to the other end would go
    # over lo.
    echo "rule add pref 100 lookup local"
    echo "rule del pref 0"
    for ((n = 1; n <= RAILS; n++)); do
        echo "link add a$n address $(pair_mac $n 1)" \
            "type veth peer name b$n address $(pair_mac $n 2)"
        echo "addr add 198.18.$n.1/24 dev a$n"
        echo "addr add 198.18.$n.2/24 dev b$n"
        echo "link set a$n mtu $MTU up"
        echo "link set b$n mtu $MTU up"
        echo "rule add pref 10 iif lo to 198.18.$n.2 lookup $((200 + 2 * n))"
        echo "rule add pref 10 iif lo to 198.18.$n.1 lookup $((201 + 2 * n))"
        pair_routes $n
    done
}

pair_mac() { printf '02:0b:00:00:%02x:%02x' "$1" "$2"; }

pair_routes() {  # rail; a link that was down has lost these
    local n=$1
    echo "route replace 198.18.$n.2 dev a$n src 198.18.$n.1 table $((200 + 2 * n))"
    echo "route replace 198.18.$n.1 dev b$n src 198.18.$n.2 table $((201 + 2 * n))"
    echo "neigh replace 198.18.$n.2 lladdr $(pair_mac "$n" 2) dev a$n"
    echo "neigh replace 198.18.$n.1 lladdr $(pair_mac "$n" 1) dev b$n"
}

hosts_up() {  # network namespaces for TCP, and folders with each host's own uverbs nodes
    local host rdma net entry name numbers node last=1
    printf 'netns add %s\n' A B | configure
    echo "link add m0 netns A type veth peer name m0 netns B" | configure
    for host in A B; do
        printf '%s\n' "link set lo up" "addr add 10.9.0.$last/24 dev m0" "link set m0 up" |
            configure -n $host
        last=2
    done
    mkdir -p "$base/hosts/A" "$base/hosts/B"
    while read -r rdma net; do
        host=${net:0:1}
        for entry in /sys/class/infiniband_verbs/uverbs*; do
            read -r name <"$entry/ibdev"
            [ "$name" = "$rdma" ] || continue
            read -r numbers <"$entry/dev"
            node=$base/hosts/${host^^}/${entry##*/}
            mknod -m 666 "$node" c "${numbers%:*}" "${numbers#*:}"
        done
    done < <(rail_devices)
}

# One of two guests: link 0 carries TCP, link n is rail n; the last byte of the MAC tells A from B.
machine_links() {
    local own=1 n name
    [ "$ROLE" = A ] || own=2
    for ((n = 0; n <= RAILS; n++)); do
        name=m0
        [ "$n" = 0 ] || name=${ROLE,,}$n
        name_card "$(printf '52:54:00:0b:%02x:%02x' "$n" "$own")" $name
        if [ "$n" = 0 ]; then
            echo "addr add 10.9.0.$own/24 dev m0"
            echo "link set m0 mtu 1500 up"
        else
            echo "addr add 198.18.$n.$own/24 dev $name"
            echo "link set $name mtu $MTU up"
        fi
    done
}

name_card() {  # MAC address, name
    local net address
    for net in /sys/class/net/*; do
        read -r address <"$net/address"
        [ "$address" != "$1" ] || echo "link set ${net##*/} name $2"
    done
}

layout_sabotage() {  # what the lab's own tests break, to see that the right stage is named
    local n
    case $SABOTAGE in
    netdev-down) ip link set b1 down ;;
    udp-drop)
        for ((n = 1; n <= RAILS; n++)); do
            tc qdisc add dev "a$n" clsact
            tc filter add dev "a$n" egress protocol ip u32 match ip protocol 17 0xff \
                match ip dport 4791 0xffff action drop || fail sabotage "cannot drop UDP 4791"
        done ;;
    esac
}

rxe_in_namespaces() {  # the layout that looks right and carries no traffic on Linux 6.1
    local host net rdma last=1
    for host in X Y; do
        ip netns add $host
        while read -r rdma net; do
            [ "${net:0:1}" = "$(tr XY ab <<<$host)" ] || continue
            ip link set "$net" netns $host
            printf '%s\n' "addr add 198.18.${net:1}.$last/24 dev $net" "link set $net up" |
                configure -n $host
            echo "$rdma $net" | add_rxe ip netns exec $host
        done < <(rail_devices)
        last=2
    done
}

layout_prove() {
    local program=$base/bin/orbit-prove line rdma net
    local -a ends=()
    while read -r rdma net; do
        ends+=("$rdma")
        [ "$LAYOUT" != single ] || ends+=("$rdma")  # both ends on the one device
    done < <(rail_devices)
    case $LAYOUT-$ROLE in
    machines-A) set -- dial 10.9.0.2 "${ends[@]}" ;;
    machines-B) set -- listen 10.9.0.2 "${ends[@]}" ;;
    *) set -- pair "${ends[@]}" ;;
    esac
    while IFS= read -r line; do
        case $line in
        "stage "*) stage "${line#stage }" ;;
        "fail "*) line=${line#fail }; fail "${line%% *}" "${line#* }" ;;
        "exit 0") ;;
        "exit "*) fail prover "the proof ended with status ${line#exit }" ;;
        *) echo "orbit-prove: $line" >/dev/console ;;
        esac
    done < <(/usr/bin/python3 -I "$program" "$@" 2>&1; echo "exit $?")
}

layout_netem() {
    local rdma net text
    [ -n "$NETEM" ] || return 0
    while read -r rdma net; do
        # shellcheck disable=SC2086  # the words of the specification are meant to be split
        text=$(tc qdisc add dev "$net" root netem $NETEM 2>&1) ||
            fail netem "tc netem $NETEM: $text"
    done < <(rail_devices)
    stage netem "$NETEM"
}

layout_down() {  # takes back what layout_up made on a kernel that lives on; missing parts are no error
    local rdma net host
    while read -r rdma net; do
        rdma link delete "$rdma"
        ip link delete "$net"  # one end of a veth pair takes the other with it
    done < <(rail_devices)
    if [ "$LAYOUT" = pair ]; then
        for host in A B; do ip netns delete $host; done
        for ((n = 1; n <= RAILS; n++)); do
            ip rule delete pref 10 iif lo to "198.18.$n.2"
            ip rule delete pref 10 iif lo to "198.18.$n.1"
        done
        ip rule add pref 0 lookup local
        ip rule delete pref 100 lookup local
    fi
} 2>/dev/null
