# shellcheck shell=bash
# A part of scripts/test: runs the plugins under real runtimes, containerd and Podman of Debian, on
# nodes in namespaces (tests/e2e). The runtimes are packages of this machine's release. They are
# downloaded and unpacked under target/e2e, never installed: no service starts, and nothing is
# written to /etc. A second run uses the same folder.

e2e_packages=(containerd runc crun conmon podman busybox-static conntrack python3-grpcio firewalld dbus-daemon dnsmasq-base)

# containerd 2, which asks STATUS, is in unstable alone. Its version, path and SHA256 are in that
# index (https://packages.debian.org/sid/containerd), from which this pin is moved.
containerd2=containerd_2.1.9+ds1-5_amd64.deb
containerd2_sha256=2dda86ce7033fd612fc50e136679d8174ccad680eb29cd4611e0d2a1b84cf591

# Debian's own python3: the gRPC package is for that one.
e2e_needs() {
    need ip iptables go-plugins unshare
    [ -x /usr/bin/python3 ] || { missing+=(python3) packages+=(python3); }
}

# shellcheck disable=SC2154  # work is scripts/test's
e2e_part() {
    local dir=${CARGO_TARGET_DIR:-$root/target}/e2e
    if [ "$(id -u)" != 0 ]; then
        say "SKIP e2e: real runtimes need root" | tee -a "$work/skips"
        skipped=$((skipped + 1))
        return
    fi
    if ! has apt-get; then
        say "SKIP e2e: the runtimes are Debian's packages, and apt-get is missing here" | tee -a "$work/skips"
        skipped=$((skipped + 1))
        return
    fi
    step "runtimes fetched and unpacked" unpack "$dir" "${e2e_packages[@]}" || return 0
    fetch_pinned "$dir-containerd2" pool/main/c/containerd "$containerd2" "$containerd2_sha256" || say "  $not_fetched"
    tests "real runtimes" "$work/e2e" /usr/bin/python3 -B tests/e2e/run \
        --packages "$dir/root" --containerd2 "$dir-containerd2" --plugins "$work/bin" --go "$CNI_GO_BIN_DIR" --report "$work/e2e.report"
    say "  scenario, time, leftovers:"
    sed 's/^/  /' "$work/e2e.report"
}
