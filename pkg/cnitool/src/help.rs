//! The longer words of `--help`: what stands before the options, and what stands behind them.
//!
//! Each line fits into 80 columns: they go out as they are.

/// Behind `cnitool --help`.
pub(crate) const AFTER_OVERVIEW: &str = "\
'cnitool help VERB' prints more.

Environment:
  CNI_PATH     the plugins' folders, separated by ':'         [/opt/cni/bin]
  NETCONFPATH  the networks' folder                           [/etc/cni/net.d]
  CNI_IFNAME   the interface's name in the namespace          [eth0]
  CNI_ARGS     KEY=VALUE;KEY=VALUE for the plugins
  CAP_ARGS     a JSON object: what each capability is given

Exit codes:
  0  done; nothing wrong was found
  1  it failed, or something wrong was found
  2  the arguments are invalid

Examples:
  ip netns add blue
  cnitool add mynet /run/netns/blue
  cnitool check mynet /run/netns/blue
  cnitool del mynet /run/netns/blue";

pub(crate) const ADD: &str = "\
Runs ADD of the network's plugins in order, prints the last one's result and
remembers it for check, del and gc. If a plugin fails, every plugin gets a DEL,
so that nothing stays behind, and all errors are printed.";

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

pub(crate) const CHECK: &str = "\
Runs CHECK of the network's plugins in order until one fails. CNI_ARGS and
CAP_ARGS are those of the add unless they are given again. Needs a network of
CNI version 0.4.0 or newer. Prints nothing if all is well.";

pub(crate) const AFTER_CHECK: &str = "\
Environment: CNI_PATH, NETCONFPATH, CNI_IFNAME, CNI_ARGS, CAP_ARGS
Exit codes: 0 all is well (or disableCheck is set), 1 something is not,
            2 the arguments are invalid

Example:
  cnitool check mynet /run/netns/blue";

pub(crate) const DEL: &str = "\
Runs DEL of the network's plugins in reverse. It stops at the first error and
can then be repeated. The namespace need not exist any more: give the path it
had, or --container-id. CNI_ARGS and CAP_ARGS are those of the add unless they
are given again; a network that has left the configuration folder is detached
by the configuration remembered at the add. Prints nothing if it succeeds.";

pub(crate) const AFTER_DEL: &str = "\
Environment: CNI_PATH, NETCONFPATH, CNI_IFNAME, CNI_ARGS, CAP_ARGS
Exit codes: 0 detached, or was not attached; 1 failed; 2 the arguments are invalid

Examples:
  cnitool del mynet /run/netns/blue
  cnitool del mynet --container-id 0123456789ab --keep-going";

pub(crate) const GC: &str = "\
Valid are the attachments that cnitool remembers and whose namespace exists,
and those named with --keep. What is remembered and not valid gets a full DEL;
then (CNI version 1.1.0 and newer) every plugin removes what it still holds for
others: addresses, rules, interfaces. That includes what a container runtime
attached to this network: name its attachments too.
Nothing of the network may be added or deleted meanwhile.";

pub(crate) const AFTER_GC: &str = "\
Environment: CNI_PATH, NETCONFPATH
Exit codes: 0 done, 1 failed or refused without --all, 2 the arguments are invalid

Examples:
  cnitool gc mynet --dry-run
  cnitool gc mynet --keep 0123456789ab/eth0
  cnitool gc mynet --all";

pub(crate) const STATUS: &str = "\
Runs STATUS of the network's plugins in order until one is not ready. Networks
of a CNI version below 1.1.0 cannot be asked and count as ready. Prints nothing
if all are.";

pub(crate) const AFTER_STATUS: &str = "\
Environment: CNI_PATH, NETCONFPATH
Exit codes: 0 ready, 1 not ready (with its CNI code: 50, 51, ...),
            2 the arguments are invalid

Example:
  cnitool status mynet --json";

pub(crate) const VERSION: &str = "\
Fails if a plugin is missing or does not support the network's version.
'cnitool --version' is cnitool's own version.";

pub(crate) const AFTER_VERSION: &str = "\
Environment: CNI_PATH, NETCONFPATH
Exit codes: 0 all fit, 1 one does not, 2 the arguments are invalid

Example:
  cnitool version mynet";

pub(crate) const AFTER_COMPLETIONS: &str = "\
Examples:
  cnitool completions bash > /usr/share/bash-completion/completions/cnitool
  cnitool completions zsh > /usr/local/share/zsh/site-functions/_cnitool
  cnitool completions fish > ~/.config/fish/completions/cnitool.fish";

pub(crate) const MAN: &str = "\
Writes cnitool.1, and a page for each verb (cnitool-add.1).";

pub(crate) const AFTER_MAN: &str = "\
Example:
  cnitool man /usr/local/share/man/man1";

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

pub(crate) const IPAM_GC: &str = "\
Goes through the reservations under the store's own lock, so that it disturbs no
running plugin. What a runtime remembers goes if its network namespace is gone
and no link on the host has its mark. A reservation of an unknown container
stays unless --unknown is given.

If rules and links of the attachment are left over too, 'cnitool gc' or the
runtime's own garbage collection removes all of them; this verb removes only
addresses.";

pub(crate) const AFTER_IPAM_GC: &str = "\
Exit codes: 0 done, 1 failed, 2 the arguments are invalid

Examples:
  cnitool ipam gc mynet --dry-run
  cnitool ipam gc mynet --unknown --keep 0123456789ab";

pub(crate) const IPAM_RELEASE: &str = "\
Refuses what is in use, unless it is forced to: the address may then be given to
another container while the first one still answers to it.";

pub(crate) const AFTER_IPAM_RELEASE: &str = "\
Exit codes: 0 released, 1 not reserved, in use, or failed,
            2 the arguments are invalid

Examples:
  cnitool ipam release mynet 10.61.0.7
  cnitool ipam release mynet --container-id 0123456789ab -i eth0";

pub(crate) const AFTER_RULES: &str = "\
'cnitool rules help VERB' prints more.

Example:
  cnitool rules restore --dry-run";

pub(crate) const RULES_RESTORE: &str = "\
For a node whose rules were removed by 'firewall-cmd --reload', 'nft flush
ruleset' or 'iptables-restore' without --noflush: containers have lost
masquerading, host ports, acceptance by the firewall and the spoof check.
Compares the rules of each attachment that a runtime or cnitool remembers, by
the result and the configuration of its add, and writes those that are missing.
Rules that exist stay, and so do other programs' rules. Attachments whose
network namespace or interface is gone are skipped. The plugins of other
projects are not examined.";

pub(crate) const AFTER_RULES_RESTORE: &str = "\
Run it in the host's network namespace.

Exit codes: 0 every rule is there (again); 1 something failed, or with --dry-run
            a rule is missing; 2 the arguments are invalid

Examples:
  cnitool rules restore --dry-run
  cnitool rules restore mynet";

pub(crate) const INSPECT: &str = "\
For each attachment that a runtime or cnitool remembers: the links on the host
and in the container, addresses, routes, rules, the reservation, what tuning
saved; a '!' marks a difference from the result of the add. Then the leftovers
of lost attachments, each with the command that removes it. Changes nothing.

Objects of an add that is still running look left over for a moment: look twice.
'cnitool check' asks the plugins whether everything is as they want it.";

pub(crate) const AFTER_INSPECT: &str = "\
Run it in the host's network namespace.

Environment: NETCONFPATH
Exit codes: 0 all is as it should be; 1 something differs or is left over, or it
            failed; 2 the arguments are invalid

Examples:
  cnitool inspect
  cnitool inspect mynet
  cnitool inspect mynet 0123";

pub(crate) const DOCTOR: &str = "\
Checks the networks' files, the plugins and who may change them, the plugins'
own STATUS, how full the ranges are, forwarding, links, MTUs, rp_filter,
policies that drop what containers send, br_netfilter, mixed variants of
iptables, the table of connections, and leftovers. Changes nothing.";

pub(crate) const AFTER_DOCTOR: &str = "\
Run it in the host's network namespace. Read a command before you run it.

Environment: CNI_PATH, NETCONFPATH
Exit codes: 0 nothing wrong was found; 1 something was, or it failed;
            2 the arguments are invalid

Example:
  cnitool doctor";

pub(crate) const EXPLAIN: &str = "\
Runs add, check, del, gc or status as without 'explain': it does what they do.
Of each plugin it prints the steps, in the order in which they ended, with their
durations in milliseconds: requests to the kernel, files, programs, and what its
delegates did. A '!' marks the step by which a plugin failed, with the request
itself. An error without a '!' was only an answer, for example when a plugin
asks whether a link exists. The result follows as without 'explain'.";

pub(crate) const AFTER_EXPLAIN: &str = "\
'cnitool explain help VERB' prints a verb's arguments. Plugins that keep no log,
as Go's, show their duration alone.

Environment and exit codes: the verb's

Examples:
  cnitool explain add mynet /run/netns/blue
  cnitool explain del mynet /run/netns/blue --json";

pub(crate) const NETWORKS: &str = "\
Lists the files of the networks' folder: whether each one loads, and what
'cnitool validate' finds in it. With names, only those networks.";

pub(crate) const AFTER_NETWORKS: &str = "\
Environment: CNI_PATH, NETCONFPATH
Exit codes: 0 every listed network is sound (a warning does not count),
            1 one has an error or does not exist, 2 the arguments are invalid

Examples:
  cnitool networks
  cnitool networks mynet";

pub(crate) const VALIDATE: &str = "\
Finds everything at once. An error makes every add fail:
  wrong types and values, as each plugin would refuse them; a plugin that needs
  the result of an earlier one; a gateway that no address reaches; a plugin that
  is missing; what this host's kernel and tools lack, by the plugins' STATUS.
A warning does not, but may not be what was meant:
  unknown keys (with what may have been meant), duplicate keys, capabilities
  that no plugin uses; addresses and host ports that another network has, too.
Plugins other than bridge, host-local, portmap and tuning are not looked into.";

pub(crate) const AFTER_VALIDATE: &str = "\
Environment: CNI_PATH, NETCONFPATH
Exit codes: 0 no error was found (with --strict: no warning, either),
            1 one was, 2 the arguments are invalid

Examples:
  cnitool validate /etc/cni/net.d/10-mynet.conflist
  cnitool validate --file-only new.conflist";
