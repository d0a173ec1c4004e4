//! Masquerading in iptables' table `nat`, in the form of the Go plugins.
//!
//! `CNI-HASH` is `CNI-` and a hash of network and container, COMMENT is
//! `name: "NETWORK" id: "CONTAINER"`. Go writes all of these rules except the last two:
//! ```text
//! -A POSTROUTING -s ADDRESS -m comment --comment COMMENT -j CNI-HASH
//! -A CNI-HASH -d NETWORK -m comment --comment COMMENT -j ACCEPT
//! -A CNI-HASH ! -d 224.0.0.0/4 -m comment --comment COMMENT -j MASQUERADE
//! -A CNI-HASH -s ADDRESS -d EXCLUDED -m comment --comment COMMENT -j ACCEPT
//! -A CNI-HASH -s ADDRESS -d NETWORK -m comment --comment cni:NETWORK/CONTAINER/IFNAME
//! ```
//! All interfaces of the container in this network share the chain. The last rule, the *tag*, has
//! no target and is never reached. It records which attachment has the address, so that DEL of one
//! interface leaves the rules of another. Go does not read tags, and removes them with the chain. A
//! jump from POSTROUTING whose source is in no tag of the chain is *untagged*: Go wrote it (older
//! releases of Go wrote it as `-s NETWORK`).
//!
//! There is an *exclusion*, an ACCEPT rule with a source, for each excluded destination. It
//! belongs to the attachment with the address, and precedes the MASQUERADE rule. Go removes it with
//! the chain.
//!
//! If a container has addresses of two networks in one family, both ACCEPT rules precede the
//! MASQUERADE rule. Go appends the second ACCEPT after it, where it is never reached.
//!
//! These functions only plan: they read [`Chains`] and return an [`Edit`].

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use cni::Cidr;
use cni::hash::sha512_hex;
use cni::text::cut;

use super::Wanted;
use crate::iptables::{Chain, Chains, Edit, IfMissing, Part, Rule};
use crate::owner::{ALIAS, AttachmentFilter, Untagged};
use cni::AttachmentId;
use cni_linux::error::Result;
use cni_linux::route::Family;

pub(crate) const POSTROUTING: &str = "POSTROUTING";
const CHAIN_PREFIX: &str = "CNI-";
const CHAIN_DIGITS: usize = 24;
/// The longest comment, in bytes, that iptables accepts.
const COMMENT_MAX: usize = 255;

/// Returns the name of the container's chain in this network.
pub(super) fn chain_name(network: &str, container: &str) -> String {
    format!("{CHAIN_PREFIX}{}", sha512_hex(&[network.as_bytes(), container.as_bytes()], CHAIN_DIGITS))
}

/// Returns the name of the chain of the attachment's container.
pub(super) fn chain_of(attachment: &AttachmentId) -> String {
    chain_name(&attachment.network, &attachment.container_id)
}

/// Whether this is the name of a masquerading chain: `CNI-` and 24 hex digits. The names of other
/// chains of CNI plugins have a different form.
pub(crate) fn is_chain_name(name: &str) -> bool {
    name.strip_prefix(CHAIN_PREFIX)
        .is_some_and(|hash| hash.len() == CHAIN_DIGITS && hash.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// Returns the comment of the rules of the attachment's container in this network, as Go writes it,
/// cut to the length that iptables accepts. Valid names have no characters that would have to be
/// escaped.
pub(crate) fn comment(attachment: &AttachmentId) -> String {
    let comment = format!("name: \"{}\" id: \"{}\"", attachment.network, attachment.container_id);
    cut(&comment, COMMENT_MAX).to_owned()
}

/// Returns the network and the container that a comment names; `None` if the comment was cut or has
/// a different form.
pub(crate) fn read_comment(comment: &str) -> Option<(&str, &str)> {
    comment.strip_prefix("name: \"")?.strip_suffix('"')?.split_once("\" id: \"")
}

/// Returns the address and the prefix length of the family's multicast network: packets to it are
/// never masqueraded.
pub(super) fn multicast(family: Family) -> (IpAddr, u8) {
    match family {
        Family::V4 => (Ipv4Addr::new(224, 0, 0, 0).into(), 4),
        Family::V6 => (Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0).into(), 8),
    }
}

/// The name and the comments in the rules of an attachment.
struct RuleNames {
    /// The name of the container's chain.
    chain: String,
    /// The comment of the container's rules.
    comment: String,
    /// The attachment's alias, `cni:NETWORK/CONTAINER/IFNAME`: the comment of its tags.
    alias: String,
}

impl RuleNames {
    /// Returns the names for the attachment's rules.
    fn new(attachment: &AttachmentId) -> RuleNames {
        RuleNames { chain: chain_of(attachment), comment: comment(attachment), alias: attachment.alias() }
    }

    /// Returns the words of a rule with these matches, the container's comment and this target.
    fn commented(&self, matches: &[&str], target: &str) -> Vec<String> {
        let comment_and_target = ["-m", "comment", "--comment", &self.comment, "-j", target];
        matches.iter().chain(&comment_and_target).map(|word| (*word).to_owned()).collect()
    }

    /// Returns the rule of POSTROUTING that sends the address's packets to the container's chain.
    fn jump(&self, address: Cidr) -> Vec<String> {
        self.commented(&["-s", &Cidr::host(address.address()).to_string()], &self.chain)
    }

    /// Returns the rules of the container's chain that let packets to the networks of the wanted
    /// addresses, and from these addresses to the excluded destinations, keep their source.
    fn accepts(&self, wanted: &Wanted<'_>) -> Vec<Vec<String>> {
        let mut rules = Vec::new();
        for address in &wanted.addresses {
            let rule = self.commented(&["-d", &address.network().to_string()], "ACCEPT");
            if !rules.contains(&rule) {
                rules.push(rule);
            }
        }
        for address in &wanted.addresses {
            let source = Cidr::host(address.address()).to_string();
            let exclusion = |to: &Cidr| self.commented(&["-s", &source, "-d", &to.to_string()], "ACCEPT");
            rules.extend(wanted.exclude.iter().map(exclusion));
        }
        rules
    }

    /// Returns the rule of the container's chain that masquerades all other unicast packets.
    fn masquerade(&self, family: Family) -> Vec<String> {
        let (address, prefix) = multicast(family);
        self.commented(&["!", "-d", &format!("{address}/{prefix}")], "MASQUERADE")
    }

    /// Returns the rule without a target that records that the attachment has `address`.
    fn tag(&self, address: Cidr) -> Vec<String> {
        let source = Cidr::host(address.address()).to_string();
        let network = address.network().to_string();
        ["-s", &source, "-d", &network, "-m", "comment", "--comment", &self.alias].map(str::to_owned).into()
    }

    /// Whether `rule`, of POSTROUTING, sends packets of this container to its chain. The target is
    /// not enough: the hash has no separator, so network `ab` with container `c` and network `a`
    /// with container `bc` have the same chain.
    fn is_jump(&self, rule: &Rule) -> bool {
        rule.target() == Some(&self.chain) && rule.comment() == Some(&self.comment)
    }
}

/// Returns the address or network that the rule matches with this option, `-s` or `-d`; `None` if
/// it matches any.
fn cidr(rule: &Rule, option: &str) -> Option<Cidr> {
    rule.value(option)?.parse().ok()
}

/// A rule without a target, as read from a container's chain, that records an attachment's address.
struct Tag<'r> {
    rule: &'r Rule,
    /// The attachment's alias.
    alias: &'r str,
    /// The address, as /32 or /128.
    source: Option<Cidr>,
    /// The network that the address is in.
    network: Option<Cidr>,
}

impl Tag<'_> {
    /// Reads a rule; `None` if it is not a tag.
    fn read(rule: &Rule) -> Option<Tag<'_>> {
        let alias = rule.comment()?;
        if rule.target().is_some() || !alias.starts_with("cni:") {
            return None;
        }
        Some(Tag { rule, alias, source: cidr(rule, "-s"), network: cidr(rule, "-d") })
    }
}

/// The rules of a container that are in place.
#[derive(Default)]
struct ContainerRules {
    /// The container's chain; `None` if it does not exist.
    chain: Option<Chain>,
    /// The rules of POSTROUTING that send the container's packets to the chain.
    jumps: Vec<Rule>,
    /// Whether rules of another container jump to the chain ([`RuleNames::is_jump`]).
    has_other_jumps: bool,
}

impl ContainerRules {
    /// Reads the rules of a container.
    fn read(nat: &mut Chains<'_>, names: &RuleNames, if_missing: IfMissing) -> Result<ContainerRules> {
        // Without the chain, POSTROUTING, which can be long, is not read: a rule cannot jump to a
        // chain that does not exist.
        let Some(chain) = nat.chain(&names.chain)?.cloned() else { return Ok(ContainerRules::default()) };
        let leads_to_chain = |rule: &Rule| rule.target() == Some(&names.chain);
        let all_jumps = nat.find_rules(POSTROUTING, &[Part::Target(&names.chain)], if_missing, leads_to_chain)?;
        let (jumps, other_jumps): (Vec<Rule>, Vec<Rule>) = all_jumps.into_iter().partition(|rule| names.is_jump(rule));
        Ok(ContainerRules { chain: Some(chain), jumps, has_other_jumps: !other_jumps.is_empty() })
    }

    /// Reads the rules of all containers of a network. Returns them by the names of their chains.
    fn read_all(nat: &mut Chains<'_>, network: &str) -> Result<Vec<(String, ContainerRules)>> {
        let mut containers = Vec::new();
        let names = nat.read_chains_where(is_chain_name)?;
        // POSTROUTING, which can be long, is not read without need.
        if names.is_empty() {
            return Ok(containers);
        }
        let mut all_jumps = nat.rules_by_target(POSTROUTING)?;
        let prefixes = [AttachmentId::network_prefix(network), format!("name: \"{network}\" id: ")];
        let is_of_network = |comment: &str| prefixes.iter().any(|prefix| comment.starts_with(prefix));
        for name in names {
            let Some(chain) = nat.chain(&name)? else { continue };
            let jumps = all_jumps.remove(&name).unwrap_or_default();
            // The chain's name is only a hash: the comments decide which network it belongs to. A
            // chain without comments, or with one of another network, is left out. So no container
            // of another network jumps to the remaining chains.
            let mut comments = jumps.iter().chain(&chain.rules).filter_map(Rule::comment).peekable();
            if comments.peek().is_some() && comments.all(is_of_network) {
                let chain = Some(chain.clone());
                containers.push((name, ContainerRules { chain, jumps, has_other_jumps: false }));
            }
        }
        Ok(containers)
    }

    /// Returns the rules of the container's chain; none if it does not exist.
    fn in_chain(&self) -> &[Rule] {
        self.chain.as_ref().map_or(&[], |chain| &chain.rules)
    }

    /// Adds to `edit` the wanted rules that are missing.
    fn add_missing(&self, edit: &mut Edit, names: &RuleNames, family: Family, wanted: &Wanted<'_>) {
        if self.chain.is_none() {
            edit.create_chain(&names.chain);
        }
        let is_missing = |words: &Vec<String>| !self.in_chain().iter().any(|rule| rule.matches(words));
        // Inserted, not appended, because ACCEPT must precede MASQUERADE. Each is inserted before
        // the others, so the last is inserted first.
        for accept in names.accepts(wanted).into_iter().rev().filter(is_missing) {
            edit.insert(&names.chain, accept);
        }
        let tags = wanted.addresses.iter().map(|address| names.tag(*address));
        for words in std::iter::once(names.masquerade(family)).chain(tags).filter(is_missing) {
            edit.append(&names.chain, words);
        }
        for address in &wanted.addresses {
            let host = Cidr::host(address.address());
            if !self.jumps.iter().any(|jump| cidr(jump, "-s") == Some(host)) {
                edit.append(POSTROUTING, names.jump(*address));
            }
        }
    }

    /// Adds to `edit` the removal of the tags for which `is_garbage` is true, of the rules that
    /// only their addresses need, and of the `untagged` jumps. The addresses of the other tags, and
    /// `kept`, which need not have tags yet, keep their rules. The chain, whose name is `name`, is
    /// removed if no address and no jump remains.
    fn remove(
        &self,
        edit: &mut Edit,
        name: &str,
        is_garbage: impl Fn(&Tag<'_>) -> bool,
        untagged: Untagged<'_>,
        kept: &[Cidr],
    ) {
        let Some(chain) = &self.chain else { return };
        let (garbage, remaining): (Vec<Tag<'_>>, Vec<Tag<'_>>) =
            chain.rules.iter().filter_map(Tag::read).partition(|tag| is_garbage(tag));
        // The source and the network of each address that keeps its rules.
        let of_tags = remaining.iter().map(|tag| (tag.source, tag.network));
        let of_kept = kept.iter().map(|address| (Some(Cidr::host(address.address())), Some(address.network())));
        let (used_sources, used_networks): (Vec<_>, Vec<_>) = of_tags.chain(of_kept).unzip();
        let remaining_sources = self.remove_jumps(edit, &garbage, &used_sources, untagged);
        if used_sources.is_empty() && remaining_sources.is_empty() && !self.has_other_jumps {
            edit.delete_chain(name, chain);
            return;
        }
        // Whether an untagged jump remains.
        let has_untagged = remaining_sources.iter().any(|source| !used_sources.contains(source));
        let is_unneeded = |accept: &Rule| match (cidr(accept, "-s"), cidr(accept, "-d")) {
            // Not a rule of a CNI plugin.
            (None, None) => false,
            // The ACCEPT rule of a network. An untagged jump, which does not name its network, may
            // need any of them.
            (None, network) => {
                let is_of_garbage = garbage.iter().any(|tag| tag.network == network);
                is_of_garbage && !used_networks.contains(&network) && !has_untagged
            }
            // An exclusion.
            (source, _) => garbage.iter().any(|tag| tag.source == source) && !used_sources.contains(&source),
        };
        let accepts = chain.rules.iter().filter(|rule| rule.target() == Some("ACCEPT"));
        for rule in garbage.iter().map(|tag| tag.rule).chain(accepts.filter(|rule| is_unneeded(rule))) {
            edit.delete(name, rule);
        }
    }

    /// Returns the exclusions of the wanted addresses for destinations that are not excluded any
    /// more.
    fn outdated_exclusions(&self, names: &RuleNames, wanted: &Wanted<'_>) -> Vec<&Rule> {
        let sources: Vec<Cidr> = wanted.addresses.iter().map(|address| Cidr::host(address.address())).collect();
        let accepts = names.accepts(wanted);
        let is_outdated = |rule: &&Rule| {
            rule.target() == Some("ACCEPT")
                && cidr(rule, "-s").is_some_and(|source| sources.contains(&source))
                && !accepts.iter().any(|words| rule.matches(words))
        };
        self.in_chain().iter().filter(is_outdated).collect()
    }

    /// Adds to `edit` the removal of the jumps for the sources of the tags `garbage`, of the
    /// untagged jumps that `untagged` selects, and of duplicates. Returns the sources of the
    /// remaining jumps: those in `used_sources`, and those of untagged jumps.
    fn remove_jumps(
        &self,
        edit: &mut Edit,
        garbage: &[Tag<'_>],
        used_sources: &[Option<Cidr>],
        untagged: Untagged<'_>,
    ) -> Vec<Option<Cidr>> {
        let mut remaining_sources = Vec::new();
        for jump in &self.jumps {
            let source = cidr(jump, "-s");
            let is_removed = if used_sources.contains(&source) {
                // An address needs one jump. Two simultaneous ADDs of the Go plugin can both append
                // the same rule.
                remaining_sources.contains(&source)
            } else {
                // For DEL, `garbage` has all tags of the attachment: without one, no rule names the
                // attachment.
                garbage.iter().any(|tag| tag.source == source) || untagged.selects(source, !garbage.is_empty())
            };
            if is_removed {
                edit.delete(POSTROUTING, jump);
            } else {
                remaining_sources.push(source);
            }
        }
        remaining_sources
    }
}

/// Returns the edit after which the attachment has exactly the wanted rules. All wanted addresses
/// are of the family of `nat`.
pub(super) fn ensure(nat: &mut Chains<'_>, wanted: &Wanted<'_>) -> Result<Edit> {
    let (mut edit, names) = (Edit::new(), RuleNames::new(wanted.attachment));
    let rules = ContainerRules::read(nat, &names, IfMissing::TrustIndex)?;
    rules.add_missing(&mut edit, &names, nat.family(), wanted);
    let tags: Vec<Vec<String>> = wanted.addresses.iter().map(|address| names.tag(*address)).collect();
    let is_outdated = |tag: &Tag<'_>| tag.alias == names.alias && !tags.iter().any(|words| tag.rule.matches(words));
    rules.remove(&mut edit, &names.chain, is_outdated, Untagged::Keep, &wanted.addresses);
    for rule in rules.outdated_exclusions(&names, wanted) {
        edit.delete(&names.chain, rule);
    }
    Ok(edit)
}

/// Returns the edit that removes the rules of the selected attachments.
pub(super) fn purge(nat: &mut Chains<'_>, filter: AttachmentFilter<'_>) -> Result<Edit> {
    let (mut edit, is_selected) = (Edit::new(), filter.selector(ALIAS));
    let is_garbage = |tag: &Tag<'_>| is_selected(tag.alias);
    match filter {
        AttachmentFilter::One { attachment, untagged } => {
            let names = RuleNames::new(attachment);
            let rules = ContainerRules::read(nat, &names, IfMissing::ReadAll)?;
            rules.remove(&mut edit, &names.chain, is_garbage, untagged, &[]);
        }
        AttachmentFilter::Garbage { network, valid } => {
            let valid_chains: BTreeSet<String> = valid.iter().map(|(id, _)| chain_name(network, id)).collect();
            for (name, rules) in ContainerRules::read_all(nat, network)? {
                let untagged = if valid_chains.contains(&name) { Untagged::Keep } else { Untagged::All };
                rules.remove(&mut edit, &name, is_garbage, untagged, &[]);
            }
        }
    }
    Ok(edit)
}

/// Returns a sentence for each wanted rule that is missing, and for each exclusion that should not
/// exist; empty if none, `None` if the container has no chain. Accepts rules of any program. All
/// wanted addresses are of the family of `nat`.
pub(super) fn check(nat: &mut Chains<'_>, wanted: &Wanted<'_>) -> Result<Option<Vec<String>>> {
    let names = RuleNames::new(wanted.attachment);
    let rules = ContainerRules::read(nat, &names, IfMissing::ReadAll)?;
    if rules.chain.is_none() {
        return Ok(None);
    }
    let mut differences = Vec::new();
    for rule in rules.outdated_exclusions(&names, wanted) {
        let words = rule.words().join(" ");
        differences.push(format!("iptables chain {} has the rule {words}, which ipMasq does not exclude", names.chain));
    }
    for words in names.accepts(wanted).into_iter().chain([names.masquerade(nat.family())]) {
        if !rules.in_chain().iter().any(|rule| rule.matches(&words)) {
            differences.push(format!("iptables chain {} has no rule {}", names.chain, words.join(" ")));
        }
    }
    let sources: Vec<Cidr> = rules.jumps.iter().filter_map(|jump| cidr(jump, "-s")).collect();
    for address in &wanted.addresses {
        let host = address.address();
        // Older releases of Go wrote the network as the source.
        if !sources.contains(&Cidr::host(host)) && !sources.contains(&address.network()) {
            differences.push(format!("iptables chain {POSTROUTING} has no rule that sends {host} to {}", names.chain));
        }
    }
    Ok(Some(differences))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::iptables::Table;
    use cni::config::ValidAttachments;

    /// Returns the chains with the rules of this many attachments of the network `net`.
    fn attached(count: usize) -> String {
        let mut saved = String::new();
        for i in 0..count {
            let attachment = AttachmentId::new("net", format!("c{i}"), "eth0");
            let (chain, comment) = (chain_name("net", &attachment.container_id), format!("name: \"net\" id: \"c{i}\""));
            let comment = crate::iptables::quote(&comment).unwrap();
            let (source, alias) = (format!("10.1.{}.{}/32", i / 250, i % 250 + 2), attachment.alias());
            saved += &format!(
                ":{chain} - [0:0]\n\
                 -A POSTROUTING -s {source} -m comment --comment {comment} -j {chain}\n\
                 -A {chain} -d 10.1.0.0/16 -m comment --comment {comment} -j ACCEPT\n\
                 -A {chain} -s {source} -d 10.1.0.0/16 -m comment --comment {alias}\n"
            );
        }
        saved
    }

    #[test]
    fn gc_takes_time_in_proportion_to_the_chains() {
        let plan = |count: usize, saved: &str, valid: usize| {
            let attachments: ValidAttachments = (0..valid).map(|i| (format!("c{i}"), "eth0")).collect();
            let mut nat = Chains::of_text(Table::Nat, Family::V4, saved);
            let filter = AttachmentFilter::Garbage { network: "net", valid: &attachments };
            assert_eq!(purge(&mut nat, filter).unwrap().deleted_chains.len(), count - valid);
        };
        let (few, many) = (attached(200), attached(800));
        cni_testkit::assert_cost_below(8, || plan(200, &few, 0), || plan(800, &many, 0));
        cni_testkit::assert_cost_below(8, || plan(200, &few, 200), || plan(800, &many, 800));
    }

    #[test]
    fn names_and_comments_are_gos() {
        // Computed with `sha512sum`.
        assert_eq!(chain_name("mynet", "ctr1"), "CNI-5145007e2a8415ce07579739");
        assert_eq!(comment(&AttachmentId::new("mynet", "ctr1", "eth0")), r#"name: "mynet" id: "ctr1""#);
        assert_eq!(comment(&AttachmentId::new("n".repeat(200), "c".repeat(200), "eth0")).len(), COMMENT_MAX);
        assert!(is_chain_name("CNI-5145007e2a8415ce07579739"));
        for other in ["CNI-DN-45007e2a8415ce0757973", "CNI-HOSTPORT-MASQ", "CNI-", "CNI-5145007e2a8415ce0757973"] {
            assert!(!is_chain_name(other), "{other}");
        }
    }

    #[test]
    fn multicast_is_what_go_leaves_alone() {
        assert_eq!(multicast(Family::V4), ("224.0.0.0".parse().unwrap(), 4));
        assert_eq!(multicast(Family::V6), ("ff00::".parse().unwrap(), 8));
    }
}
