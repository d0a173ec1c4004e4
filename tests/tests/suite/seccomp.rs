//! A seccomp profile forbids system calls permanently, so retries and fallbacks may fail too. ADD
//! gives a clear error and leaves nothing, and a DEL without the profile removes everything.
//!
//! A small program sets the filter and executes the plugin; the plugin's children inherit it.

use cni_testkit::{Container, Invocation, Node, Outcome, bin_dir, probe, require};
use conformance::{attach, bridge, patched};
use nix::libc;
use serde_json::{Value, json};

use crate::portmap::world::Backend;
use crate::rights::state;

/// Arguments: the calls as `NUMBER`, or `NUMBER:INDEX:VALUE:ERRNO` for those that are forbidden,
/// with this errno, only if this argument has this value; then the program.
const LAUNCHER: &str = r#"
import ctypes, os, struct, sys
calls, program = sys.argv[1].split(","), sys.argv[2]
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, REFUSE, EPERM = 0x7FFF0000, 0x00050000, 1
low = 0 if sys.byteorder == "little" else 4
code = []
for call in calls:
    number, *argument = map(int, call.split(":"))
    code.append((LOAD, 0, 0, 0))
    errno = EPERM
    if argument:
        index, value, errno = argument
        code += [(EQUAL, 0, 3, number), (LOAD, 0, 0, 16 + 8 * index + low), (EQUAL, 0, 1, value)]
    else:
        code.append((EQUAL, 0, 1, number))
    code.append((RETURN, 0, 0, REFUSE | errno))
code.append((RETURN, 0, 0, ALLOW))
text = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in code))
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
filter = Program(len(code), ctypes.addressof(text))
prctl = ctypes.CDLL(None, use_errno=True).prctl
long = ctypes.c_ulong
if prctl(38, long(1), long(0), long(0), long(0)) or prctl(22, long(2), ctypes.byref(filter), long(0), long(0)):
    sys.exit("no filter: " + os.strerror(ctypes.get_errno()))
os.execv(program, [program])
"#;

/// The calls that a profile forbids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Forbidden {
    /// Entering another namespace.
    Setns,
    /// Netlink, of every protocol.
    Netlink,
    /// The netlink of netfilter, with the errno of a kernel that does not have it.
    Netfilter,
    /// Starting programs and threads.
    Start,
    /// Calls that no plugin needs.
    Rest,
}

use Forbidden::{Netfilter, Netlink, Rest, Setns, Start};

impl Forbidden {
    fn calls(self) -> String {
        let all: Vec<i64> = match self {
            Setns => vec![libc::SYS_setns],
            Netlink => return format!("{}:0:{}:{}", libc::SYS_socket, libc::AF_NETLINK, libc::EPERM),
            Netfilter => {
                return format!("{}:2:{}:{}", libc::SYS_socket, libc::NETLINK_NETFILTER, libc::EPROTONOSUPPORT);
            }
            Start => vec![
                libc::SYS_clone,
                libc::SYS_clone3,
                #[cfg(target_arch = "x86_64")]
                libc::SYS_fork,
                #[cfg(target_arch = "x86_64")]
                libc::SYS_vfork,
            ],
            Rest => vec![libc::SYS_bpf, libc::SYS_mount, libc::SYS_umount2, libc::SYS_unshare, libc::SYS_ptrace],
        };
        all.iter().map(i64::to_string).collect::<Vec<_>>().join(",")
    }
}

const PYTHON: &str = "/usr/bin/python3";

fn call(node: &Node, verb: &str, container: &Container, config: &Value, forbidden: Option<Forbidden>) -> Outcome {
    let plugin = bin_dir().join(config["type"].as_str().unwrap());
    let call = match forbidden {
        None => Invocation::new(node, plugin),
        Some(forbidden) => Invocation::new(node, PYTHON).arg("-ISc").arg(LAUNCHER).arg(forbidden.calls()).arg(plugin),
    };
    call.command(verb).cni_path(bin_dir()).container(container).config(config).run()
}

/// Whether a filter can be set here and has an effect.
fn filters() -> Result<(), String> {
    if !std::path::Path::new(PYTHON).exists() {
        return Err(format!("no {PYTHON}"));
    }
    let node = Node::new();
    let run = |program: &str| {
        Invocation::new(&node, PYTHON).arg("-ISc").arg(LAUNCHER).arg(Netlink.calls()).arg(program).run()
    };
    match (run("/bin/true"), run("/sbin/ip")) {
        (fine, refused) if fine.status == Some(0) && refused.stderr.contains("ot permitted") => Ok(()),
        (fine, refused) => Err(format!("no seccomp filter here: {}{}", fine.report(), refused.report())),
    }
}

/// A plugin of the list, and the calls that it needs.
struct Link {
    config: Value,
    needs: &'static [Forbidden],
}

fn chained(kind: &str, prev: &Value, keys: Value) -> Value {
    patched(json!({"cniVersion": "1.0.0", "name": "net1", "type": kind, "prevResult": prev}), keys)
}

/// Returns the visible state of the node, with the containers' links and their flags.
fn all(node: &Node, container: &Container) -> String {
    let lo = container.link("lo").map(|lo| lo["flags"].to_string());
    format!("{}\n{lo:?}", state(node, container))
}

#[test]
fn add_under_a_seccomp_profile_leaves_nothing_after_a_del() {
    require!(filters());
    require!(probe::nft());
    require!(probe::iptables());
    for plugin in ["bridge", "portmap", "tuning", "loopback"] {
        require!(probe::plugin(plugin));
    }
    let node = Node::new();
    let network = patched(bridge(&node, &["10.1.0.0/24"]), json!({"ipMasq": true, "ipMasqBackend": "nftables"}));
    // A neighbour, which has created the shared resources and must not be affected.
    let (living, neighbour, neighbours) = attach(&node, &network, 1).remove(0);
    let container = node.container();
    let first = Link { config: network.clone(), needs: &[Setns, Netlink, Start] };
    refused_whole(&node, &container, &first);
    let result = call(&node, "ADD", &container, &network, None).success();
    let ports = |backend: &str| {
        let mappings = json!([{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]);
        chained("portmap", &result, json!({"backend": backend, "runtimeConfig": {"portMappings": mappings}}))
    };
    let later = [
        Link {
            config: chained(
                "tuning",
                &result,
                json!({"sysctl": {"net.core.somaxconn": "77"}, "mtu": 1400,
                "dataDir": node.dir().join("tuning")}),
            ),
            needs: &[Setns, Netlink],
        },
        Link { config: ports("nftables"), needs: &[Netlink] },
        Link { config: ports("iptables"), needs: &[Netlink] },
        Link { config: chained("loopback", &result, json!({"prevResult": null})), needs: &[Setns, Netlink] },
    ];
    for link in &later {
        refused_whole(&node, &container, link);
        cleaned_in_the_end(&node, &container, link);
    }
    call(&node, "DEL", &container, &network, None).success();
    let before = all(&node, &container);
    cleaned_in_the_end(&node, &container, &first);
    assert_eq!(all(&node, &container), before);
    neighbour.check(&neighbours).success();
    living.ping("10.1.0.1");
    neighbour.del_with(&neighbours).success();
}

/// ADD reports the refused call and has undone everything, or did not need the call, and then DEL
/// removes everything.
#[track_caller]
fn refused_whole(node: &Node, container: &Container, link: &Link) {
    // The first attachment creates the shared resources, which stay.
    call(node, "ADD", container, &link.config, None).success();
    call(node, "DEL", container, &link.config, None).success();
    let before = all(node, container);
    for forbidden in [Setns, Netlink, Start, Rest] {
        let outcome = call(node, "ADD", container, &link.config, Some(forbidden));
        assert_eq!(outcome.status != Some(0), link.needs.contains(&forbidden), "{forbidden:?}\n{}", outcome.report());
        if outcome.status != Some(0) {
            speaks_of_it(&outcome, forbidden);
        } else {
            call(node, "DEL", container, &link.config, Some(forbidden)).success();
        }
        assert_eq!(all(node, container), before, "{forbidden:?}\n{}", outcome.report());
    }
}

/// DEL may fail with an error, and without the profile finds everything.
#[track_caller]
fn cleaned_in_the_end(node: &Node, container: &Container, link: &Link) {
    for forbidden in link.needs {
        call(node, "ADD", container, &link.config, None).success();
        let outcome = call(node, "DEL", container, &link.config, Some(*forbidden));
        if outcome.status != Some(0) {
            speaks_of_it(&outcome, *forbidden);
        }
        call(node, "DEL", container, &link.config, None).success();
    }
}

#[track_caller]
fn speaks_of_it(outcome: &Outcome, forbidden: Forbidden) {
    let failure = outcome.failure();
    // A delegate that could not be started, or the plugin's own work.
    let is_right = |code| (forbidden == Start && code == 5) || (100..999).contains(&code);
    assert!(failure.code.is_some_and(is_right), "{forbidden:?}\n{}", outcome.report());
    assert!(failure.msg.contains("ot permitted"), "{forbidden:?}\n{}", outcome.report());
}

#[test]
fn a_kernel_without_nf_tables_has_no_rules() {
    require!(filters());
    require!(Backend::IptablesLegacy.probe());
    let node = Node::new();
    let container = node.container();
    let path = Backend::IptablesLegacy.path(&node);
    let call = |verb: &str, config: &Value| {
        let plugin = bin_dir().join(config["type"].as_str().unwrap());
        let call = Invocation::new(&node, PYTHON).arg("-ISc").arg(LAUNCHER).arg(Netfilter.calls()).arg(plugin);
        call.command(verb).cni_path(bin_dir()).container(&container).config(config).env("PATH", &path).run()
    };
    let network = bridge(&node, &["10.1.0.0/24"]);
    let macspoofchk = patched(network.clone(), json!({"macspoofchk": true}));
    let refusal = "\"macspoofchk\": true needs nf_tables for bridges: ";
    let socket = "failed to open a netfilter socket: Protocol not supported (os error 93)";
    call("ADD", &macspoofchk).fails_with(2, &format!("{refusal}{socket}"));
    let masquerade = |backend: &str| patched(network.clone(), json!({"ipMasq": true, "ipMasqBackend": backend}));
    call("ADD", &masquerade("nftables")).fails_naming(2, &[socket]);
    call("STATUS", &patched(macspoofchk, json!({"cniVersion": "1.1.0"}))).fails_naming(50, &[socket]);
    let result = call("ADD", &masquerade("iptables")).success();
    let mapping = json!([{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]);
    for (kind, keys) in [("portmap", json!({"runtimeConfig": {"portMappings": mapping}})), ("firewall", json!({}))] {
        let with = |backend: &str| patched(chained(kind, &result, keys.clone()), json!({"backend": backend}));
        let refusal = "\"backend\": \"nftables\" cannot be used on this host: ";
        call("ADD", &with("nftables")).fails_with(2, &format!("{refusal}{socket}"));
        call("STATUS", &patched(with("nftables"), json!({"cniVersion": "1.1.0"}))).fails_with(50, "");
        for _ in 0..2 {
            call("ADD", &with("iptables")).success();
            call("CHECK", &with("iptables")).success();
        }
        call("CHECK", &with("nftables")).success();
        call("GC", &patched(with("iptables"), json!({"cniVersion": "1.1.0", "cni.dev/valid-attachments": []})))
            .success();
        call("CHECK", &with("iptables")).failure();
        call("ADD", &with("iptables")).success();
        call("DEL", &with("iptables")).success();
        call("DEL", &with("nftables")).success();
    }
    let chain =
        patched(chained("firewall", &result, json!({"backend": "nftables"})), json!({"nftablesChain": "inet a b"}));
    call("ADD", &chain).fails_naming(2, &[socket]);
    call("CHECK", &patched(masquerade("iptables"), json!({"prevResult": result}))).success();
    call("DEL", &masquerade("iptables")).success();
    call("DEL", &patched(masquerade("nftables"), json!({"macspoofchk": true}))).success();
    let rules = node.exec(&["env", &format!("PATH={path}"), "iptables-save"]);
    assert!(!rules.contains("10.1.0.") && !rules.contains("8080"), "{rules}");
}
