# shellcheck shell=bash
# Releases of iptables other than this machine's: tests have them read what the plugins write.
# Sourced by scripts/test, after scripts/lib.sh.

# release, folder on a mirror, package, SHA256: iptables with the libraries that it brings. To move
# a pin when the mirrors have a newer package: https://packages.debian.org/iptables lists the
# releases, and their indexes paths and checksums.
iptables_packages='
1.8.7 pool/main/i/iptables iptables_1.8.7-1_amd64.deb d3d90ea8ba3b371d02cc9483aa3e33851c4923854b786df60befc4ec67e5392d
1.8.7 pool/main/i/iptables libxtables12_1.8.7-1_amd64.deb 9702a4be6f267b58c8fc1cfa0747bbefccb8b9a9af2a3547535533fbf2a7c14d
1.8.7 pool/main/libm/libmnl libmnl0_1.0.4-3_amd64.deb 4581f42e3373cb72f9ea4e88163b17873afca614a6c6f54637e95aa75983ea7c
1.8.7 pool/main/libn/libnftnl libnftnl11_1.1.9-1_amd64.deb 04da1ce7c71a3b1f3b52a2315e844dda6f7130db0857262d79d983182e86ccd7
1.8.11 pool/main/g/glibc libc6_2.41-12+deb13u4_amd64.deb 967aa62605721081c3eb2a17650611a792aa802d76a6511d1840242623d204c9
1.8.11 pool/main/i/iptables iptables_1.8.11-2_amd64.deb 95ba166bb68a76ca1513196dd59d91e3c33b2096884c6de80406f302b18a030e
1.8.11 pool/main/i/iptables libxtables12_1.8.11-2_amd64.deb 4de5aa59faef5e98d6ba9f5f521a915be5641f224f597862f8d29e8319e8db16
1.8.11 pool/main/libm/libmnl libmnl0_1.0.5-3_amd64.deb 4ec9c1096e0b954e3bdb03a62314ee7f49999045d3d55be3e4ded520ffc9baf5
1.8.11 pool/main/libn/libnftnl libnftnl11_1.2.9-1_amd64.deb 1b3eae46bfb9c6ab44e404797fb45278045f926d73974a84097ad47a3e27d983
1.8.13 pool/main/g/glibc libc6_2.43-7_amd64.deb 5c71715c51103beb4fbba9fe9f8dff604af6610dfa71c70bff342f54a7860803
1.8.13 pool/main/i/iptables iptables_1.8.13-1_amd64.deb 188a26c3ae2a431018ab769897f82c1ac40a25d902186f17d31f00d103a78f71
1.8.13 pool/main/i/iptables libxtables12_1.8.13-1_amd64.deb 08ca0b50ecc24b84faf75716b4a7a279a5e5fb01d7a5c602fe3f473b6d9ffcb9
1.8.13 pool/main/libm/libmnl libmnl0_1.0.5-3+b2_amd64.deb 5c058833d7f95cea335627f8ae48dbac38749493867ed3151113150e1612b264
1.8.13 pool/main/libn/libnftnl libnftnl11_1.3.2-1_amd64.deb 409b62c0d383ae181e3550d0ec9279359856d98a449d8bce9983f69e1995dbc6
'

# get_iptables_releases: puts each release into target/iptables/RELEASE, where
# cni_testkit::probe::iptables_releases finds it. What cannot be had is printed as a skip.
get_iptables_releases() {
    local dir release folder package sha256 missing=''
    dir=$(realpath -m -- "${CARGO_TARGET_DIR:-$root/target}")/iptables
    while read -r release folder package sha256; do
        if [ -n "$release" ] && [[ $missing != *" $release "* ]] &&
            ! fetch_pinned "$dir/$release/${package%%_*}" "$folder" "$package" "$sha256"; then
            missing+=" $release "
            # shellcheck disable=SC2154  # fetch_pinned sets it
            say "SKIP iptables $release: $not_fetched"
            rm -rf "${dir:?}/$release"
        fi
    done <<<"$iptables_packages"
    for release in "$dir"/*/; do
        iptables_wrappers "${release%/}"
    done
}

# iptables_wrappers FOLDER: programs in FOLDER/bin that run the release with its own libraries, and
# its own loader where it brings one.
iptables_wrappers() {
    local folder=$1 name loader libraries
    mkdir -p "$folder/bin"
    loader=$(find "$folder" -name 'ld-linux*.so*' -path '*lib64*' | head -n 1)
    libraries=$(find "$folder" -type d -name '*-linux-gnu' -printf '%p:')
    libraries=${libraries%:}
    for name in {ip,ip6}tables{,-save,-restore}; do
        {
            printf '#!/bin/sh\nexport XTABLES_LIBDIR=%s\n' "$(find "$folder" -type d -name xtables)"
            if [ -n "$loader" ]; then
                printf 'exec %s --library-path %s' "$loader" "$libraries"
            else
                printf 'LD_LIBRARY_PATH=%s exec' "$libraries"
            fi
            printf ' %s %s "$@"\n' "$folder/iptables/usr/sbin/xtables-nft-multi" "$name"
        } >"$folder/bin/$name"
        chmod +x "$folder/bin/$name"
    done
}
