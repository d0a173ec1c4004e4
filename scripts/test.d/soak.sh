# shellcheck shell=bash disable=SC2154 # root and work are scripts/test's
# The long form of what scripts/test does a share of: every system call of every program of a list is once its last, or
# fails once with each error, with DEL and with GC afterwards; storms of 500 attachments. CNI_SOAK=N makes N times as many
# storms and rounds (1). Hours, above all the errors; CNI_SEED=N repeats what a run has chosen.

soak_needs() { need iptables nft ping; }

soak_part() {
    local log=$work/soak
    tests "crashes, errors and storms, all of them" "$log" \
        env CNI_SOAK="${CNI_SOAK:-1}" CNI_BIN_DIR="$work/bin" cargo test --locked --offline --workspace --test crash
    figures "$log.err"
}
