//! Forwarding in iptables' table `filter`, as Go has it, and one chain more, the last. For
//! each address A of an attachment, and for each isolated bridge B:
//! ```text
//! -A FORWARD --comment "CNI firewall plugin rules (ingressPolicy: same-bridge|isolated)" -j CNI-ISOLATION-STAGE-1
//! -A FORWARD --comment "CNI firewall plugin rules" -j CNI-FORWARD
//! -A CNI-FORWARD --comment "CNI firewall plugin admin overrides" -j CNI-ADMIN
//! -A CNI-FORWARD -d A -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
//! -A CNI-FORWARD -s A -j ACCEPT
//! -A CNI-ISOLATION-STAGE-1 -i B -o B --comment "... (ingressPolicy: isolated)" -j DROP         # isolated alone
//! -A CNI-ISOLATION-STAGE-1 -i B ! -o B --comment "... (ingressPolicy: POLICY)" -j CNI-ISOLATION-STAGE-2
//! -A CNI-ISOLATION-STAGE-2 -o B --comment "... (ingressPolicy: same-bridge|isolated)" -j DROP
//! -A CNI-FW-OWNERS -s A [-i B [!] -o B] --comment cni:NETWORK/CONTAINER/IFNAME
//! ```
//! Both stages end with a RETURN. No rule leads to CNI-FW-OWNERS, whose rules name the bridge as
//! those of the first stage do. The Go plugin never looks at that chain.
//!
//! CNI-FORWARD accepts what leaves a container, so the first stage must come before it. The Go
//! plugin puts CNI-FORWARD before everything when it creates it, and never moves anything.
//!
//! Pure planning: these functions read a [`Chains`] and return an [`Edit`].

use std::net::IpAddr;

use cni::Cidr;

use super::owner::{self, Ingress, Owned, octets};
use crate::iptables::{Chains, Edit, Rule};
use cni_linux::error::Result;

/// Where every forwarded packet comes by.
const BASE: &str = "FORWARD";
pub(crate) const FORWARD: &str = "CNI-FORWARD";
pub(crate) const OWNERS: &str = "CNI-FW-OWNERS";
pub(crate) const STAGE_1: &str = "CNI-ISOLATION-STAGE-1";
const STAGE_2: &str = "CNI-ISOLATION-STAGE-2";
/// The chain for the administrator's rules, unless the configuration names another one.
pub const ADMIN: &str = "CNI-ADMIN";

const JUMP: &str = "CNI firewall plugin rules";
const ADMIN_JUMP: &str = "CNI firewall plugin admin overrides";
const ISOLATION: &str = "CNI firewall plugin rules (ingressPolicy: same-bridge|isolated)";

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

fn commented(matches: &[&str], comment: &str, target: &str) -> Vec<String> {
    words(&[matches, &["-m", "comment", "--comment", comment, "-j", target]].concat())
}

/// The rules of an address in [`FORWARD`].
fn accepts(address: IpAddr) -> [Vec<String>; 2] {
    let host = Cidr::host(address).to_string();
    [
        words(&["-d", &host, "-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED", "-j", "ACCEPT"]),
        words(&["-s", &host, "-j", "ACCEPT"]),
    ]
}

/// The rules of a bridge in [`STAGE_1`], in their order.
fn stage_1(ingress: &Ingress) -> Vec<Vec<String>> {
    let comment = format!("CNI firewall plugin rules (ingressPolicy: {})", ingress.name());
    match ingress {
        Ingress::Open => Vec::new(),
        Ingress::SameBridge(bridge) => vec![commented(&["-i", bridge, "!", "-o", bridge], &comment, STAGE_2)],
        Ingress::Isolated(bridge) => vec![
            commented(&["-i", bridge, "-o", bridge], &comment, "DROP"),
            commented(&["-i", bridge, "!", "-o", bridge], &comment, STAGE_2),
        ],
    }
}

fn stage_2(bridge: &str) -> Vec<String> {
    commented(&["-o", bridge], ISOLATION, "DROP")
}

fn end_of_stage() -> Vec<String> {
    commented(&[], ISOLATION, "RETURN")
}

fn owner_rule(owned: &Owned) -> Vec<String> {
    let host = Cidr::host(owned.address).to_string();
    let bridge = match &owned.ingress {
        Ingress::Open => Vec::new(),
        Ingress::SameBridge(bridge) => vec!["-i", bridge, "!", "-o", bridge],
        Ingress::Isolated(bridge) => vec!["-i", bridge, "-o", bridge],
    };
    words(&[&["-s", &host][..], &bridge, &["-m", "comment", "--comment", &owned.owner]].concat())
}

fn host(rule: &Rule, option: &str) -> Option<IpAddr> {
    let cidr: Cidr = rule.value(option)?.parse().ok()?;
    (cidr == Cidr::host(cidr.address())).then(|| cidr.address())
}

/// The owner that a rule of [`OWNERS`] names.
pub(crate) fn read_owner(rule: &Rule) -> Option<(&str, IpAddr, Ingress)> {
    let owner = rule.comment().filter(|comment| rule.target().is_none() && owner::is_name(comment))?;
    let ingress = match (rule.value("-i"), rule.value("-o")) {
        (None, _) => Ingress::Open,
        (Some(bridge), None) => Ingress::SameBridge(bridge.to_owned()),
        (Some(bridge), Some(_)) => Ingress::Isolated(bridge.to_owned()),
    };
    Some((owner, host(rule, "-s")?, ingress))
}

/// A rule of [`OWNERS`] and what it says.
struct Record {
    rule: Rule,
    owned: Owned,
}

impl Record {
    fn read(rule: &Rule) -> Option<Record> {
        let (owner, address, ingress) = read_owner(rule)?;
        Some(Record { rule: rule.clone(), owned: Owned { owner: owner.to_owned(), address, ingress } })
    }
}

/// The records that contain one of these.
fn records(filter: &mut Chains<'_>, needles: &[&[u8]]) -> Result<Vec<Record>> {
    let found = filter.find_rules(OWNERS, needles, |rule| rule.target().is_none())?;
    Ok(found.iter().filter_map(Record::read).collect())
}

fn all_records(filter: &mut Chains<'_>) -> Result<Vec<Record>> {
    Ok(filter.rules(OWNERS)?.iter().filter_map(Record::read).collect())
}

/// Which of these rules there are.
fn exact<'r>(rules: &'r [Rule], wanted: &'r [String]) -> impl Iterator<Item = &'r Rule> {
    rules.iter().filter(move |rule| rule.matches(wanted))
}

/// Adds a rule at the end unless it is there, and removes what racing Go plugins have doubled.
fn append_once(edit: &mut Edit, chain: &str, rules: &[Rule], wanted: Vec<String>) {
    for double in exact(rules, &wanted).skip(1) {
        edit.delete(chain, double);
    }
    if exact(rules, &wanted).next().is_none() {
        edit.append(chain, wanted);
    }
}

/// Makes these the addresses of the attachment `owner`, in the family of `filter`.
pub(super) fn ensure(filter: &mut Chains<'_>, owner: &str, addresses: &[Owned], admin: &str) -> Result<Edit> {
    let mut edit = Edit::new();
    let isolation: Vec<&Ingress> =
        addresses.iter().map(|owned| &owned.ingress).filter(|ingress| ingress.bridge().is_some()).collect();
    for chain in [FORWARD, admin, OWNERS] {
        if !filter.has_chain(chain)? {
            edit.create_chain(chain);
        }
    }
    if let Some(ingress) = isolation.first() {
        isolate(filter, &mut edit, ingress)?;
    }
    arrange(filter, &mut edit, if isolation.is_empty() { Isolation::AsItIs } else { Isolation::Wanted }, Jump::Wanted)?;

    let mut needles: Vec<Vec<u8>> = addresses.iter().map(|owned| octets(owned.address)).collect();
    needles.push(admin.as_bytes().to_vec());
    let needles: Vec<&[u8]> = needles.iter().map(Vec::as_slice).collect();
    let rules = filter.find_rules(FORWARD, &needles, |_| true)?;
    let to_admin = commented(&[], ADMIN_JUMP, admin);
    if exact(&rules, &to_admin).next().is_none() {
        edit.insert(FORWARD, to_admin);
    } else {
        append_once(&mut edit, FORWARD, &rules, to_admin);
    }
    let own = records(filter, &[owner.as_bytes()])?;
    let own: Vec<Record> = own.into_iter().filter(|record| record.owned.owner == owner).collect();
    let stale: Vec<&Record> = own.iter().filter(|record| !addresses.contains(&record.owned)).collect();
    for owned in addresses {
        for rule in accepts(owned.address) {
            append_once(&mut edit, FORWARD, &rules, rule);
        }
        if !own.iter().any(|record| record.owned == *owned) {
            edit.append(OWNERS, owner_rule(owned));
        }
    }
    if !stale.is_empty() {
        let still: Vec<Owned> = addresses.to_vec();
        edit.extend(forget(filter, &stale.iter().map(|record| &record.rule).collect::<Vec<_>>(), &[], &still)?);
    }
    Ok(edit)
}

/// The requested state of the jump to the first stage.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Isolation {
    /// Added if it is missing.
    Wanted,
    /// It is put in its place if there is one.
    AsItIs,
}

/// The requested state of the jump to [`FORWARD`].
#[derive(Clone, Copy, PartialEq, Eq)]
enum Jump {
    /// Added if it is missing.
    Wanted,
    /// It is left alone.
    AsItIs,
}

/// The ways out of [`BASE`], each once: to the first stage, then to [`FORWARD`].
fn arrange(filter: &mut Chains<'_>, edit: &mut Edit, isolation: Isolation, jump: Jump) -> Result<()> {
    let ours = [STAGE_1, FORWARD];
    // Nothing leads to a chain that does not exist, and a long chain need not be read.
    let rules = if filter.has_chain(FORWARD)? || filter.has_chain(STAGE_1)? {
        let leads = |rule: &Rule| rule.target().is_some_and(|target| ours.contains(&target));
        filter.find_rules(BASE, &ours.map(str::as_bytes), leads)?
    } else {
        Vec::new()
    };
    let (to_forward, to_stage) = (commented(&[], JUMP, FORWARD), commented(&[], ISOLATION, STAGE_1));
    let stages: Vec<Rule> = exact(&rules, &to_stage).cloned().collect();
    let is_missing = exact(&rules, &to_forward).next().is_none();
    if is_missing && jump == Jump::Wanted {
        edit.insert(BASE, to_forward.clone());
    }
    for double in exact(&rules, &to_forward).skip(1) {
        edit.delete(BASE, double);
    }
    if isolation == Isolation::AsItIs && stages.is_empty() {
        return Ok(());
    }
    let first = |target: &str| rules.iter().position(|rule| rule.target() == Some(target)).unwrap_or(usize::MAX);
    let is_first = rules.first().is_some_and(|rule| rule.matches(&to_stage)) && first(STAGE_1) < first(FORWARD);
    let stays = !(is_missing && jump == Jump::Wanted);
    if !(is_first && stays && stages.len() == 1) {
        edit.move_first(BASE, to_stage, &stages);
    }
    Ok(())
}

/// The rules of both stages for one bridge.
fn isolate(filter: &mut Chains<'_>, edit: &mut Edit, ingress: &Ingress) -> Result<()> {
    let Some(bridge) = ingress.bridge() else { return Ok(()) };
    for (chain, wanted) in [(STAGE_1, stage_1(ingress)), (STAGE_2, vec![stage_2(bridge)])] {
        if !filter.has_chain(chain)? {
            edit.create_chain(chain);
        }
        let rules = filter.rules(chain)?.to_vec();
        // The last one inserted is the first.
        for rule in wanted.into_iter().rev() {
            if exact(&rules, &rule).next().is_none() {
                edit.insert(chain, rule);
            }
        }
        if exact(&rules, &end_of_stage()).next().is_none() {
            edit.append(chain, end_of_stage());
        }
    }
    Ok(())
}

/// Removes what there is of the attachment `owner`, and the rules for these addresses unless
/// another attachment owns them.
pub(super) fn purge(filter: &mut Chains<'_>, owner: &str, addresses: &[IpAddr]) -> Result<Edit> {
    let own = records(filter, &[owner.as_bytes()])?;
    let own: Vec<&Rule> = own.iter().filter(|record| record.owned.owner == owner).map(|record| &record.rule).collect();
    forget(filter, &own, addresses, &[])
}

/// Removes the records of a network that are none of these owners', and puts the ways out of
/// [`BASE`] in their order.
pub(super) fn gc(filter: &mut Chains<'_>, network: &str, valid: &[String]) -> Result<Edit> {
    let prefixes = owner::prefixes(network);
    let needles = prefixes.each_ref().map(String::as_bytes);
    let found = records(filter, &needles)?;
    let is_garbage = |record: &&Record| {
        let owner = &record.owned.owner;
        prefixes.iter().any(|prefix| owner.starts_with(prefix)) && !valid.contains(owner)
    };
    let garbage: Vec<&Rule> = found.iter().filter(is_garbage).map(|record| &record.rule).collect();
    let mut edit = forget(filter, &garbage, &[], &[])?;
    arrange(filter, &mut edit, Isolation::AsItIs, Jump::AsItIs)?;
    Ok(edit)
}

/// Removes records; the rules for their addresses, and for the further `addresses`, that have no
/// other owner and are not in `still`; and the isolation that no attachment asks for any more.
fn forget(filter: &mut Chains<'_>, gone: &[&Rule], addresses: &[IpAddr], still: &[Owned]) -> Result<Edit> {
    let mut edit = Edit::new();
    let records: Vec<Record> = gone.iter().filter_map(|rule| Record::read(rule)).collect();
    let mut all: Vec<IpAddr> = records.iter().map(|record| record.owned.address).collect();
    all.extend(
        addresses.iter().filter(|address| address.is_ipv4() == (filter.family() == cni_linux::route::Family::V4)),
    );
    all.sort();
    all.dedup();
    if all.is_empty() {
        return Ok(edit);
    }
    let needles: Vec<Vec<u8>> = all.iter().map(|address| octets(*address)).collect();
    let needles: Vec<&[u8]> = needles.iter().map(Vec::as_slice).collect();
    let mut others = self::records(filter, &needles)?;
    others.retain(|other| !gone.contains(&&other.rule));
    let is_owned = |address: &IpAddr| {
        others.iter().map(|record| &record.owned).chain(still).any(|owned| owned.address == *address)
    };
    let free: Vec<IpAddr> = all.into_iter().filter(|address| !is_owned(address)).collect();
    let rules = filter.find_rules(FORWARD, &needles, |_| true)?;
    for rule in free.iter().flat_map(|address| accepts(*address)) {
        for one in exact(&rules, &rule) {
            edit.delete(FORWARD, one);
        }
    }
    for rule in gone {
        edit.delete(OWNERS, rule);
    }
    if filter.has_chain(STAGE_1)? {
        let mut left: Vec<Owned> = all_records(filter)?
            .into_iter()
            .filter(|record| !gone.contains(&&record.rule))
            .map(|record| record.owned)
            .collect();
        left.extend(still.iter().cloned());
        end_isolation(filter, &mut edit, &left, &free)?;
    }
    Ok(edit)
}

/// Removes the isolation of bridges for which none of the owners that are `left` asks. Addresses
/// without an owner are those of containers that the Go plugin has attached: it is not known what
/// these ask for, so all stays while there is one. `free` are the addresses whose rules are being
/// removed.
fn end_isolation(filter: &mut Chains<'_>, edit: &mut Edit, left: &[Owned], free: &[IpAddr]) -> Result<()> {
    let has_owner = |address: IpAddr| free.contains(&address) || left.iter().any(|owned| owned.address == address);
    let accepted = |rule: &Rule| host(rule, "-s").filter(|address| rule.matches(&accepts(*address)[1]));
    if filter.rules(FORWARD)?.iter().filter_map(accepted).any(|address| !has_owner(address)) {
        return Ok(());
    }
    for (chain, option) in [(STAGE_1, "-i"), (STAGE_2, "-o")] {
        for rule in filter.rules(chain)? {
            let Some(bridge) = rule.value(option) else { continue };
            let policies = [Ingress::SameBridge(bridge.to_owned()), Ingress::Isolated(bridge.to_owned())];
            let mut asked_for = policies
                .iter()
                .filter(|policy| rule.matches(&stage_2(bridge)) || stage_1(policy).iter().any(|one| rule.matches(one)));
            let is_ours = asked_for.clone().next().is_some();
            if is_ours && !asked_for.any(|policy| left.iter().any(|owned| owned.ingress == *policy)) {
                edit.delete(chain, rule);
            }
        }
    }
    Ok(())
}

/// The addresses that an attachment had in one family before an ADD.
#[derive(Clone, Debug, Default)]
pub(super) struct FamilyAddresses {
    owned: Vec<Owned>,
    /// Addresses whose rules were there without being the attachment's.
    others: Vec<IpAddr>,
}

impl FamilyAddresses {
    /// Reads what there is for the attachment and for the addresses that an ADD is about to give
    /// it.
    pub(super) fn read(filter: &mut Chains<'_>, owner: &str, addresses: &[Owned]) -> Result<FamilyAddresses> {
        let own = records(filter, &[owner.as_bytes()])?;
        let owned: Vec<Owned> = own.into_iter().map(|record| record.owned).filter(|one| one.owner == owner).collect();
        let needles: Vec<Vec<u8>> = addresses.iter().map(|owned| octets(owned.address)).collect();
        let rules = filter.find_rules(FORWARD, &needles.iter().map(Vec::as_slice).collect::<Vec<_>>(), |_| true)?;
        let is_there = |address: &IpAddr| accepts(*address).iter().any(|rule| exact(&rules, rule).next().is_some());
        let is_own = |address: &IpAddr| owned.iter().any(|owned| owned.address == *address);
        let others = addresses.iter().map(|owned| owned.address).filter(|one| is_there(one) && !is_own(one)).collect();
        Ok(FamilyAddresses { owned, others })
    }

    /// Returns the edit that undoes an [`ensure`] of these addresses.
    pub(super) fn put_back(
        &self,
        filter: &mut Chains<'_>,
        owner: &str,
        addresses: &[Owned],
        admin: &str,
    ) -> Result<Edit> {
        if !self.owned.is_empty() {
            return ensure(filter, owner, &self.owned, admin);
        }
        let own = records(filter, &[owner.as_bytes()])?;
        let own: Vec<&Rule> =
            own.iter().filter(|record| record.owned.owner == owner).map(|record| &record.rule).collect();
        let still: Vec<Owned> =
            addresses.iter().filter(|owned| self.others.contains(&owned.address)).cloned().collect();
        forget(filter, &own, &[], &still)
    }
}

/// Returns a sentence for each rule that is missing or in the wrong place. Accepts Go's rules.
pub(super) fn check(filter: &mut Chains<'_>, addresses: &[Owned], admin: &str) -> Result<Vec<String>> {
    let mut missing = Vec::new();
    let mut chains = vec![FORWARD, admin];
    let bridge = addresses.iter().find_map(|owned| owned.ingress.bridge());
    if bridge.is_some() {
        chains.extend([STAGE_1, STAGE_2]);
    }
    for chain in chains {
        if !filter.has_chain(chain)? {
            missing.push(format!("iptables chain {chain} is missing from table filter"));
        }
    }
    if !missing.is_empty() {
        return Ok(missing);
    }
    let ours = [STAGE_1, FORWARD];
    let leads = |rule: &Rule| rule.target().is_some_and(|target| ours.contains(&target));
    let base = filter.find_rules(BASE, &ours.map(str::as_bytes), leads)?;
    let mut wanted = vec![(BASE, base.clone(), commented(&[], JUMP, FORWARD))];
    let rules = filter.rules(FORWARD)?.to_vec();
    wanted.push((FORWARD, rules.clone(), commented(&[], ADMIN_JUMP, admin)));
    for rule in addresses.iter().flat_map(|owned| accepts(owned.address)) {
        wanted.push((FORWARD, rules.clone(), rule));
    }
    if let (Some(bridge), Some(owned)) = (bridge, addresses.first()) {
        wanted.push((BASE, base.clone(), commented(&[], ISOLATION, STAGE_1)));
        let first = filter.rules(STAGE_1)?.to_vec();
        wanted.extend(stage_1(&owned.ingress).into_iter().map(|rule| (STAGE_1, first.clone(), rule)));
        wanted.push((STAGE_2, filter.rules(STAGE_2)?.to_vec(), stage_2(bridge)));
    }
    for (chain, rules, rule) in wanted {
        if exact(&rules, &rule).next().is_none() {
            missing.push(format!("iptables chain {chain} has no rule {}", rule.join(" ")));
        }
    }
    if bridge.is_some() && missing.is_empty() && base.first().and_then(Rule::target) != Some(STAGE_1) {
        missing.push(format!("iptables chain {BASE} leads to {FORWARD} before {STAGE_1}: nothing is isolated"));
    }
    Ok(missing)
}

/// Whether any of the addresses has a rule here.
pub(super) fn holds(filter: &mut Chains<'_>, addresses: &[IpAddr]) -> Result<bool> {
    let needles: Vec<Vec<u8>> = addresses.iter().map(|address| octets(*address)).collect();
    let rules = filter.find_rules(FORWARD, &needles.iter().map(Vec::as_slice).collect::<Vec<_>>(), |_| true)?;
    Ok(addresses.iter().flat_map(|address| accepts(*address)).any(|rule| exact(&rules, &rule).next().is_some()))
}
