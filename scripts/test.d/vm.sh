# shellcheck shell=bash
# shellcheck disable=SC2154  # root and work are scripts/test's
# A part of scripts/test: runs tests under an older kernel with every feature (scripts/vm: Debian's
# cloud kernel). No test may be skipped there because a feature is missing. It runs the tests that
# this machine's kernel skipped, those of VLANs, and every twelfth of the others, and of the part
# e2e the scenarios that were skipped because of the kernel. With CNI_TEST_VM=all, before a release,
# it also runs all others, except the installer's and the random lists, which takes some twenty
# minutes on two processors.

vm_needs() {
    vm_lacks=''
    [ "$(id -u)" = 0 ] || vm_lacks="the virtual machine needs root"
    [ "$(uname -m)" = x86_64 ] || vm_lacks="the virtual machine is for x86_64"
    has apt-get || vm_lacks="the kernel is Debian's package, and apt-get is missing here"
    if [ -n "$vm_lacks" ]; then
        has vagrant || need ruby
        return
    fi
    # shellcheck source=scripts/vm.d/get
    . "$root/scripts/vm.d/get"
    need bridge
    need_vm
}

vm_part() {
    if has vagrant; then
        step "Vagrantfile" vagrant validate --ignore-provider
    elif [ -z "$vm_lacks" ]; then
        step "Vagrantfile" vm_vagrantfile "${CARGO_TARGET_DIR:-$root/target}/vagrant"
    else
        step "Vagrantfile, its syntax" ruby -c Vagrantfile
    fi
    if [ -n "$vm_lacks" ]; then
        say "SKIP vm: $vm_lacks" | tee -a "$work/skips"
        skipped=$((skipped + 1))
        return
    fi
    # What the builds above have made, each with its package's folder. Where the installer puts
    # programs no kernel of a network has a say, and starting them all takes a minute and a half
    # there. The random lists start dozens of programs each, and are explained for this machine's
    # own kernel. Of claims in a store nothing is the kernel's either.
    cargo test --locked --offline --workspace --no-run --message-format=json 2>/dev/null |
        sed -n 's/.*"manifest_path":"\([^"]*\)\/Cargo.toml".*"profile":{[^}]*"test":true}.*"executable":"\([^"]*\)".*/\1 \2/p' | grep -v '^[^ ]*/cni-install \|^[^ ]*/cni-cluster \|/differential-[0-9a-f]*$' >"$work/vm-tests"
    # shellcheck disable=SC2016  # for the shell in the virtual machine
    step "a virtual machine" scripts/vm -t 120 -- bash -c 'ip link add dummy0 type dummy && ip link add br0 type bridge vlan_filtering 1' || return 0
    step "what scripts/vm promises" scripts/vm.d/check && figures "$work/step"
    local names=()
    if [ "${CNI_TEST_VM:-}" != all ]; then
        # That the Go plugins lack a plugin has nothing to do with the kernel.
        mapfile -t names < <(sed -n '/: no [a-z-]* in /d; s/^SKIP \([a-z_0-9]*::[a-z_0-9:]*[a-z_0-9]\): .*/\1/p' "$work/skips" | grep -vE '^(cnitool|operator|install|paths|docs)::' | sort -u)
        names+=(vlan:: trunk::)
    fi
    tests "on a kernel with every feature" "$work/vm" vm_halves ${names[@]+"${names[@]}"}
    figures "$work/vm.err"
    [ "$(sum passed "$work/vm")" -gt 0 ] || { count 0 1 0 "$SECONDS"; say "  not one test ran"; }
    # Of the part e2e, what this machine's kernel skipped.
    mapfile -t names < <(sed -n 's/^SKIP e2e::\([a-z_0-9:]*\): the kernel lacks .*/\1/p' "$work/skips")
    [ ${#names[@]} = 0 ] || tests "real runtimes, on a kernel with every feature" "$work/vm-e2e" \
        scripts/vm -m 4096 -t 600 -- /usr/bin/python3 -B tests/e2e/run --packages "${CARGO_TARGET_DIR:-$root/target}/e2e/root" --plugins "$work/bin" \
            --go "$CNI_GO_BIN_DIR" "${names[@]}"
}

# vm_halves [NAME...]: every second test in one virtual machine, the others in another, at once: a
# machine has one processor. What they print comes one after the other.
vm_halves() (
    running=() status=0
    trap 'kill "${running[@]}"; exit 130' INT TERM HUP
    for half in 1 2; do
        # Programs start 20 times slower there. More tests than processors: tests wait, for answers
        # that do not come. Of tests that compute with inputs made up, nothing is the kernel's: a
        # few inputs will do.
        env CNI_BIN_DIR="$work/bin" CNI_TEST_REQUIRE=all CNI_TEST_SLOW=20 PROPTEST_CASES=8 RUST_TEST_THREADS=2 \
            scripts/vm -m 4096 -t 3000 -- scripts/vm.d/tests "$work/vm-tests" "$half/2" "$@" >"$work/vm.$half" 2>"$work/vm.$half.log" &
        running+=($!)
    done
    for half in "${running[@]}"; do wait "$half" || status=1; done
    cat "$work"/vm.[12]
    cat "$work"/vm.[12].log >&2
    exit "$status"
)

# Debian's Vagrant (10 MB), in a copy of this machine, asks of each setting whether it exists; of
# the providers' own ones it cannot, because Vagrant does not contain them.
vm_vagrantfile() {
    unpack "$1" vagrant || return
    # shellcheck disable=SC2016  # of the inner shell
    in_a_copy "$work" 'cp -a "$1/." / && cd "$2" && HOME=/root PATH=/usr/bin:/bin vagrant validate --ignore-provider' "$(realpath "$1")/root" "$root"
}
