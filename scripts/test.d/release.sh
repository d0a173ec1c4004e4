# shellcheck shell=bash
# A part of scripts/test: tries what is published, as users get it. It runs scripts/release for
# amd64 and arm64, installs the archive and rolls back, installs and removes the Debian package in a
# copy of this machine, runs arm64 under qemu's user emulation, and compares the Kubernetes manifest
# with the API's schemas and runs its command with the manifest's own arguments and no capabilities.
# It also compiles the programs for a 32-bit and a big-endian processor. With CNI_TEST_RELEASE=all,
# before a release, it also builds amd64 a second time, builds the other processors and runs them
# under emulation, and runs unit tests on the big-endian one.
# shellcheck disable=SC2154  # root, work and skipped are scripts/test's
# Sourced by scripts/test --release. It installs only packages and targets of rustup that it needs.

release_needs() {
    # The compilers of the C code in the crate ring, which `cargo check` builds too. What
    # scripts/build installed later would count as a change of the machine.
    need git jq dpkg-deb setpriv qemu-aarch64 aarch64-linux-gnu-gcc arm-linux-gnueabihf-gcc s390x-linux-gnu-gcc
    [ "${CNI_TEST_RELEASE:-}" != all ] || need powerpc64le-linux-gnu-gcc riscv64-linux-gnu-gcc
    python3 -c 'import ensurepip' 2>/dev/null || { missing+=("python3's venv") packages+=(python3-venv); }
}

release_part() {
    export release_out=$work/release
    local arch others=()
    [ "${CNI_TEST_RELEASE:-}" != all ] || others=(arm ppc64le riscv64 s390x)
    step "release: 32 bits and big-endian compile" release_check armv7-unknown-linux-gnueabihf s390x-unknown-linux-gnu
    step "release: amd64" release_build --arch amd64 ${others[@]:+--verify} || return 0
    step "release: unpacked, installed, rolled back" release_archive
    step "release: one program for all names" release_multicall
    # The whole suite before a release, the protocol in each run.
    local filter=(protocol::)
    [ ${#others[@]} = 0 ] || filter=()
    tests "release: conformance, one program for all names" "$work/multicall" \
        env CNI_BIN_DIR="$work/unpacked-multicall" cargo test --locked --offline --workspace --test suite ${filter[@]+"${filter[@]}"}
    step "release: Debian package in and out" release_package
    step "release: Kubernetes manifest and its command" release_kubernetes
    # Programs that are only run here, not published, are built without what takes longest.
    if [ ${#others[@]} = 0 ]; then
        local -x CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16
    fi
    for arch in arm64 ${others[@]+"${others[@]}"}; do
        step "release: $arch" release_build --arch "$arch" && step "release: $arch under emulation" release_emulated "$arch"
    done
    [ ${#others[@]} = 0 ] || release_tests
}

# release_check TARGET...: what is published compiles there.
release_check() {
    local target plugin packages=(-p cnitool -p cni-install)
    for plugin in plugins/*/; do packages+=(-p "plugin-$(basename "$plugin")"); done
    for target; do
        has rustup || { say "no rustup, so no target $target"; return 1; }
        tries rustup -q target add "$target" && cargo check --quiet --locked --target "$target" "${packages[@]}" || return
    done
}

# A release is of a commit: while this tree has changes, of a copy in which they are one.
release_build() {
    local tree=$root
    if [ -n "$(git -C "$root" status --porcelain)" ]; then
        tree=$work/release-tree
        [ -d "$tree" ] || {
            git clone -q "$root" "$tree" &&
                (cd "$root" && git ls-files -mo --exclude-standard -z | xargs -0r cp --parents -t "$tree") &&
                git -C "$tree" add -A && git -C "$tree" -c user.name=test -c user.email=test commit -qm "changes"
        }
    fi || return 1
    # Of an unchanged tree the build that scripts/test began with is taken.
    CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$root/target} "$tree/scripts/release" "$@" --out "$release_out"
}

# The unit tests of what knows nothing of the kernel's network, big-endian. Emulation has no time
# for as many random cases.
release_tests() {
    tests "release: unit tests on s390x" "$work/release-tests" env PROPTEST_CASES=16 \
        CARGO_TARGET_S390X_UNKNOWN_LINUX_GNU_LINKER=s390x-linux-gnu-gcc \
        CARGO_TARGET_S390X_UNKNOWN_LINUX_GNU_RUNNER="qemu-s390x -L /usr/s390x-linux-gnu" \
        cargo test --locked --target s390x-unknown-linux-gnu -p cni -p cni-ipam --lib
}

release_unpack() {
    local folder=$work/unpacked-$1
    [ -d "$folder" ] || { mkdir "$folder" && tar -xzf "$release_out"/cni-plugins-linux-"$1"-v*.tgz -C "$folder"; }
    echo "$folder"
}

release_archive() (
    set -e
    cd "$release_out"
    sha256sum --quiet -c ./*.sha256
    jq -e '.bomFormat == "CycloneDX" and (.components | length) > 30' ./*amd64*.cdx.json >/dev/null
    cd "$(release_unpack amd64)"
    sha256sum --quiet -c SHA256SUMS
    grep -q '^======== serde ' LICENSES-THIRD-PARTY
    cmp docs/plugins/bridge.md "$root/docs/plugins/bridge.md"
    mkdir "$work/node"
    cp "$CNI_GO_BIN_DIR"/* "$work/node/"
    ./cni-install install --from . --dest "$work/node"
    cmp bridge "$work/node/bridge"
    cmp cni-dhcp.service "$root/plugins/dhcp/systemd/cni-dhcp.service"
    cmp cni-dhcp.socket "$root/plugins/dhcp/systemd/cni-dhcp.socket"
    tar -xzOf "$release_out"/cnitool-linux-amd64-v*.tgz ./cni-gc.service ./cni-gc.timer | cmp - <(cat "$root"/pkg/cnitool/systemd/cni-gc.service "$root"/pkg/cnitool/systemd/cni-gc.timer)
    tar -tzf "$release_out"/cnitool-linux-amd64-v*.tgz | sort | grep -c -x -e ./cnitool.1 -e ./cnitool-gc.1 -e './cnitool\.\(bash\|fish\|zsh\)' | grep -qx 5
    grep -q 'complete -F' cni-install.bash && grep -q status cni-install.1
    ./cni-install status --dest "$work/node"
    ./cni-install rollback --dest "$work/node"
    diff -r "$CNI_GO_BIN_DIR" "$work/node"
)

release_multicall() (
    set -e
    mkdir "$work/unpacked-multicall"
    tar -xzf "$release_out"/cni-plugins-multicall-linux-amd64-v*.tgz -C "$work/unpacked-multicall"
    cd "$work/unpacked-multicall"
    sha256sum --quiet -c SHA256SUMS
    plugins=$(sed 's/.*  //' SHA256SUMS)
    # shellcheck disable=SC2086 # a list of words on purpose
    [ "$(stat -c %i $plugins | sort -u | wc -l)" = 1 ]
    [ "$(stat -c %s bridge)" -lt 7077888 ]
    [ "$plugins" = "$(sed 's/.*  //' "$(release_unpack amd64)/SHA256SUMS")" ]
    ln bridge no-plugin
    if CNI_COMMAND=VERSION ./no-plugin </dev/null 2>no-plugin.err; then exit 1; fi
    grep -q "no-plugin: no plugin has this name" no-plugin.err
    rm no-plugin no-plugin.err
)

release_package() {
    # The copy has no network.
    release_unpack amd64 >/dev/null && mkdir "$work/theirs" || return
    local get=(apt_get download -o APT::Sandbox::User=root containernetworking-plugins)
    # An index that names a package which the mirror has no more, or none at all.
    (cd "$work/theirs" && { "${get[@]}" || { tries apt_get update && tries "${get[@]}"; }; }) || return
    release_diverting
    # shellcheck disable=SC2016
    in_a_copy "$work" '
        sum() { sha256sum <"$1"; }
        installed() { [ "$(dpkg-query -W -f "\${db:Status-Status}" "$1" 2>/dev/null)" = installed ]; }
        # No diversion exists, and no file that one put aside.
        no_diversions() { [ -z "$(dpkg-divert --list "/usr/lib/cni/*")" ] && [ -z "$(find /usr/lib/cni -name "*.containernetworking")" ]; }
        deb=$(echo "$work"/release/cni-plugins-rust_*_amd64.deb)
        theirs=$(echo "$work"/theirs/containernetworking-plugins_*.deb)
        ours=$(sum "$work/unpacked-amd64/bridge")
        # A package that needs plugins, as those of Podman do.
        mkdir -p "$work/podman/DEBIAN"
        printf "%s\n" "Package: needs-plugins" "Version: 1" "Architecture: all" "Maintainer: test <test@example.invalid>" \
            "Depends: containernetworking-plugins (>= 1.1)" "Description: test" >"$work/podman/DEBIAN/control"
        dpkg-deb --root-owner-group -b "$work/podman" "$work/podman.deb"

        dpkg --force-depends -i "$theirs"
        dpkg -i "$work/podman.deb"
        debian=$(sum /usr/lib/cni/bridge)
        for before in "" "$work/diverting.deb"; do
            if [ -n "$before" ]; then
                dpkg -i "$before"
                [ "$(sum /usr/lib/cni/bridge.containernetworking)" = "$debian" ]
            fi
            dpkg -i "$deb"
            [ "$(sum /usr/lib/cni/bridge)" = "$ours" ]
            ! installed containernetworking-plugins
            installed needs-plugins
            [ -z "$(dpkg --audit)" ]
            no_diversions
            while read -r _ plugin; do [ -x "/usr/lib/cni/$plugin" ]; done <"$work/unpacked-amd64/SHA256SUMS"
            cnitool --version
            CNI_COMMAND=VERSION /usr/lib/cni/host-local </dev/null
            grep -qx "ExecStart=/usr/lib/cni/dhcp daemon" /usr/share/cni-plugins-rust/systemd/cni-dhcp.service
            [ -f /usr/share/cni-plugins-rust/systemd/cni-dhcp.socket ]
            grep -qx "ExecStart=/usr/bin/cnitool gc" /usr/share/cni-plugins-rust/systemd/cni-gc.service
            [ -f /usr/share/cni-plugins-rust/systemd/cni-gc.timer ]
            dpkg -i "$deb" # again, as an upgrade
            # What is needed is not removed. To go back is to install the package of Debian.
            if dpkg -r cni-plugins-rust; then exit 1; fi
            [ "$(sum /usr/lib/cni/bridge)" = "$ours" ]
            dpkg -i "$theirs"
            ! installed cni-plugins-rust
            installed needs-plugins
            [ "$(sum /usr/lib/cni/bridge)" = "$debian" ]
            [ -z "$(dpkg --audit)" ]
        done
        # Removed where nothing needs it, nothing stays.
        dpkg -r needs-plugins
        dpkg -i "$deb"
        dpkg --purge cni-plugins-rust
        [ ! -e /usr/lib/cni/bridge ]
        no_diversions
    '
}

# The package as it was before it took the place of Debian's: it put Debian's plugins aside.
release_diverting() (
    set -e
    tree=$work/diverting
    dpkg-deb -R "$work"/release/cni-plugins-rust_*_amd64.deb "$tree"
    sed -i '/^Provides:\|^Conflicts:\|^Replaces:/d; s/^Version: .*/Version: 0.0.1/' "$tree/DEBIAN/control"
    rm "$tree/DEBIAN/postinst"
    {
        echo '#!/bin/sh'
        echo 'set -e'
        find "$tree/usr/lib/cni" -type f -printf "dpkg-divert --package cni-plugins-rust --add --rename --divert /usr/lib/cni/%f.containernetworking /usr/lib/cni/%f\n"
    } >"$tree/DEBIAN/preinst"
    chmod 755 "$tree/DEBIAN/preinst"
    dpkg-deb --root-owner-group -Znone -b "$tree" "$work/diverting.deb" >/dev/null
)

release_emulated() (
    set -e
    cd "$(release_unpack "$1")"
    qemu=qemu-$(case $1 in arm64) echo aarch64 ;; *) echo "$1" ;; esac)
    sed 's/.*  //' SHA256SUMS | while read -r plugin; do
        CNI_COMMAND=VERSION "$qemu" "./$plugin" </dev/null | jq -e '.supportedVersions | index("1.1.0")' >/dev/null
        # What Nomad and nerdctl parse.
        "$qemu" "./$plugin" </dev/null 2>&1 >/dev/null | sed -n 1p | grep -qxE "CNI $plugin plugin v([0-9]+\.){2}[0-9]+\+rust\.[0-9A-Za-z.-]+"
    done
    "$qemu" ./cni-install --version
    store=$work/$1
    config=$(jq -nc --arg dir "$store" '{cniVersion: "1.1.0", name: "n", type: "host-local", ipam: {type: "host-local", dataDir: $dir, ranges: [[{subnet: "10.1.0.0/29"}]]}}')
    # The namespace is the machine's, the plugin's own another.
    export CNI_IFNAME=eth0 CNI_NETNS=/proc/$$/ns/net CNI_PATH=.
    host_local() { CNI_COMMAND=$1 CNI_CONTAINERID=$2 unshare -n "$qemu" ./host-local <<<"$config"; }
    host_local ADD a | jq -e '.ips[0].address == "10.1.0.2/29"' >/dev/null
    # By the links that the first one wrote.
    host_local ADD b | jq -e '.ips[0].address == "10.1.0.3/29"' >/dev/null
    [ -e "$store/n/10.1.0.2" ]
    host_local DEL a
    host_local DEL b
    [ ! -e "$store/n/10.1.0.2" ]
)

release_kubernetes() (
    set -e
    python3 -m venv "$work/venv"
    tries "$work/venv/bin/pip" -q install kubernetes-validate==1.37.0
    "$work/venv/bin/kubernetes-validate" --strict "$root/docs/kubernetes/"{daemonset,daemonset-gc,cluster-local}.yaml
    "$work/venv/bin/python" -c '
import sys, yaml
container = yaml.safe_load(open(sys.argv[1]))["spec"]["template"]["spec"]["containers"][0]
print("\n".join(container["args"]), file=open(sys.argv[2] + "/arguments", "w"))
print("\n".join(container["readinessProbe"]["exec"]["command"]), file=open(sys.argv[2] + "/probe", "w"))
' "$root/docs/kubernetes/daemonset.yaml" "$work"
    release_unpack amd64 >/dev/null
    # As the image and the manifest have it: programs in /plugins, the folder of the node, no
    # capability.
    # shellcheck disable=SC2016
    in_a_copy "$work" '
        mkdir -p /plugins /host/opt/cni/bin
        cp -r "$work"/unpacked-amd64/. /plugins/
        cp /usr/lib/cni/* /host/opt/cni/bin/
        # The program of another installer stays as it is.
        printf "foreign\n" >/host/opt/cni/bin/foreign
        mapfile -t plugins < <(sed "s/.*  //" /plugins/SHA256SUMS)
        [ "${plugins[*]}" = "$(cd "$1/plugins" && echo *)" ]
        bare=(setpriv --bounding-set=-all --inh-caps=-all --ambient-caps=-all --no-new-privs)
        mapfile -t arguments <"$work/arguments"
        mapfile -t probe <"$work/probe"
        # At any moment, a reader finds a complete program.
        (for _ in {1..300}; do [ -s /host/opt/cni/bin/bridge ] && CNI_COMMAND=VERSION /host/opt/cni/bin/bridge </dev/null >/dev/null || exit 1; done) &
        kubelet=$!
        "${bare[@]}" /plugins/cni-install "${arguments[@]}" >/tmp/said &
        pod=$!
        until grep -q "are now in" /tmp/said; do kill -0 "$pod"; read -rt 0.1 <> <(:) || true; done
        "${bare[@]}" "${probe[@]}"
        for plugin in "${plugins[@]}"; do
            cmp "/plugins/$plugin" "/host/opt/cni/bin/$plugin"
            CNI_COMMAND=VERSION "${bare[@]}" "/host/opt/cni/bin/$plugin" </dev/null | grep -q "\"1.1.0\""
        done
        [ "$(cat /host/opt/cni/bin/foreign)" = foreign ]
        kill "$pod"
        wait "$pod"
        "${bare[@]}" /plugins/cni-install rollback --dest /host/opt/cni/bin
        wait "$kubelet"
        [ "$(cat /host/opt/cni/bin/foreign)" = foreign ]
        rm /host/opt/cni/bin/foreign
        diff -r /usr/lib/cni /host/opt/cni/bin
    ' "$root"
)
