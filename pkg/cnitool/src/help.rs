//! The texts of `--help` after the options. Those before them are the verbs' doc comments.
//!
//! They are printed without wrapping, so each line has at most 80 columns.

/// After the options of `cnitool --help`.
pub(crate) const AFTER_OVERVIEW: &str = "\
'cnitool help VERB' prints more.

Environment:
  CNI_PATH     the plugins' folders, separated by ':'         [/opt/cni/bin]
  NETCONFPATH  the networks' folder                           [/etc/cni/net.d]
  CNI_IFNAME   the interface's name in the namespace          [eth0]
  CNI_ARGS     KEY=VALUE;KEY=VALUE for the plugins
  CAP_ARGS     a JSON object with the value of each capability

Exit codes:
  0  done; nothing wrong was found
  1  it failed, or something wrong was found
  2  the arguments are invalid

Examples:
  ip netns add blue
  cnitool add mynet /run/netns/blue
  cnitool check mynet /run/netns/blue
  cnitool del mynet /run/netns/blue";

/// After the options of `cnitool add --help`.
pub(crate) const AFTER_ADD: &str = "\
Environment: CNI_PATH, NETCONFPATH, CNI_IFNAME, CNI_ARGS, CAP_ARGS
Exit codes: 0 attached, 1 failed, 2 the arguments are invalid

Examples:
  cnitool add mynet /run/netns/blue
  cnitool add mynet /run/netns/blue -i eth1
  export CAP_ARGS='{
    \"portMappings\": [{\"hostPort\": 8080, \"containerPort\": 80, \"protocol\": \"tcp\"}]
  }'
  cnitool add mynet /run/netns/blue";

/// After the options of `cnitool check --help`.
pub(crate) const AFTER_CHECK: &str = "\
Environment: CNI_PATH, NETCONFPATH, CNI_IFNAME, CNI_ARGS, CAP_ARGS
Exit codes: 0 no difference (or disableCheck is set), 1 a difference,
            2 the arguments are invalid

Example:
  cnitool check mynet /run/netns/blue";

/// After the options of `cnitool del --help`.
pub(crate) const AFTER_DEL: &str = "\
Environment: CNI_PATH, NETCONFPATH, CNI_IFNAME, CNI_ARGS, CAP_ARGS
Exit codes: 0 detached, or was not attached; 1 failed;
            2 the arguments are invalid

Examples:
  cnitool del mynet /run/netns/blue
  cnitool del mynet --container-id 0123456789ab --keep-going";

/// After the options of `cnitool gc --help`.
pub(crate) const AFTER_GC: &str = "\
Environment: CNI_PATH, NETCONFPATH
Exit codes: 0 done, 1 failed or refused without --all,
            2 the arguments are invalid

Examples:
  cnitool gc --dry-run
  crictl pods -o json | cnitool gc --valid-from -
  cnitool gc mynet --dry-run
  cnitool gc mynet --keep 0123456789ab/eth0
  cnitool gc mynet --all";

/// After the options of `cnitool metrics --help`.
pub(crate) const AFTER_METRICS: &str = "\
Environment: CNI_PATH, NETCONFPATH
Exit codes: 0 printed; 1 failed, or a part could not be read;
            2 the arguments are invalid

Examples:
  cnitool metrics
  cnitool metrics --textfile /var/lib/prometheus/node-exporter/cni.prom";

/// After the options of `cnitool status --help`.
pub(crate) const AFTER_STATUS: &str = "\
Environment: CNI_PATH, NETCONFPATH
Exit codes: 0 ready, 1 not ready (with its CNI code: 50, 51, ...),
            2 the arguments are invalid

Example:
  cnitool status mynet --json";

/// After the options of `cnitool version --help`.
pub(crate) const AFTER_VERSION: &str = "\
Environment: CNI_PATH, NETCONFPATH
Exit codes: 0 all support it, 1 a plugin does not, 2 the arguments are invalid

Example:
  cnitool version mynet";

/// After the options of `cnitool completions --help`.
pub(crate) const AFTER_COMPLETIONS: &str = "\
Examples:
  cnitool completions bash > /usr/share/bash-completion/completions/cnitool
  cnitool completions zsh > /usr/local/share/zsh/site-functions/_cnitool
  cnitool completions fish > ~/.config/fish/completions/cnitool.fish";

/// After the options of `cnitool man --help`.
pub(crate) const AFTER_MAN: &str = "\
Example:
  cnitool man /usr/local/share/man/man1";

/// After the options of `cnitool ipam --help`.
pub(crate) const AFTER_IPAM: &str = "\
'cnitool ipam help VERB' prints more.

Environment: NETCONFPATH
Exit codes: 0 done, 1 failed or refused, 2 the arguments are invalid

Examples:
  cnitool ipam list
  cnitool ipam show mynet
  cnitool ipam gc mynet --dry-run
  cnitool ipam release mynet 10.61.0.7
  cnitool ipam dhcp";

/// After the options of `cnitool ipam gc --help`.
pub(crate) const AFTER_IPAM_GC: &str = "\
Exit codes: 0 done, 1 failed, 2 the arguments are invalid

Examples:
  cnitool ipam gc mynet --dry-run
  cnitool ipam gc mynet --unknown --keep 0123456789ab";

/// After the options of `cnitool ipam release --help`.
pub(crate) const AFTER_IPAM_RELEASE: &str = "\
Exit codes: 0 released, 1 not reserved, in use, or failed,
            2 the arguments are invalid

Examples:
  cnitool ipam release mynet 10.61.0.7
  cnitool ipam release mynet --container-id 0123456789ab -i eth0";

/// After the options of `cnitool rules --help`.
pub(crate) const AFTER_RULES: &str = "\
'cnitool rules help VERB' prints more.

Example:
  cnitool rules restore --dry-run";

/// After the options of `cnitool rules restore --help`.
pub(crate) const AFTER_RULES_RESTORE: &str = "\
Run it in the host's network namespace.

Exit codes: 0 no rule is missing now; 1 something failed or was not restored, or
            with --dry-run a rule is missing; 2 the arguments are invalid

Examples:
  cnitool rules restore --dry-run
  cnitool rules restore mynet";

/// After the options of `cnitool inspect --help`.
pub(crate) const AFTER_INSPECT: &str = "\
Run it in the host's network namespace.

Environment: NETCONFPATH
Exit codes: 0 nothing differs or is left over; 1 something does, or it failed;
            2 the arguments are invalid

Examples:
  cnitool inspect
  cnitool inspect mynet
  cnitool inspect mynet 0123";

/// After the options of `cnitool doctor --help`.
pub(crate) const AFTER_DOCTOR: &str = "\
Run it in the host's network namespace. Read each suggested command before you
run it.

Environment: CNI_PATH, NETCONFPATH
Exit codes: 0 nothing wrong was found; 1 something was, or it failed;
            2 the arguments are invalid

Example:
  cnitool doctor";

/// After the options of `cnitool explain --help`.
pub(crate) const AFTER_EXPLAIN: &str = "\
'cnitool explain help VERB' prints a verb's arguments. Of plugins that
write no log, such as Go's, only the duration is shown.

Environment and exit codes: the verb's

Examples:
  cnitool explain add mynet /run/netns/blue
  cnitool explain del mynet /run/netns/blue --json";

/// After the options of `cnitool validate --help`.
pub(crate) const AFTER_VALIDATE: &str = "\
Environment: CNI_PATH, NETCONFPATH
Exit codes: 0 no error (with --strict: and no warning), 1 at least one,
            2 the arguments are invalid

An argument with a '/' is a file or folder. Without one, a configured network is
preferred to a file in the working directory.

Examples:
  cnitool validate
  cnitool validate mynet
  cnitool validate --file-only ./new.conflist
  cnitool validate - < new.conflist";

/// After the options of `cnitool schema --help`.
pub(crate) const AFTER_SCHEMA: &str = "\
Examples:
  cnitool schema > network.schema.json
  cnitool schema bridge";
