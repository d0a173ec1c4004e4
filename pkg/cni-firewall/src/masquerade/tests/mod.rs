//! Tests masquerading on the real kernel, in new network namespaces, and with Go's bridge plugin.
//! This file has the test host ([`Rig`]) and the tests of both backends.

use std::cell::RefCell;
use std::net::IpAddr;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use cni_testkit::program;

use super::*;
use crate::iptables::{Folders, Variant};
use crate::testing::shell;
use crate::testing::{in_new_netns, machine, new_netns, skip};
use cni_linux::netns::Netns;

mod in_iptables;
mod in_nftables;

const NET4: &str = "10.88.0.2/24";
const NET6: &str = "fd00:88::2/64";

fn cidrs(texts: &[&str]) -> Vec<Cidr> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn attachment(container: &str, ifname: &str) -> AttachmentId {
    AttachmentId::new("net", container, ifname)
}

/// Returns masquerading with iptables' programs and lock in these folders.
fn with_folders(machine: &dyn Machine, notes: Notes, folders: Folders) -> Masquerade<'_> {
    let mut masquerade = Masquerade::new(machine, notes);
    masquerade.store.folders = folders;
    masquerade
}

/// A host that has the programs of one variant of iptables, or none.
struct Rig {
    variant: Option<Variant>,
    folder: tempfile::TempDir,
}

/// Runs the body once for each variant of iptables that is installed, each time on a new host in a
/// new network namespace.
#[track_caller]
fn with_each(body: impl Fn(&Rig) + Sync) {
    for variant in [Variant::Nft, Variant::Legacy] {
        in_new_netns(|| {
            let programs = format!("/usr/sbin/iptables-{variant}-restore");
            if std::path::Path::new(&programs).exists() {
                body(&Rig::new(variant));
            } else {
                skip(&format!("no {programs} on this machine"));
            }
        });
    }
}

impl Rig {
    /// Returns a host with the programs of this variant only, under their plain names too. Each
    /// start of a program is logged ([`Rig::log`]).
    fn new(variant: Variant) -> Rig {
        let rig = Rig::bare();
        // A program is started by the name of the link, which names no variant; the plugin finds
        // the variant in the name of the file that the link leads to.
        let text = format!(
            "#!/bin/sh\nname=${{0##*/}}\necho $name >>{}\nexec /usr/sbin/${{name%%-*}}-{variant}${{name#ip*tables}} \"$@\"\n",
            rig.log().display(),
        );
        let program = rig.folder.path().join("script");
        program::script(&program, &text);
        for family in ["iptables", "ip6tables"] {
            for suffix in ["", "-restore", "-save"] {
                let script = rig.folder.path().join(format!("{family}-{variant}-script{suffix}"));
                std::fs::hard_link(&program, &script).unwrap();
                symlink(&script, rig.folder.path().join(format!("{family}{suffix}"))).unwrap();
            }
        }
        Rig { variant: Some(variant), ..rig }
    }

    /// Returns a host without programs.
    fn bare() -> Rig {
        Rig { variant: None, folder: tempfile::tempdir().unwrap() }
    }

    /// Returns the folders of the host's programs and of its lock, so no file is left in /run.
    fn folders(&self) -> Folders {
        Folders::only([self.folder.path().to_owned()]).with_lock_folder(self.folder.path().join("locks"))
    }

    /// Returns the path of the file with the name of each program that was started.
    fn log(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    /// Returns the names of the programs that `work` has started.
    fn programs_of(&self, work: impl FnOnce()) -> Vec<String> {
        let _ = std::fs::remove_file(self.log());
        work();
        let log = std::fs::read_to_string(self.log()).unwrap_or_default();
        log.lines().map(str::to_owned).collect()
    }

    fn masquerade<T>(&self, work: impl FnOnce(&Masquerade<'_>) -> T) -> T {
        work(&with_folders(&machine(), Notes::silent(), self.folders()))
    }

    #[track_caller]
    fn ensure(&self, attachment: &AttachmentId, addresses: &[&str]) {
        self.masquerade(|masquerade| {
            masquerade.ensure(attachment, None, &cidrs(addresses)).unwrap();
        });
    }

    #[track_caller]
    fn purge(&self, attachment: &AttachmentId, addresses: &[&str]) {
        let addresses: Vec<IpAddr> = addresses.iter().map(|address| address.parse().unwrap()).collect();
        self.masquerade(|masquerade| masquerade.purge(AttachmentFilter::for_del(attachment, &addresses)).unwrap());
    }

    #[track_caller]
    fn missing(&self, attachment: &AttachmentId, addresses: &[&str]) -> Vec<String> {
        self.masquerade(|masquerade| masquerade.check(attachment, &cidrs(addresses)).unwrap())
    }

    #[track_caller]
    fn gc(&self, valid: &[(&str, &str)]) {
        let valid = valid.iter().copied().collect();
        let filter = AttachmentFilter::Garbage { network: "net", valid: &valid };
        self.masquerade(|masquerade| masquerade.purge(filter).unwrap());
    }

    /// Returns all rules and the CNI chains of table nat, in both families, as the variant's
    /// `iptables-save` prints them.
    fn saved(&self) -> Vec<String> {
        let variant = self.variant.unwrap();
        let text = shell(&format!(
            "/usr/sbin/iptables-{variant}-save -t nat 2>/dev/null; /usr/sbin/ip6tables-{variant}-save -t nat 2>/dev/null"
        ));
        text.lines().filter(|line| line.starts_with("-A") || line.starts_with(":CNI")).map(str::to_owned).collect()
    }

    /// Returns [`saved`](Rig::saved) without the tags, which Go does not write.
    fn saved_as_go(&self) -> Vec<String> {
        self.saved().into_iter().filter(|line| line.contains(" -j ") || line.starts_with(':')).collect()
    }

    fn iptables(&self, arguments: &str) {
        shell(&format!("{}/iptables {arguments}", self.folder.path().display()));
    }
}

/// Go's bridge plugin with `ipMasq` and fixed addresses, on this host's iptables.
struct Go {
    container: Netns,
    id: String,
    ifname: String,
    addresses: Vec<String>,
}

impl Go {
    /// Returns the plugin with a new network namespace for its container. If the plugin is not
    /// installed, reports the test as skipped and returns `None`.
    fn new(id: &str, ifname: &str, addresses: &[&str]) -> Option<Go> {
        if let Err(reason) = cni_testkit::probe::go_plugins() {
            skip(&reason);
            return None;
        }
        let addresses = addresses.iter().map(|address| (*address).to_owned()).collect();
        Some(Go { container: new_netns(), id: id.to_owned(), ifname: ifname.to_owned(), addresses })
    }

    #[track_caller]
    fn add(&self, rig: &Rig) {
        assert!(self.run(rig, "ADD"), "ADD");
    }

    /// Runs the verb, and returns whether it succeeded. An ADD must succeed.
    fn run(&self, rig: &Rig, verb: &str) -> bool {
        use std::io::Write as _;
        let netns = format!("/proc/{}/fd/{}", std::process::id(), self.container.as_fd().as_raw_fd());
        let list = |before: &str, after: &str| {
            self.addresses.iter().map(|address| format!("{before}\"{address}\"{after}")).collect::<Vec<_>>().join(",")
        };
        let config = format!(
            r#"{{"cniVersion":"1.0.0","name":"net","type":"bridge","bridge":"br0","ipMasq":true,
                "ipam":{{"type":"static","addresses":[{}]}}}}"#,
            list("{\"address\":", "}")
        );
        let mut child = Command::new(cni_testkit::go_bin_dir().join("bridge"))
            .env("PATH", format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", rig.folder.path().display()))
            .env("CNI_COMMAND", verb)
            .env("CNI_CONTAINERID", &self.id)
            .env("CNI_NETNS", netns)
            .env("CNI_IFNAME", &self.ifname)
            .env("CNI_PATH", cni_testkit::go_bin_dir())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(config.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        if !output.status.success() && verb == "ADD" {
            panic!("{}", String::from_utf8_lossy(&output.stdout));
        }
        output.status.success()
    }

    /// Creates an interface with the addresses in the container. Go's DEL without `prevResult`
    /// removes the rules of the addresses that it finds on the interface.
    fn create_interface(&self) {
        let Go { ifname, addresses, .. } = self;
        let mut script = format!("ip link add {ifname} type veth peer name outside; ip link set {ifname} up");
        for address in addresses {
            script += &format!("; ip address add {address} dev {ifname} nodad");
        }
        let netns = format!("/proc/{}/fd/{}", std::process::id(), self.container.as_fd().as_raw_fd());
        shell(&format!("nsenter --net={netns} sh -ec '{script}'"));
    }
}

#[test]
fn a_host_without_iptables_is_served_by_nftables() {
    in_new_netns(|| {
        let rig = Rig::bare();
        rig.masquerade(|masquerade| masquerade.probe(None).unwrap());
        rig.masquerade(|masquerade| masquerade.probe(Some(Backend::Iptables)).unwrap());
        rig.ensure(&attachment("c1", "eth0"), &[NET4, NET6]);
        assert_eq!(shell("nft list ruleset").matches("masquerade comment").count(), 2);
        assert_eq!(rig.missing(&attachment("c1", "eth0"), &[NET4, NET6]), Vec::<String>::new());
        rig.purge(&attachment("c1", "eth0"), &[]);
        assert_eq!(shell("nft list ruleset").matches("masquerade comment").count(), 0);
    });
}

#[test]
fn a_broken_iptables_is_skipped_unless_it_was_requested() {
    in_new_netns(|| {
        let rig = Rig::bare();
        let script = rig.folder.path().join("iptables-legacy-script");
        program::script(&script, "#!/bin/sh\necho 'no such table' >&2; exit 3\n");
        symlink(&script, rig.folder.path().join("iptables-restore")).unwrap();
        rig.ensure(&attachment("c1", "eth0"), &[NET4]);
        assert_eq!(shell("nft list ruleset").matches("masquerade comment").count(), 1);
        let explicit = |masquerade: &Masquerade<'_>| {
            masquerade.ensure(&attachment("c2", "eth0"), Some(Backend::Iptables), &cidrs(&[NET4])).unwrap_err()
        };
        let error = rig.masquerade(explicit).to_string();
        assert!(error.contains("iptables-restore --noflush") && error.contains("no such table"), "{error}");
        rig.masquerade(|masquerade| {
            masquerade
                .ensure(&attachment("c2", "eth0"), Some(Backend::Iptables), &cidrs(&[NET6]))
                .expect("without a program the rules are those of iptables-nft");
        });
    });
}

#[test]
fn nftables_is_probed_without_a_program_of_iptables() {
    in_new_netns(|| {
        let rig = Rig::bare();
        // The name contains no variant, so the program would have to report it.
        program::script(rig.folder.path().join("iptables-restore"), "#!/bin/sh\nexit 3\n");
        rig.masquerade(|masquerade| {
            masquerade.probe(Some(Backend::Nftables)).unwrap();
            masquerade.probe(None).unwrap_err();
        });
    });
}

#[test]
fn rules_of_the_other_backend_are_checked_and_removed_too() {
    with_each(|rig| {
        for backend in [Backend::Iptables, Backend::Nftables] {
            rig.masquerade(|masquerade| {
                masquerade.ensure(&attachment("c1", "eth0"), Some(backend), &cidrs(&[NET4])).unwrap();
            });
            assert_eq!(rig.missing(&attachment("c1", "eth0"), &[NET4]), Vec::<String>::new(), "{backend}");
            rig.purge(&attachment("c1", "eth0"), &[]);
            assert!(!rig.missing(&attachment("c1", "eth0"), &[NET4]).is_empty(), "{backend}");
            assert_eq!(rig.saved(), Vec::<String>::new());
            assert!(!shell("nft list ruleset").contains("id: c1"));
        }
    });
}

#[test]
fn a_missing_program_of_the_legacy_variant_fails_no_removal() {
    in_new_netns(|| {
        let rig = Rig::new(Variant::Legacy);
        rig.ensure(&attachment("c1", "eth0"), &[NET4]);
        let (noted, bare) = (std::rc::Rc::new(RefCell::new(String::new())), Rig::bare());
        let sink = std::rc::Rc::clone(&noted);
        let notes = Notes::new(move |line| sink.borrow_mut().push_str(line));
        let (machine, c1) = (machine(), attachment("c1", "eth0"));
        let masquerade = with_folders(&machine, notes, bare.folders());
        masquerade.purge(AttachmentFilter::for_del(&c1, &[])).unwrap();
        assert!(noted.borrow().contains("iptables-legacy"), "{}", noted.borrow());
        rig.purge(&attachment("c1", "eth0"), &[]);
        assert_eq!(rig.saved(), Vec::<String>::new());
    });
}
