# shellcheck shell=bash disable=SC2154 # root, work and installed_go_plugins are scripts/test's
# A part of scripts/test: the long form of tests of which a normal run does a share. Every system
# call of every program of a list is the last one of its program, or fails once with each error, or
# its program gets SIGTERM; DEL or GC follows. Storms have 500 attachments. The commands of
# cni-install are killed at every call, in every pair of two. The suite runs against Debian's Go
# plugins, release 1.1.1, too.
#
# Each test stops after CNI_SOAK_MINUTES (30). It first tries every 16th call and then those
# between; its figures say how many of how many, and a test that did not finish the first pass
# fails. CNI_SOAK=N runs N times as many storms and rounds under held locks (1). CNI_SEED=N repeats
# the choices of a run.
#
# The tests of the plugins' allocator also run under Miri and ThreadSanitizer, with rustup's nightly
# toolchain. N times 5,000 random lists are attached by the Go plugins and by these plugins
# (CNI_LISTS: another number), which takes some 0.3 s of a processor for each list.

soak_needs() { need iptables nft ping go-plugins; }

# The allocator's file needs no crate but std, so it is a package of its own here, which builds in
# seconds. ThreadSanitizer must see std's own synchronisation too: std is built with it.
allocator() {
    local package=$work/arena dir target why
    dir=$(realpath -m "${CARGO_TARGET_DIR:-target}")/arena
    target=$(rustc -vV | sed -n 's/^host: //p')
    mkdir -p "$package"
    printf '%s\n' '[package]' 'name = "arena"' 'edition = "2024"' '[lib]' "path = \"$root/pkg/cni-linux/src/sys/arena.rs\"" '[workspace]' >"$package/Cargo.toml"
    if ! why=$(rustup -q component add --toolchain nightly miri rust-src 2>&1) ||
        ! why=$(cargo +nightly fetch --quiet -Zbuild-std --target "$target" --manifest-path "$package/Cargo.toml" 2>&1); then
        say "SKIP the allocator under Miri and ThreadSanitizer: $(printf '%s' "$why" | head -n 1)" | tee -a "$work/skips"
        skipped=$((skipped + 1))
        return
    fi
    tests "the allocator under Miri" "$package/miri" \
        env CARGO_TARGET_DIR="$dir" cargo +nightly miri test --offline --manifest-path "$package/Cargo.toml" --lib
    tests "the allocator under ThreadSanitizer" "$package/tsan" env CARGO_TARGET_DIR="$dir" RUSTFLAGS=-Zsanitizer=thread \
        cargo +nightly test --offline -Zbuild-std --target "$target" --manifest-path "$package/Cargo.toml" --lib
}

soak_part() {
    local log=$work/soak
    allocator
    # More tests than processors: most of the time they wait until the kernel has taken a link or a
    # rule away.
    tests "crashes, errors and storms, all of them" "$log" \
        env CNI_SOAK="${CNI_SOAK:-1}" RUST_TEST_THREADS=$((3 * $(nproc))) CNI_BIN_DIR="$work/bin" cargo test --locked --offline --workspace --test crash --test killed
    figures "$log.err"
    tests "random lists, thousands of them" "$log.differential" \
        env CNI_SOAK="${CNI_SOAK:-1}" CNI_BIN_DIR="$work/bin" cargo test --locked --offline --workspace --test differential
    figures "$log.differential.err"
    if [ "$(realpath "$CNI_GO_BIN_DIR")" = "$(realpath "$installed_go_plugins")" ]; then
        say "  The suite has been run against $installed_go_plugins above."
    else
        against_go "$installed_go_plugins"
    fi
}
