//! Every word of `--help`.

/// What a person sees who gave no verb.
pub(crate) const SHORT: &str = "\
Usage: cnitool VERB NETWORK [NETNS] [OPTIONS]
Verbs: add, check, del, gc, status, version";

/// `cnitool --help`
pub(crate) const OVERVIEW: &str = "\
cnitool - run a CNI network by hand

Usage: cnitool VERB NETWORK [NETNS] [OPTIONS]

  NETWORK  the name of a network of the configuration folder
  NETNS    the path of a network namespace; it stands for a container

Verbs:
  add      attach the namespace to the network; prints the result
  check    ask every plugin whether the attachment is as add left it
  del      detach it; what is gone already is no error
  gc       remove what belongs to attachments that are no longer valid
  status   ask every plugin whether an add could be served
  version  list the network's plugins and the versions they speak

'cnitool VERB --help' tells more.

Options of every verb:
  --conf-dir DIR     the networks' folder       [NETCONFPATH, else /etc/cni/net.d]
  --cache-dir DIR    what is remembered between the verbs     [/var/lib/cni]
  --timeout SECONDS  how long one plugin may take             [310]
  --json             results and errors as one JSON document on stdout
  -h, --help         this text, or a verb's
  -V, --version      cnitool's own version

Environment:
  CNI_PATH     the plugins' folders, separated by ':'         [/opt/cni/bin]
  NETCONFPATH  the networks' folder
  CNI_IFNAME   the interface's name in the namespace          [eth0]
  CNI_ARGS     KEY=VALUE;KEY=VALUE for the plugins
  CAP_ARGS     a JSON object: what each capability is given

Exit codes:
  0  done
  1  it failed; stderr says what and why
  2  the call made no sense

Examples:
  ip netns add blue
  cnitool add mynet /run/netns/blue
  cnitool check mynet /run/netns/blue
  cnitool del mynet /run/netns/blue
";

/// `cnitool VERB --help`
pub(crate) fn of(verb: &str) -> &'static str {
    match verb {
        "add" => ADD,
        "check" => CHECK,
        "del" => DEL,
        "gc" => GC,
        "status" => STATUS,
        "version" => VERSION,
        _ => OVERVIEW,
    }
}

const ADD: &str = "\
cnitool add - attach a network namespace to a network

Usage: cnitool add NETWORK NETNS [OPTIONS]

Runs ADD of the network's plugins in order, prints the last one's result and
remembers it for check, del and gc. If a plugin fails, every plugin gets a DEL,
so that nothing stays behind, and all errors are told.

  -i, --ifname NAME    the interface's name in the namespace  [CNI_IFNAME, else eth0]
  --container-id ID    [cnitool- and 20 digits of the SHA-512 of NETNS]
  and the options of every verb: cnitool --help

Environment: CNI_PATH, NETCONFPATH, CNI_IFNAME, CNI_ARGS, CAP_ARGS
Exit codes: 0 attached, 1 failed, 2 the call made no sense

Examples:
  cnitool add mynet /run/netns/blue
  cnitool add mynet /run/netns/blue -i eth1
  CAP_ARGS='{\"portMappings\":[{\"hostPort\":8080,\"containerPort\":80,\"protocol\":\"tcp\"}]}' \\
      cnitool add mynet /run/netns/blue
";

const CHECK: &str = "\
cnitool check - ask whether an attachment is as add left it

Usage: cnitool check NETWORK NETNS [OPTIONS]

Runs CHECK of the network's plugins in order until one fails. CNI_ARGS and
CAP_ARGS are those of the add unless they are given again. Needs a network of
CNI version 0.4.0 or newer.

  -i, --ifname NAME    the interface's name in the namespace  [CNI_IFNAME, else eth0]
  --container-id ID    [cnitool- and 20 digits of the SHA-512 of NETNS]
  and the options of every verb: cnitool --help

Environment: CNI_PATH, NETCONFPATH, CNI_IFNAME, CNI_ARGS, CAP_ARGS
Exit codes: 0 all is well (or disableCheck is set), 1 something is not,
            2 the call made no sense

Example:
  cnitool check mynet /run/netns/blue
";

const DEL: &str = "\
cnitool del - detach a network namespace from a network

Usage: cnitool del NETWORK [NETNS] [OPTIONS]

Runs DEL of the network's plugins in reverse. It stops at the first error and
can then be repeated. The namespace need not exist any more: give the path it
had, or --container-id. CNI_ARGS and CAP_ARGS are those of the add unless they
are given again; a network that has left the configuration folder is detached
by the configuration remembered at the add.

  --keep-going         ask every plugin even after an error, and tell all errors
  -i, --ifname NAME    the interface's name in the namespace  [CNI_IFNAME, else eth0]
  --container-id ID    [cnitool- and 20 digits of the SHA-512 of NETNS]
  and the options of every verb: cnitool --help

Environment: CNI_PATH, NETCONFPATH, CNI_IFNAME, CNI_ARGS, CAP_ARGS
Exit codes: 0 detached, or was not attached; 1 failed; 2 the call made no sense

Examples:
  cnitool del mynet /run/netns/blue
  cnitool del mynet --container-id 0123456789ab --keep-going
";

const GC: &str = "\
cnitool gc - remove what belongs to attachments that are no longer valid

Usage: cnitool gc NETWORK [OPTIONS]

Valid are the attachments that cnitool remembers and whose namespace exists,
and those named with --keep. What is remembered and not valid gets a full DEL;
then (CNI version 1.1.0 and newer) every plugin removes what it still holds for
others: addresses, rules, interfaces. That includes what a container runtime
attached to this network: name its attachments too.
Nothing of the network may be added or deleted meanwhile.

  --keep ID/IFNAME     this attachment is valid; can be repeated
  --all                go on even if nothing is valid, which removes everything, or
                       if a file of cnitool's memory does not tell whose it is
  --dry-run            tell what would be removed and change nothing
  and the options of every verb: cnitool --help

Environment: CNI_PATH, NETCONFPATH
Exit codes: 0 done, 1 failed or refused without --all, 2 the call made no sense

Examples:
  cnitool gc mynet --dry-run
  cnitool gc mynet --keep 0123456789ab/eth0
  cnitool gc mynet --all
";

const STATUS: &str = "\
cnitool status - ask whether an add could be served

Usage: cnitool status NETWORK [OPTIONS]

Runs STATUS of the network's plugins in order until one is not ready. Networks
of a CNI version below 1.1.0 cannot be asked and count as ready.

Options are those of every verb: cnitool --help
Environment: CNI_PATH, NETCONFPATH
Exit codes: 0 ready, 1 not ready (with its CNI code: 50, 51, ...),
            2 the call made no sense

Example:
  cnitool status mynet --json
";

const VERSION: &str = "\
cnitool version - list a network's plugins and the versions they speak

Usage: cnitool version NETWORK [OPTIONS]

Fails if a plugin is missing or does not speak the network's version.
'cnitool --version' is cnitool's own version.

Options are those of every verb: cnitool --help
Environment: CNI_PATH, NETCONFPATH
Exit codes: 0 all fit, 1 one does not, 2 the call made no sense

Example:
  cnitool version mynet
";
