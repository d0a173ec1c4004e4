# shellcheck shell=bash
# Functions of all scripts: find the repository, report errors, install missing packages. Sourced,
# never run. `need`, `need_rust`, `need_component` and `lack` only record what is missing. At the
# end install_missing installs all of it, or nothing if something cannot be installed. Errors that
# cannot be known in advance, such as an interrupted download, are reported when they happen.

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
        flock | unshare | nsenter) echo util-linux ;;
        sysctl) echo procps ;;
        qemu-aarch64) echo qemu-user ;;
        chroot) echo coreutils ;;
        modprobe) echo kmod ;;
        mkfs.ext4) echo e2fsprogs ;;
        qemu-system-x86_64) echo qemu-system-x86 ;;
        setpriv) echo util-linux ;;
        dpkg-deb) echo dpkg ;;
        sha256sum) echo coreutils ;;
        # Cross compilers, with their libraries: arm-linux-gnueabihf-gcc.
        *-linux-*-gcc)
            local triple=${1%-gcc}
            echo "gcc-${triple//_/-}" "libc6-dev-$(cross_arch "$triple")-cross"
            ;;
        *) echo "$1" ;;
    esac
}

# Debian's name of the architecture that a compiler's triple is for.
cross_arch() {
    case $1 in
        x86_64-*) echo amd64 ;;
        aarch64-*) echo arm64 ;;
        arm-*) echo armhf ;;
        powerpc64le-*) echo ppc64el ;;
        *) echo "${1%%-*}" ;;
    esac
}

# Where Debian's package installs the Go plugins: release 1.1.1 in Debian 12 and 13.
installed_go_plugins=/usr/lib/cni

# What is noted as missing until install_missing: in words, as Debian packages, as parts of the Rust
# toolchain, how Rust is to be had (rustup, apt, rustup.rs), and, for what no script can get, how to
# get it.
missing=() packages=() components=() rust_from='' hints=()
rust_wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' "$root/Cargo.toml")

# need PROGRAM...: notes what is missing. `go-plugins` are those that Debian installs.
need() {
    local program
    for program; do
        if [ "$program" = go-plugins ]; then
            [ -x "$installed_go_plugins/bridge" ] || { missing+=("the Go plugins") packages+=(containernetworking-plugins); }
        elif ! has "$program"; then
            missing+=("$program")
            # shellcheck disable=SC2207  # a list of words on purpose
            packages+=($(packages_of "$program"))
        fi
    done
}

# lack WHAT HOW: notes something that only the user can get.
lack() {
    missing+=("$1")
    hints+=("$2")
}

at_least_wanted() { [ "$(printf '%s\n%s\n' "$rust_wanted" "$1" | sort -V | head -n 1)" = "$rust_wanted" ]; }

# Asking must not make rustup install anything.
rust_is_new_enough() {
    has cargo && has rustc && at_least_wanted "$(cd "$root" && RUSTUP_AUTO_INSTALL=0 rustc --version 2>/dev/null | cut -d' ' -f2)"
}

cargo_is_of_rustup() { has rustup && [ "$(dirname "$(command -v cargo)")" = "$(dirname "$(command -v rustup)")" ]; }

# From here on this script, and what it starts, uses rustup's stable toolchain; the user's default
# stays what it is.
use_stable() {
    PATH=$(dirname "$(command -v rustup)"):$PATH
    export RUSTUP_TOOLCHAIN=stable
    hash -r
}

# A C compiler, and a stable Rust that is new enough: the one in use, else rustup's stable, which is
# then used, else one to be installed: by rustup, from Debian, or from rustup.rs into the user's
# home.
need_rust() {
    need cc
    if rust_is_new_enough; then return; fi
    if has rustup && at_least_wanted "$(RUSTUP_AUTO_INSTALL=0 rustup run stable rustc --version 2>/dev/null | cut -d' ' -f2)"; then
        use_stable
        return
    fi
    missing+=("a stable Rust of at least $rust_wanted")
    local candidate url
    candidate=$(apt-cache policy cargo 2>/dev/null | sed -n 's/ *Candidate: //p') || true
    if has rustup; then
        rust_from=rustup url=${RUSTUP_DIST_SERVER:-https://static.rust-lang.org}/dist/channel-rust-stable.toml.sha256
    elif [ "$(id -u)" = 0 ] && at_least_wanted "${candidate:-0}"; then
        rust_from=apt packages+=(cargo)
        return
    else
        rust_from=rustup.rs url=https://sh.rustup.rs
        need curl
    fi
    if has curl && ! curl -sSfo /dev/null --max-time 30 "$url" 2>/dev/null; then
        hints+=("Rust: $url cannot be reached from here.")
    fi
}

# need_component NAME: a part of the toolchain, fmt or clippy, that minimal installations lack.
# After need_rust.
need_component() {
    [ -n "$rust_from" ] || ! cargo "$1" --version >/dev/null 2>&1 || return 0
    missing+=("cargo $1")
    if [[ $rust_from = rustup* ]] || { [ -z "$rust_from" ] && cargo_is_of_rustup; }; then
        components+=("$([ "$1" = fmt ] && echo rustfmt || echo "$1")")
    else
        packages+=("$([ "$1" = fmt ] && echo rustfmt || echo "rust-$1")")
    fi
}

# list WORD...: separated by commas.
list() {
    local IFS=,
    printf '%s' "$*" | sed 's/,/, /g'
}

# tries COMMAND...: what a mirror or a network may refuse for a moment, three times at most.
tries() {
    local seconds
    for seconds in 5 15; do
        "$@" && return
        say "repeated in $seconds s: $*" >&2
        sleep "$seconds"
    done
    "$@"
}

# apt-get, which waits for another one that is installing. For one that fetches an index it does
# not.
apt_get() { apt-get -qq -o DPkg::Lock::Timeout=100 "$@"; }

# What is to be installed can be. `update` does not fail for an index that could not be fetched, so
# both are tried again.
can_install() { apt_get update && apt_get --simulate install --no-install-recommends "${packages[@]}"; }

# Installs all that was noted; or, if some of it cannot be had, says what is missing and how to get
# it, and installs nothing of it.
install_missing() {
    [ ${#missing[@]} -gt 0 ] || return 0
    if [ ${#packages[@]} -gt 0 ]; then
        if ! has apt-get; then
            hints+=("This is not Debian or Ubuntu: install them with your system's package manager (Debian calls the packages ${packages[*]}).")
        elif [ "$(id -u)" != 0 ]; then
            hints+=("As root: apt-get install ${packages[*]}")
        fi
    fi
    [ ${#hints[@]} = 0 ] || [ -z "$rust_from" ] || hints+=("Rust: see https://rustup.rs; or run this again when the rest is there.")
    [ ${#hints[@]} = 0 ] || die "missing: $(list "${missing[@]}"). Nothing was installed.$(printf '\n    %s' "${hints[@]}")"
    if [ ${#packages[@]} -gt 0 ]; then
        export DEBIAN_FRONTEND=noninteractive
        tries can_install >/dev/null ||
            die "missing: $(list "${missing[@]}"), and apt-get cannot install ${packages[*]}: is a mirror reachable? Nothing was installed."
        say "Installing ${packages[*]}"
        tries apt_get install --no-install-recommends -y "${packages[@]}" >/dev/null || die "apt-get could not install ${packages[*]}"
    fi
    case $rust_from in
        rustup)
            say "Installing the stable Rust with rustup; the default toolchain stays the same"
            tries rustup -q toolchain install stable --profile minimal --no-self-update || true
            use_stable
            ;;
        rustup.rs)
            say "Installing the stable Rust from rustup.rs into ${CARGO_HOME:-$HOME/.cargo}"
            curl -sSf --proto '=https' https://sh.rustup.rs | sh -s -- -qy --profile minimal --no-modify-path >/dev/null || true
            PATH=${CARGO_HOME:-$HOME/.cargo}/bin:$PATH
            ;;
    esac
    hash -r
    [ -z "$rust_from" ] || rust_is_new_enough ||
        die "missing: a stable Rust of at least $rust_wanted, which could not be installed. See https://rustup.rs"
    [ ${#components[@]} = 0 ] || tries rustup -q component add "${components[@]}" ||
        die "missing: ${components[*]}. Install it with: rustup component add ${components[*]}"
}

# unpack DIR PACKAGE...: Debian packages, and all they need beyond what is installed here, fetched
# and unpacked as DIR/root, not installed. A second call finds them there.
unpack() {
    local debs=$1/debs tree=$1/root dir=$1 wanted deb folder
    shift
    wanted=$(apt_for_unpack "$@" --print-uris) || { tries apt_get update && wanted=$(apt_for_unpack "$@" --print-uris); } || return
    [ -d "$tree/usr" ] && [ "$wanted" = "$(cat "$dir/packages" 2>/dev/null)" ] && return
    rm -rf "$dir"
    mkdir -p "$debs/partial" "$tree/usr" "$tree/etc"
    # An index that names packages which the mirror has no more is older than the mirror.
    apt_for_unpack "$@" --download-only -o Dir::Cache::archives="$debs" ||
        { tries apt_get update && wanted=$(apt_for_unpack "$@" --print-uris) && tries apt_for_unpack "$@" --download-only -o Dir::Cache::archives="$debs"; } || return
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
    printf '%s\n' "$wanted" >"$dir/packages"
}

apt_for_unpack() { apt_get -y -o Debug::NoLocking=1 install --no-install-recommends "$@"; }

# get_dhcp_servers PACKAGE...: unpacks DHCP servers and radvd, each as $dhcp_servers/PACKAGE/root.
# Debian starts a daemon when it is installed, so these packages are not installed. Prints which
# cannot be had.
get_dhcp_servers() {
    local package
    dhcp_servers=$(realpath -m -- "${CARGO_TARGET_DIR:-$root/target}")/dhcp-servers
    for package; do
        unpack "$dhcp_servers/$package" "$package" || say "$package could not be fetched" >&2
    done
}

# The Go plugins to compare with: Debian's package of another release than the installed one,
# fetched and unpacked, never installed. Only this place has the pin. To move it when the mirrors
# have a newer one: its version, path and SHA256 are in unstable's index
# (https://packages.debian.org/sid/containernetworking-plugins); then run scripts/test and change
# the releases of the groups in tests/divergences.txt.
go_pinned=1.9.1
go_package=containernetworking-plugins_$go_pinned+ds1-1_amd64.deb
go_package_sha256=12857dd3136d61e00bffcc2c8823d14df586e94406098326e02846cfa46a058e
go_package_folder=pool/main/g/golang-github-containernetworking-plugins

# get_go_plugins: sets and exports CNI_GO_BIN_DIR, unless the caller has set it: to the pinned
# release, which is fetched if it is not in target/go-plugins (cni_testkit::go_bin_dir looks there
# too); to the installed one where the pinned one cannot be had. The reason is then in
# `no_go_package`. Prints nothing.
# shellcheck disable=SC2034  # no_go_package: for the script that calls it
get_go_plugins() {
    local dir
    dir=$(realpath -m -- "${CARGO_TARGET_DIR:-$root/target}")/go-plugins
    no_go_package=''
    [ -z "${CNI_GO_BIN_DIR:-}" ] || return 0
    export CNI_GO_BIN_DIR=$dir/usr/lib/cni
    fetch_pinned "$dir" "$go_package_folder" "$go_package" "$go_package_sha256" ||
        { no_go_package=$not_fetched CNI_GO_BIN_DIR=$installed_go_plugins; }
}

# fetch_pinned DIR FOLDER PACKAGE SHA256: a package of another release of Debian, unpacked as DIR,
# unless it is there already. If it cannot be had, why is in `not_fetched`. The mirrors are those of
# this machine's own package sources. The pinned checksum proves the content, so no index of
# unstable is needed.
fetch_pinned() {
    local dir=$1 folder=$2 package=$3 sha256=$4 helper=/usr/lib/apt/apt-helper arch site sites
    [ "$(cat "$dir/package" 2>/dev/null)" != "$package $sha256" ] || return 0
    arch=$(dpkg --print-architecture 2>/dev/null)
    if [ ! -x "$helper" ] || [ -z "$arch" ]; then
        not_fetched="$package is fetched by apt, which this machine does not have"
        return 1
    fi
    case $package in
        *"_$arch.deb") ;;
        *) not_fetched="$package is not for $arch"; return 1 ;;
    esac
    # shellcheck disable=SC2016  # of apt's
    mapfile -t sites < <(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Component: main' 2>/dev/null | sort -u)
    rm -rf "$dir" "$dir.new"
    mkdir -p "$dir.new"
    for site in ${sites[@]+"${sites[@]}"}; do
        # Its own user need not reach this folder.
        "$helper" -o APT::Sandbox::User=root -o Acquire::Retries=2 download-file \
            "$site/$folder/${package//+/%2b}" "$dir.new/package.deb" "SHA256:$sha256" >>"$dir.new/log" 2>&1 || continue
        dpkg-deb -x "$dir.new/package.deb" "$dir.new" || break
        printf '%s %s\n' "$package" "$sha256" >"$dir.new/package"
        rm "$dir.new/package.deb" "$dir.new/log"
        mv "$dir.new" "$dir"
        return
    done
    # shellcheck disable=SC2034  # for the script that calls this
    not_fetched="no mirror of this machine's package sources has $package with the pinned checksum (the pin says how to move it): $(grep '^E:' "$dir.new/log" 2>/dev/null | head -n 1)"
    rm -rf "$dir.new"
    return 1
}

# go_release DIR: the release of the Go plugins in DIR, as tests/divergences.txt names it. Debian's
# builds do not know their version; the newest version of the specification that they support
# identifies them.
go_release() {
    case $(CNI_COMMAND=VERSION "$1/bridge" </dev/null 2>/dev/null) in
        *'"1.1.0"'*) echo "$go_pinned" ;;
        *) echo 1.1.1 ;;
    esac
}

# in_a_copy FOLDER SCRIPT [ARGUMENT...]: bash on a copy of this machine that is thrown away: an
# overlay of its files, a network and mount namespace of its own. FOLDER, $work in the script, is
# the same inside and outside.
in_a_copy() {
    # shellcheck disable=SC2016  # of the inner shell
    unshare -nm -- bash -euc '
        export work=$1
        mkdir -p "$work/copy"
        mount -t tmpfs none "$work/copy"
        mkdir "$work"/copy/{upper,work,root}
        mount -t overlay none -o "lowerdir=/,upperdir=$work/copy/upper,workdir=$work/copy/work" "$work/copy/root"
        mount -t proc none "$work/copy/root/proc"
        mount -t sysfs none "$work/copy/root/sys"
        mount --rbind /dev "$work/copy/root/dev"
        mount -t tmpfs none "$work/copy/root/run"
        mount --rbind "$work" "$work/copy/root$work" 2>/dev/null
        ip link set lo up
        script=$2
        shift 2
        exec chroot "$work/copy/root" bash -euc "$script" - "$@"' - "$@"
}
