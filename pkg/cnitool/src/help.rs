//! The texts of `--help` before and after the options.
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

/// Before the options of `cnitool add --help`.
pub(crate) const ADD: &str = "\
Runs ADD of the network's plugins in order, prints the result of the last one
and stores it for check, del and gc. If a plugin fails, DEL of every plugin is
run, so that nothing is left over, and all errors are printed.";

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

/// Before the options of `cnitool check --help`.
pub(crate) const CHECK: &str = "\
Runs CHECK of the network's plugins in order until one fails. CNI_ARGS and
CAP_ARGS are those of the add unless they are given again. Needs a network of
CNI version 0.4.0 or newer. Prints nothing if it succeeds.";

/// After the options of `cnitool check --help`.
pub(crate) const AFTER_CHECK: &str = "\
Environment: CNI_PATH, NETCONFPATH, CNI_IFNAME, CNI_ARGS, CAP_ARGS
Exit codes: 0 no difference (or disableCheck is set), 1 a difference,
            2 the arguments are invalid

Example:
  cnitool check mynet /run/netns/blue";

/// Before the options of `cnitool del --help`.
pub(crate) const DEL: &str = "\
Runs DEL of the network's plugins in reverse. It stops at the first error and
can then be repeated. The namespace need not exist any more: give the path it
had, or --container-id. CNI_ARGS and CAP_ARGS are those of the add unless they
are given again. If the network is not configured any more, the configuration
that was stored at the add is used. Prints nothing if it succeeds.";

/// After the options of `cnitool del --help`.
pub(crate) const AFTER_DEL: &str = "\
Environment: CNI_PATH, NETCONFPATH, CNI_IFNAME, CNI_ARGS, CAP_ARGS
Exit codes: 0 detached, or was not attached; 1 failed;
            2 the arguments are invalid

Examples:
  cnitool del mynet /run/netns/blue
  cnitool del mynet --container-id 0123456789ab --keep-going";

/// Before the options of `cnitool gc --help`.
pub(crate) const GC: &str = "\
With a network: removes everything of it that belongs to no valid attachment. An
attachment is valid if --keep names it, or if cnitool has stored it and its
namespace exists. Stored attachments that are not valid get a full DEL. Then
every plugin removes its other addresses, rules and interfaces. If a container
runtime uses the same network, name its attachments with --keep, or theirs are
removed too. Do not run another add or del of the network at the same time.

Without a network: looks for attachments to all networks of the configuration
folder and of the result caches, also that of Multus. Each one whose namespace is
gone gets a full DEL. A runtime may add and delete attachments meanwhile. The
other things of a network are only removed with --plugins.

With --valid-from, an attachment that the file does not name gets a full DEL even
if its namespace exists, unless it is younger than --min-age: a runtime lists a
pod only some time after its ADD. The file must name the attachments of every
runtime of this node. If it cannot be read in full, nothing is changed.";

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

/// Before the options of `cnitool metrics --help`.
pub(crate) const METRICS: &str = "\
Prints figures of this node in Prometheus' text format, or writes them into a file
for node_exporter's textfile collector. Run it as root in the host's network
namespace.";

/// After the options of `cnitool metrics --help`.
pub(crate) const AFTER_METRICS: &str = "\
Environment: CNI_PATH, NETCONFPATH
Exit codes: 0 printed; 1 failed, or a part could not be read;
            2 the arguments are invalid

Examples:
  cnitool metrics
  cnitool metrics --textfile /var/lib/prometheus/node-exporter/cni.prom";

/// Before the options of `cnitool status --help`.
pub(crate) const STATUS: &str = "\
Runs STATUS of the plugins of the network, or of each configured network, in
order until one is not ready. A network of a CNI version below 1.1.0 has no
STATUS and counts as ready.";

/// After the options of `cnitool status --help`.
pub(crate) const AFTER_STATUS: &str = "\
Environment: CNI_PATH, NETCONFPATH
Exit codes: 0 ready, 1 not ready (with its CNI code: 50, 51, ...),
            2 the arguments are invalid

Example:
  cnitool status mynet --json";

/// Before the options of `cnitool version --help`.
pub(crate) const VERSION: &str = "\
Fails if a plugin is missing or does not support the version of its network.
'cnitool --version' is cnitool's own version.";

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

/// Before the options of `cnitool man --help`.
pub(crate) const MAN: &str = "\
Writes cnitool.1, and a page for each verb (cnitool-add.1).";

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

/// Before the options of `cnitool ipam gc --help`.
pub(crate) const IPAM_GC: &str = "\
Removes reservations of containers that do not exist any more. A reservation of
an attachment that a runtime has stored is removed if the attachment's network
namespace is gone and no link on the host belongs to it. A reservation of an
unknown container stays unless --unknown is given. Plugins may run at the same
time, because cnitool uses the same lock as they do.

This verb removes only addresses. If rules and links are left over too, 'cnitool
gc' or the runtime's own garbage collection removes all of them.";

/// After the options of `cnitool ipam gc --help`.
pub(crate) const AFTER_IPAM_GC: &str = "\
Exit codes: 0 done, 1 failed, 2 the arguments are invalid

Examples:
  cnitool ipam gc mynet --dry-run
  cnitool ipam gc mynet --unknown --keep 0123456789ab";

/// Before the options of `cnitool ipam release --help`.
pub(crate) const IPAM_RELEASE: &str = "\
Refuses to release an address that is in use, because another container could
get the address while the first one still uses it. --force releases it anyway.";

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

/// Before the options of `cnitool rules restore --help`.
pub(crate) const RULES_RESTORE: &str = "\
For a node whose rules were removed by 'firewall-cmd --reload', 'nft flush
ruleset' or 'iptables-restore' without --noflush: containers have lost
masquerading, host ports, acceptance by the firewall and the spoof check.
Compares the rules of each attachment that a runtime or cnitool has stored with
the result and the configuration of its add, and writes those that are missing.
Existing rules and rules of other programs stay. Attachments that are gone are
skipped. Plugins of other projects are not examined.";

/// After the options of `cnitool rules restore --help`.
pub(crate) const AFTER_RULES_RESTORE: &str = "\
Run it in the host's network namespace.

Exit codes: 0 no rule is missing now; 1 something failed or was not restored, or
            with --dry-run a rule is missing; 2 the arguments are invalid

Examples:
  cnitool rules restore --dry-run
  cnitool rules restore mynet";

/// Before the options of `cnitool inspect --help`.
pub(crate) const INSPECT: &str = "\
Shows for each attachment that a runtime or cnitool has stored: the links on the
host and in the container, addresses, routes, rules, the reservation, and the
values that tuning has saved. A '!' marks a difference from the result of the
add. Then shows what is left over of other attachments, each with the command
that removes it. Changes nothing.

The objects of an add that is still running look like leftovers: repeat the
command before you remove them. 'cnitool check' runs the plugins' own checks.";

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

/// Before the options of `cnitool doctor --help`.
pub(crate) const DOCTOR: &str = "\
Checks the networks' files, the plugins and who may change them, the plugins'
own STATUS, how full the ranges are, forwarding, links, MTUs, rp_filter,
policies that drop what containers send, br_netfilter, mixed variants of
iptables, the table of connections, and leftovers. Changes nothing.";

/// After the options of `cnitool doctor --help`.
pub(crate) const AFTER_DOCTOR: &str = "\
Run it in the host's network namespace. Read each suggested command before you
run it.

Environment: CNI_PATH, NETCONFPATH
Exit codes: 0 nothing wrong was found; 1 something was, or it failed;
            2 the arguments are invalid

Example:
  cnitool doctor";

/// Before the options of `cnitool explain --help`.
pub(crate) const EXPLAIN: &str = "\
Runs add, check, del, gc or status, and does everything that the verb does.
Prints for each plugin its steps, in the order in which they ended, with their
durations in milliseconds: requests to the kernel, files, programs, and the
steps of its delegates. A '!' marks the step that made a plugin fail, with the
request itself. An error without a '!' is harmless, for example when a plugin
finds out whether a link exists. The verb's own result follows.";

/// After the options of `cnitool explain --help`.
pub(crate) const AFTER_EXPLAIN: &str = "\
'cnitool explain help VERB' prints a verb's arguments. Of plugins that
write no log, such as Go's, only the duration is shown.

Environment and exit codes: the verb's

Examples:
  cnitool explain add mynet /run/netns/blue
  cnitool explain del mynet /run/netns/blue --json";

/// Before the options of `cnitool validate --help`.
pub(crate) const VALIDATE: &str = "\
Without arguments, lists the files in the networks' folder: whether each one can
be loaded, and all of its problems. With names, lists only those networks. With
folders, lists their files. With files, or - for stdin, reports their problems.
'cnitool networks' is the same verb.
With an error every add fails:
  wrong types and values, as each plugin would refuse them; a plugin that needs
  the result of an earlier one; a gateway that no address reaches; a plugin that
  is not installed; something that the plugins need and this host's kernel or
  tools do not have, according to the plugins' STATUS.
With a warning an add works, but perhaps not as intended:
  unknown keys (with a similar known key), duplicate keys, capabilities that no
  plugin uses; addresses and host ports that another network uses too.
The keys of plugins of other projects are not checked.";

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

/// Before the options of `cnitool schema --help`.
pub(crate) const SCHEMA: &str = "\
Prints the JSON Schema of a network, or with a plugin that of the plugin's keys.
It is made from the plugins' own code and refuses unknown keys, which the plugins
ignore. Editors can complete and check a network's file with it.";

/// After the options of `cnitool schema --help`.
pub(crate) const AFTER_SCHEMA: &str = "\
Examples:
  cnitool schema > network.schema.json
  cnitool schema bridge";
