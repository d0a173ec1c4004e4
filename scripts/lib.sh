# shellcheck shell=bash
# What the scripts share: finding the repository, saying what is wrong, getting what is missing.
# Sourced, never run. Nothing here changes the machine before everything that is needed is known to be to be had.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PATH=$PATH:/usr/sbin:/sbin:${CARGO_HOME:-$HOME/.cargo}/bin
export PATH

say() { printf '%s\n' "$*"; }
die() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

# The comment at the head of the calling script, as its --help.
usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; }

has() { command -v "$1" >/dev/null 2>&1; }

# The Debian packages that bring a program.
packages_of() {
    case $1 in
        cc) echo gcc libc6-dev ;;
        curl) echo curl ca-certificates ;;
        ip | bridge) echo iproute2 ;;
        ping) echo iputils-ping ;;
        nft) echo nftables ;;
        script) echo bsdutils ;;
        flock | unshare) echo util-linux ;;
        sysctl) echo procps ;;
        *) echo "$1" ;;
    esac
}

# need PROGRAM...: installs what is missing, or says what is missing and how to get it. Go's plugins are `go-plugins`.
need() {
    local program packages=() missing=()
    for program; do
        if [ "$program" = go-plugins ]; then
            [ -x "${CNI_GO_BIN_DIR:-/usr/lib/cni}/bridge" ] || { missing+=("the Go plugins") packages+=(containernetworking-plugins); }
        elif ! has "$program"; then
            missing+=("$program")
            # shellcheck disable=SC2207  # a list of words on purpose
            packages+=($(packages_of "$program"))
        fi
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    has apt-get || die "missing: ${missing[*]}. This is no Debian or Ubuntu: install them by your system's means (Debian calls the packages ${packages[*]})."
    [ "$(id -u)" = 0 ] || die "missing: ${missing[*]}. As root: apt-get install ${packages[*]}"
    say "Installing ${packages[*]}"
    export DEBIAN_FRONTEND=noninteractive
    { apt-get -qq update && apt-get -qq install --no-install-recommends -y "${packages[@]}"; } >/dev/null ||
        die "missing: ${missing[*]}, and apt-get could not install ${packages[*]}: is a mirror reachable?"
}

rust_is_new_enough() {
    has cargo && has rustc || return 1
    local version wanted
    wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' "$root/Cargo.toml")
    version=$(cd "$root" && rustc --version 2>/dev/null | cut -d' ' -f2)
    [ "$(printf '%s\n%s\n' "$wanted" "$version" | sort -V | head -n 1)" = "$wanted" ]
}

# A stable Rust that is new enough: the one that is there, else by rustup, else Debian's, else rustup itself.
need_rust() {
    if ! rust_is_new_enough; then
        local candidate
        candidate=$(apt-cache policy cargo 2>/dev/null | sed -n 's/ *Candidate: //p')
        if has rustup; then
            say "Installing the stable Rust by rustup"
            rustup -q toolchain install stable --profile minimal && rustup -q default stable
        elif [ "$(id -u)" = 0 ] && [ "$(printf '1.89\n%s\n' "${candidate:-0}" | sort -V | head -n 1)" = 1.89 ]; then
            need cargo
        else
            need curl
            say "Installing the stable Rust from rustup.rs into ${CARGO_HOME:-$HOME/.cargo}"
            curl -sSf --proto '=https' https://sh.rustup.rs | sh -s -- -qy --profile minimal --no-modify-path >/dev/null
        fi || true
        hash -r
        rust_is_new_enough || die "missing: a stable Rust of at least $(sed -n 's/^rust-version = "\(.*\)"/\1/p' "$root/Cargo.toml"), and it could not be had. See https://rustup.rs"
    fi
    need cc
}

# need_component NAME: a part of the toolchain that minimal installations lack.
need_component() {
    cargo "$1" --version >/dev/null 2>&1 && return
    if has rustup && rustup -q component add "$([ "$1" = fmt ] && echo rustfmt || echo "$1")"; then return; fi
    if has apt-get && [ "$(id -u)" = 0 ]; then need "$([ "$1" = fmt ] && echo rustfmt || echo "rust-$1")"; fi
    cargo "$1" --version >/dev/null 2>&1 || die "missing: cargo $1. Get it by: rustup component add clippy rustfmt"
}
