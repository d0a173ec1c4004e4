# shellcheck shell=bash
# A part of scripts/test: the plugins under real runtimes, containerd and Podman of Debian, in nodes of namespaces
# (tests/e2e). The runtimes are packages of this machine's release, fetched and unpacked under target/e2e, never installed:
# no service starts, nothing is written to /etc. A second run finds them there.

e2e_packages=(containerd runc crun conmon podman busybox-static conntrack python3-grpcio)

# Debian's own python3: the gRPC package is for that one.
e2e_needs() {
    need ip iptables go-plugins unshare
    [ -x /usr/bin/python3 ] || { missing+=(python3) packages+=(python3); }
}

# shellcheck disable=SC2154  # work is scripts/test's
e2e_part() {
    local dir=${CARGO_TARGET_DIR:-$root/target}/e2e
    if [ "$(id -u)" != 0 ]; then
        say "SKIP e2e: real runtimes want to be root" | tee -a "$work/skips"
        skipped=$((skipped + 1))
        return
    fi
    if ! has apt-get; then
        say "SKIP e2e: the runtimes are Debian's packages, and here is no apt-get" | tee -a "$work/skips"
        skipped=$((skipped + 1))
        return
    fi
    step "runtimes fetched and unpacked" e2e_fetch "$dir" || return 0
    tests "real runtimes" "$work/e2e" /usr/bin/python3 -B tests/e2e/run \
        --packages "$dir/root" --plugins "$work/bin" --go "${CNI_GO_BIN_DIR:-/usr/lib/cni}" --report "$work/e2e.report"
    say "  scenario, time, what was left afterwards:"
    sed 's/^/  /' "$work/e2e.report"
}

# e2e_fetch DIR: the packages and all they need beyond what is installed here, unpacked as DIR/root.
e2e_fetch() {
    local debs=$1/debs tree=$1/root wanted deb folder
    wanted=$(e2e_apt --print-uris) || { apt-get -qq update && wanted=$(e2e_apt --print-uris); } || return
    [ -d "$tree/usr" ] && [ "$wanted" = "$(cat "$1/packages" 2>/dev/null)" ] && return
    rm -rf "$1"
    mkdir -p "$debs/partial" "$tree/usr" "$tree/etc"
    # An index that names packages which the mirror has no more is older than the mirror.
    e2e_apt --download-only -o Dir::Cache::archives="$debs" ||
        { apt-get -qq update && wanted=$(e2e_apt --print-uris) && e2e_apt --download-only -o Dir::Cache::archives="$debs"; } || return
    for deb in "$debs"/*.deb; do
        # None, where all of them are installed.
        [ ! -e "$deb" ] || dpkg-deb -x "$deb" "$tree" || return
    done
    # /usr alone is laid over the machine's.
    for folder in bin sbin lib lib64; do
        [ -d "$tree/$folder" ] || continue
        mkdir -p "$tree/usr/$folder" && cp -a "$tree/$folder/." "$tree/usr/$folder/" && rm -rf "${tree:?}/$folder" || return
    done
    rm -rf "$debs"
    printf '%s\n' "$wanted" >"$1/packages"
}

e2e_apt() { apt-get -qq -y -o Debug::NoLocking=1 "$@" install --no-install-recommends "${e2e_packages[@]}"; }
