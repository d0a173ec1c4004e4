use std::path::{Path, PathBuf};

use super::*;

/// A release's programs for a table of a family.
struct Release<'a> {
    bin: &'a Path,
    family: Family,
    table: Table,
}

impl Release<'_> {
    fn command(&self, job: &str, args: &str) -> String {
        let base = if self.family == Family::V4 { "iptables" } else { "ip6tables" };
        // This machine's plain name may be the other variant.
        let own = self.bin == Path::new("/usr/sbin");
        let (variant, path) = (if own { "-nft" } else { "" }, self.bin.display());
        // Of iptables-restore, -t is another option.
        let table = if job == "-restore" { String::new() } else { format!("-t {} ", self.table.name()) };
        format!("{path}/{base}{variant}{job} {table}{args}")
    }

    /// `-S` without policies: which base chains there are differs from release to release.
    fn rules(&self) -> Vec<String> {
        let listed = shell(&self.command("", "-S"));
        listed.lines().filter(|line| !line.starts_with("-P")).map(str::to_owned).collect()
    }

    fn add_all(&self, lines: &[String]) {
        let table = self.table.name();
        let text = format!("*{table}\n:CNI-A - [0:0]\n:CNI-B - [0:0]\n{}\nCOMMIT", lines.join("\n"));
        shell(&format!("{} <<'EOF'\n{text}\nEOF", self.command("-restore", "--noflush")));
    }
}

/// Rules in the words of `-A`, as plugins write them.
fn lines(family: Family, table: Table) -> Vec<String> {
    let mut lines: Vec<String> = match table {
        Table::Nat => forms(family).iter().map(|form| format!("-A CNI-A {form}")).collect(),
        Table::Filter => Vec::new(),
    };
    lines.extend(match (family, table) {
        (_, Table::Nat) => vec![
            "-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-B".to_owned(),
            "-A OUTPUT -m addrtype --dst-type LOCAL -j CNI-B".to_owned(),
            "-A POSTROUTING -m comment --comment \"CNI portfwd requiring masquerade\" -j CNI-B".to_owned(),
        ],
        (family, Table::Filter) => {
            let host = if family == Family::V4 { "10.88.0.2/32" } else { "fd00::2/128" };
            vec![
                "-A FORWARD -m comment --comment \"CNI firewall plugin rules\" -j CNI-A".to_owned(),
                format!("-A CNI-A -d {host} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"),
                format!("-A CNI-A -d {host} -m conntrack --ctstate DNAT -j ACCEPT"),
                format!("-A CNI-A -s {host} -j ACCEPT"),
                "-A CNI-A -i cni0 ! -o cni0 -m comment --comment \"isolated\" -j CNI-B".to_owned(),
                "-A CNI-B -o cni0 -j DROP".to_owned(),
                "-A CNI-B -m comment --comment \"the end\" -j RETURN".to_owned(),
            ]
        }
    });
    lines
}

fn write_over_netlink(family: Family, table: Table, lines: &[String]) {
    let rig = Rig::new();
    // No program: what is not written over netlink fails.
    let folders = Folders::only([PathBuf::from("/nonexistent")]).with_lock_folder(rig.locks.path());
    let mut iptables = Iptables::open_with(table, &rig.machine, Notes::silent(), OnSigterm::Kill, folders).unwrap();
    let plan = |_: &mut Chains<'_>| {
        let mut edit = Edit::new();
        edit.create_chain("CNI-A");
        edit.create_chain("CNI-B");
        for line in lines {
            let words = split(line);
            edit.append(&words[1], words[2..].to_vec());
        }
        Ok(edit)
    };
    iptables.change(family, Variant::Nft, plan).unwrap();
}

/// Runs the body for each release, family and table, in a namespace of its own, with rules written
/// over netlink.
fn with_each_release(body: impl Fn(&Release<'_>, &[String]) + Sync) {
    let releases = match cni_testkit::probe::iptables_releases() {
        Ok(releases) => releases,
        Err(why) => return skip(&why),
    };
    for bin in &releases {
        for (family, table) in FAMILIES.into_iter().flat_map(|family| [(family, Table::Nat), (family, Table::Filter)]) {
            in_new_netns(|| {
                let lines = lines(family, table);
                write_over_netlink(family, table, &lines);
                body(&Release { bin, family, table }, &lines);
            });
        }
    }
}

#[test]
fn every_release_lists_the_rules_as_its_own() {
    with_each_release(|release, lines| {
        let listed = release.rules();
        in_new_netns(|| {
            release.add_all(lines);
            assert_eq!(listed, release.rules(), "{}", release.bin.display());
        });
        assert!(listed.len() > lines.len(), "chains and rules: {listed:?}");
    });
}

#[test]
fn every_release_finds_and_deletes_each_rule() {
    with_each_release(|release, lines| {
        for command in ["-C", "-D"] {
            for line in lines {
                shell(&release.command("", &line.replacen("-A", command, 1)));
            }
        }
        assert_eq!(release.rules(), ["-N CNI-A", "-N CNI-B"], "{}", release.bin.display());
    });
}

#[test]
fn every_release_saves_and_restores_the_rules() {
    with_each_release(|release, _| {
        let before = release.rules();
        let saved = shell(&release.command("-save", ""));
        shell(&format!("{} <<'EOF'\n{saved}\nEOF", release.command("-restore", "")));
        assert_eq!(release.rules(), before, "{}", release.bin.display());
    });
}

#[test]
fn base_chains_are_those_that_this_machine_s_iptables_makes() {
    for (family, table) in FAMILIES.into_iter().flat_map(|family| [(family, Table::Nat), (family, Table::Filter)]) {
        let release = Release { bin: Path::new("/usr/sbin"), family, table };
        let chains = || shell("nft list ruleset | grep -B1 hook || true");
        let lines = lines(family, table);
        in_new_netns(|| {
            write_over_netlink(family, table, &lines);
            let written = chains();
            in_new_netns(|| {
                release.add_all(&lines);
                assert_eq!(written, chains());
            });
        });
    }
}
