#!/usr/bin/env bash
# Set up everything that orbit's own commands need, once: system packages, a virtual environment that sees the
# distribution's pyverbs, the built C helper, and the guest kernel of the SoftRoCE VM.
#
# Run it again at any time: what is there is neither fetched nor rebuilt. The packages stand in scripts/packages/.
#
#   scripts/setup.sh [--skip-packages] [--skip-lab]
#
#   --skip-packages  trust that the system packages, or what stands for them, are there
#   --skip-lab       do not fetch the guest kernel (TCP only, or a machine that cannot run QEMU)
#
# ORBIT_WITHOUT_VERBS=1 builds without the C helper, as with pip.
set -euo pipefail

readonly root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly python=/usr/bin/python3
readonly venv=$root/.venv
readonly stamp=$venv/.orbit-setup

skip_packages=no
skip_lab=no
for argument in "$@"; do
    case $argument in
        --skip-packages) skip_packages=yes ;;
        --skip-lab) skip_lab=yes ;;
        *)
            echo "setup: unknown option $argument (known: --skip-packages --skip-lab)" >&2
            exit 2
            ;;
    esac
done

say() { printf 'setup: %s\n' "$*"; }
fail() {
    printf 'setup: %s\n' "$@" >&2
    exit 3
}

# --- system packages -------------------------------------------------------------------------------------------

# The list that fits this distribution, or Debian's as the nearest description of what is needed.
package_list() {
    local id=unknown version=unknown
    if [ -r /etc/os-release ]; then
        id=$(. /etc/os-release && printf '%s' "${ID:-unknown}")
        version=$(. /etc/os-release && printf '%s' "${VERSION_ID:-unknown}")
    fi
    local list=$root/scripts/packages/$id-$version.txt
    [ -r "$list" ] || list=$root/scripts/packages/debian-12.txt
    printf '%s\n' "$list"
}

# Names of one list that apply to a dpkg architecture, one a line.
packages_for() {
    sed -e 's/#.*//' -e '/^[[:space:]]*$/d' "$1" |
        awk -v arch="[$2]" 'NF == 1 || $2 == arch { print $1 }'
}

missing_packages() {
    local list=$1 arch
    arch=$(dpkg --print-architecture)
    local -a wanted
    mapfile -t wanted < <(packages_for "$list" "$arch")
    # dpkg-query exits 1 as soon as one name is unknown; the names it does not print as installed are missing.
    # `${Package}` carries no architecture suffix, which multi-arch packages would otherwise add.
    comm -23 \
        <(printf '%s\n' "${wanted[@]}" | LC_ALL=C sort -u) \
        <(dpkg-query -W -f '${db:Status-Status} ${Package}\n' "${wanted[@]}" 2>/dev/null |
            sed -n 's/^installed //p' | LC_ALL=C sort -u)
}

install_packages() {
    local list
    list=$(package_list)
    if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
        fail "this is not a Debian-like system, so packages cannot be installed here." \
            "Install what stands for these Debian packages, then run again with --skip-packages" \
            "(make: SETUP_FLAGS=--skip-packages):" \
            "  $(packages_for "$list" amd64 | tr '\n' ' ')" \
            "On Fedora: dnf install python3-pyverbs rdma-core-devel gcc qemu-system-x86 busybox kmod cpio iproute perftest (untested)"
    fi
    local -a missing
    mapfile -t missing < <(missing_packages "$list")
    [ "${#missing[@]}" -gt 0 ] || return 0

    local -a as_root=()
    if [ "$(id -u)" -ne 0 ]; then
        # A password prompt is fine for a person, a hang for a script.
        if command -v sudo >/dev/null && { [ -t 0 ] || sudo -n true 2>/dev/null; }; then
            as_root=(sudo)
        else
            fail "these packages are missing, and installing them takes root or sudo:" \
                "  ${missing[*]}" \
                "Ask an administrator to run:" \
                "  apt-get install --no-install-recommends ${missing[*]}"
        fi
    fi
    head -n 1 "$list" | grep -q UNTESTED && say "the package list of this distribution is untested: $list"
    say "installing ${missing[*]}"
    "${as_root[@]}" apt-get update -qq ||
        say "apt-get update failed; trying with the package index that is there"
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "${missing[@]}" ||
        fail "apt-get could not install the packages. By hand:" \
            "  apt-get install --no-install-recommends ${missing[*]}" \
            "(Ubuntu: they need the 'universe' component.)"
}

# --- the environment -------------------------------------------------------------------------------------------

# Everything that the built environment depends on. Python sources do not count: the install is editable.
environment_key() {
    {
        "$python" -V
        "$python" -c 'import platform; print(platform.machine())'
        printf 'without_verbs=%s include=%s cc=%s root=%s\n' \
            "${ORBIT_WITHOUT_VERBS:-}" "${ORBIT_VERBS_INCLUDE:-}" "${CC:-}" "$root"
        cd "$root"
        cat pyproject.toml scripts/setup.sh
        [ ! -e setup.py ] || cat setup.py
        find orbit/verbs/_turn -name '*.[ch]' -print0 | LC_ALL=C sort -z | xargs -0r cat
    } | sha256sum | cut -d ' ' -f 1
}

helper_is_built() {
    case ${ORBIT_WITHOUT_VERBS:-} in
        1 | true | yes | on) return 0 ;;
    esac
    compgen -G "$root/orbit/verbs/_turn/_native*.so" >/dev/null
}

build_environment() {
    [ -x "$python" ] || fail "$python is missing. Install python3 (3.11 or newer)."
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "$python is $("$python" -V 2>&1), and orbit needs 3.11 or newer."
    local key
    key=$(environment_key)
    if [ -x "$venv/bin/orbit" ] && helper_is_built && [ "$(cat "$stamp" 2>/dev/null)" = "$key" ]; then
        return 0
    fi
    rm -f "$stamp"
    say "building the environment in $venv"
    # The distribution's pyverbs is built for the distribution's interpreter and lives in its site-packages.
    [ -x "$venv/bin/python" ] || "$python" -m venv --system-site-packages "$venv" ||
        fail "the virtual environment could not be made. Install python3-venv."
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$root[dev,docs]" ||
        fail "pip could not install orbit into $venv (the reason stands above)."
    printf '%s\n' "$key" >"$stamp"
}

# --- the lab ---------------------------------------------------------------------------------------------------

fetch_lab() {
    "$venv/bin/orbit" softroce --fetch-only --quiet ||
        fail "the guest kernel of the SoftRoCE VM is not there (the reason stands above)." \
            "Without it only the TCP parts work: run with --skip-lab (make: SETUP_FLAGS=--skip-lab)."
}

[ "$skip_packages" = yes ] || install_packages
build_environment
[ "$skip_lab" = yes ] || fetch_lab
say "ready"
