# shellcheck shell=bash
# What is published, tried as users get it: scripts/release for amd64 and arm64, each built twice; the archive installed and
# rolled back; the Debian package put in and out of a copy of this machine; arm64 under qemu's user emulation; the
# Kubernetes manifest against the API's schemas, and its command with the manifest's own arguments and no capabilities.
# shellcheck disable=SC2154  # root and work are scripts/test's
# Sourced by scripts/test --release. Nothing is installed on the machine but packages that scripts/test needs.

release_needs() {
    need git jq dpkg-deb setpriv qemu-aarch64
}

release_part() {
    export release_out=$work/release
    if ! step "release: the same bytes twice, amd64 and arm64" release_build; then return 0; fi
    step "release: unpacked, installed, rolled back" release_archive
    step "release: Debian package in and out" release_package
    step "release: arm64 under emulation" release_arm64
    step "release: Kubernetes manifest and its command" release_kubernetes
}

# A release is of a commit: while this tree has changes, of a copy in which they are one.
release_build() {
    local tree=$root
    if [ -n "$(git -C "$root" status --porcelain)" ]; then
        tree=$work/release-tree
        git clone -q "$root" "$tree" &&
            (cd "$root" && git ls-files -mo --exclude-standard -z | xargs -0r cp --parents -t "$tree") &&
            git -C "$tree" add -A && git -C "$tree" -c user.name=test -c user.email=test commit -qm "changes"
    fi || return 1
    CARGO_TARGET_DIR=$root/target/release-build "$tree/scripts/release" --arch amd64 --arch arm64 --verify --out "$release_out"
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
    grep -q '^======== tokio ' LICENSES-THIRD-PARTY
    mkdir "$work/node"
    cp "${CNI_GO_BIN_DIR:-/usr/lib/cni}"/* "$work/node/"
    ./cni-install install --from . --dest "$work/node"
    cmp bridge "$work/node/bridge"
    ./cni-install status --dest "$work/node"
    ./cni-install rollback --dest "$work/node"
    diff -r "${CNI_GO_BIN_DIR:-/usr/lib/cni}" "$work/node"
)

release_package() {
    # The copy has no network.
    release_unpack amd64 >/dev/null && mkdir "$work/theirs" && (cd "$work/theirs" && apt-get -qq download -o APT::Sandbox::User=root containernetworking-plugins) || return
    # shellcheck disable=SC2016
    in_a_copy "$work" '
        sum() { sha256sum <"$1"; }
        deb=$(echo "$work"/release/cni-plugins-rust_*_amd64.deb)
        theirs=$(sum /usr/lib/cni/bridge)
        ours=$(sum "$work/unpacked-amd64/bridge")
        dpkg -i "$deb"
        [ "$(sum /usr/lib/cni/bridge)" = "$ours" ]
        [ "$(sum /usr/lib/cni/bridge.containernetworking)" = "$theirs" ]
        [ -x /usr/lib/cni/firewall ]
        cnitool --version
        CNI_COMMAND=VERSION /usr/lib/cni/host-local </dev/null
        dpkg -i "$deb" # again, as an upgrade
        dpkg -r cni-plugins-rust
        [ "$(sum /usr/lib/cni/bridge)" = "$theirs" ]
        [ -z "$(dpkg-divert --list "/usr/lib/cni/*")" ]
        # Without theirs, and theirs coming later.
        dpkg --purge --force-depends containernetworking-plugins
        dpkg -i "$deb"
        [ "$(sum /usr/lib/cni/bridge)" = "$ours" ]
        dpkg --force-depends -i "$work"/theirs/containernetworking-plugins_*.deb
        [ "$(sum /usr/lib/cni/bridge)" = "$ours" ]
        dpkg -r cni-plugins-rust
        [ "$(sum /usr/lib/cni/bridge)" = "$theirs" ]
    '
}

release_arm64() (
    set -e
    cd "$(release_unpack arm64)"
    sed 's/.*  //' SHA256SUMS | while read -r plugin; do
        CNI_COMMAND=VERSION qemu-aarch64 "./$plugin" </dev/null | jq -e '.supportedVersions | index("1.1.0")' >/dev/null
    done
    qemu-aarch64 ./cni-install --version
    config=$(jq -nc --arg dir "$work/arm64" '{cniVersion: "1.1.0", name: "n", type: "host-local", ipam: {type: "host-local", dataDir: $dir, ranges: [[{subnet: "10.1.0.0/29"}]]}}')
    # The namespace is the machine's, the plugin's own another.
    export CNI_CONTAINERID=c CNI_IFNAME=eth0 CNI_NETNS=/proc/$$/ns/net CNI_PATH=.
    CNI_COMMAND=ADD unshare -n qemu-aarch64 ./host-local <<<"$config" | jq -e '.ips[0].address == "10.1.0.2/29"' >/dev/null
    [ -e "$work/arm64/n/10.1.0.2" ]
    CNI_COMMAND=DEL unshare -n qemu-aarch64 ./host-local <<<"$config"
    [ ! -e "$work/arm64/n/10.1.0.2" ]
)

release_kubernetes() (
    set -e
    python3 -m venv "$work/venv"
    "$work/venv/bin/pip" -q install kubernetes-validate
    "$work/venv/bin/kubernetes-validate" --strict "$root/docs/kubernetes/daemonset.yaml"
    "$work/venv/bin/python" -c '
import sys, yaml
container = yaml.safe_load(open(sys.argv[1]))["spec"]["template"]["spec"]["containers"][0]
print("\n".join(container["args"]), file=open(sys.argv[2] + "/arguments", "w"))
print("\n".join(container["readinessProbe"]["exec"]["command"]), file=open(sys.argv[2] + "/probe", "w"))
' "$root/docs/kubernetes/daemonset.yaml" "$work"
    release_unpack amd64 >/dev/null
    # As the image and the manifest have it: programs in /plugins, the folder of the node, no capability.
    # shellcheck disable=SC2016
    in_a_copy "$work" '
        mkdir -p /plugins /host/opt/cni/bin
        cp "$work"/unpacked-amd64/* /plugins/
        mv /plugins/cni-install /cni-install
        cp /usr/lib/cni/* /host/opt/cni/bin/
        bare=(setpriv --bounding-set=-all --inh-caps=-all --ambient-caps=-all --no-new-privs)
        mapfile -t arguments <"$work/arguments"
        mapfile -t probe <"$work/probe"
        # Whoever looks, at any moment, finds a whole program.
        (for _ in {1..300}; do [ -s /host/opt/cni/bin/bridge ] && CNI_COMMAND=VERSION /host/opt/cni/bin/bridge </dev/null >/dev/null || exit 1; done) &
        kubelet=$!
        "${bare[@]}" /cni-install "${arguments[@]}" >/tmp/said &
        pod=$!
        until grep -q "are now in" /tmp/said; do kill -0 "$pod"; read -rt 0.1 <> <(:) || true; done
        "${bare[@]}" "${probe[@]}"
        cmp /plugins/bridge /host/opt/cni/bin/bridge
        kill "$pod"
        wait "$pod"
        "${bare[@]}" /cni-install rollback --dest /host/opt/cni/bin
        wait "$kubelet"
        diff -r /usr/lib/cni /host/opt/cni/bin
    '
)
