//! Writes mappings with the program `nft`, in each family whose conditions [`conditions`] does not
//! compile: sets, connection states, and the rest of nft's language.
//!
//! `nft -f -` adds the new rules after the old ones of the attachment; a transaction then removes
//! the old ones. `nft` cannot write tags, so until that transaction the new rules look like Go's.
//! The transaction adds *ownership rules*, which have no effect: their tags have the handles of
//! the new rules and a hash of the text that `nft` got. By this hash, the next ADD recognizes that
//! the rules it would write are in place.

use std::path::PathBuf;
use std::time::Duration;

use cni::machine::{Child, Exit, Machine, OnSigterm};

use super::shape::{self, HOSTPORTS};
use super::{Forwarding, Identity, NftPortMap, Refusal, conditions};
use crate::nft::{Batch, Listed, Rule};
use crate::portmap::{ClaimedPort, identity};
use cni_linux::error::Result;
use cni_linux::program;
use cni_linux::route::Family;

/// How long the program may run.
const LIMIT: Duration = Duration::from_secs(20);

/// Returns the path of the program, in PATH or the system's folders; `None` if it is not installed.
fn find_nft() -> Option<PathBuf> {
    program::find(&program::folders(std::env::var_os("PATH")), "nft")
}

/// Returns the text from which `nft` adds the mappings of one family, a line for each: `add rule ip
/// cni_hostport hostports CONDITIONS tcp dport 8080 dnat to 10.0.0.2:80 comment "ID"`.
fn text(family: Family, conditions: &[String], claims: &[ClaimedPort], comment: &str) -> String {
    let (table, ip) = (shape::table(family), if family == Family::V4 { "ip" } else { "ip6" });
    let mut text = String::new();
    for claim in claims {
        let host_ip = claim.host_ip.map(|host_ip| format!("{ip} daddr {host_ip} ")).unwrap_or_default();
        text.push_str(&format!(
            "add rule {table} {HOSTPORTS} {} {host_ip}{} dport {} dnat to {} comment \"{comment}\"\n",
            conditions.join(" "),
            claim.protocol,
            claim.host_port,
            claim.container,
        ));
    }
    text
}

/// The mappings of one family that the program writes.
pub(super) struct ProgramMappings {
    pub(super) family: Family,
    claims: Vec<ClaimedPort>,
    /// The input of the program.
    text: String,
    /// The first token that [`conditions`] does not compile, for errors.
    token: String,
    program: PathBuf,
    /// Whether the program need not run, because an earlier ADD had the same text and all its rules
    /// exist.
    pub(super) is_in_place: bool,
    /// The handles of the rules that the program has added during this ADD.
    added_handles: Vec<u64>,
}

impl ProgramMappings {
    /// Returns the mappings that only the program can write: those of each family whose conditions
    /// [`conditions`] does not compile. Usually empty. Fails if there are some and `nft` is not
    /// installed.
    pub(super) fn uncompiled(wanted: &Forwarding) -> Result<Vec<ProgramMappings>, Refusal> {
        let mut uncompiled = Vec::new();
        for (container, claims) in wanted.families() {
            let family = Family::of(container.address());
            let conditions = wanted.conditions(family);
            let Err(unknown) = conditions::compile(conditions, family) else { continue };
            let token = unknown.token;
            let Some(program) = find_nft() else {
                let why = "portmap itself compiles only a part of nft's language, and the program nft, which knows all \
                           of it, is not installed";
                return Err(Refusal::Condition { token, why: why.to_owned() });
            };
            let text = text(family, conditions, &claims, &Identity::new(&wanted.attachment).comment);
            uncompiled.push(ProgramMappings {
                family,
                claims,
                text,
                token,
                program,
                is_in_place: false,
                added_handles: Vec::new(),
            });
        }
        Ok(uncompiled)
    }

    /// Whether the program has added this rule during this ADD.
    pub(super) fn has_added(&self, listed: &Listed) -> bool {
        self.added_handles.contains(&listed.handle)
    }

    /// Returns the ownership rules for the added rules; none if no rule was added.
    pub(super) fn ownership_rules(&self, identity: &Identity) -> Vec<Rule> {
        identity.ownership_rules(&self.added_handles, &self.text)
    }

    /// Runs `nft` with the text. If `nft` refuses the text, the error has the first line of its
    /// stderr.
    fn run(&self, machine: &dyn Machine) -> Result<(), Refusal> {
        let refusal = |why: String| Refusal::Condition { token: self.token.clone(), why };
        let child = Child {
            program: self.program.clone(),
            args: vec!["-f".into(), "-".into()],
            env: None,
            stdin: self.text.as_bytes(),
            timeout: LIMIT,
            on_sigterm: OnSigterm::Kill,
        };
        let program = self.program.display();
        let output = machine.run(&child).map_err(|error| refusal(format!("{program}: {error}")))?;
        if output.status == Exit::Status(0) {
            return Ok(());
        }
        let stderr = String::from_utf8_lossy(&output.stderr);
        let first_line = stderr.lines().next().unwrap_or_default();
        Err(refusal(format!("{program} -f -: {}: {first_line}", output.status)))
    }
}

impl NftPortMap {
    /// Runs the program for each family in `program_mappings`. The attachment's old rules stay. On
    /// failure, the added rules are deleted again, except those of a run after which the rules
    /// could not be read.
    pub(super) fn add_by_program(
        &mut self,
        machine: &dyn Machine,
        wanted: &Forwarding,
        program_mappings: &mut [ProgramMappings],
    ) -> Result<(), Refusal> {
        let identity = Identity::new(&wanted.attachment);
        let result = program_mappings.iter_mut().try_for_each(|mappings| self.add_family(machine, &identity, mappings));
        if result.is_err() {
            self.delete_added(program_mappings)?;
        }
        result
    }

    /// Runs the program for one family, unless its rules are in place already, and records the
    /// handles of the added rules: those of this container that exist only after the run.
    fn add_family(
        &mut self,
        machine: &dyn Machine,
        identity: &Identity,
        mappings: &mut ProgramMappings,
    ) -> Result<(), Refusal> {
        let table = shape::table(mappings.family);
        let old_rules = self.nft.rules_commented(table, HOSTPORTS, &identity.comment)?;
        if identity.has_rules_of_text(&old_rules, &mappings.text) {
            mappings.is_in_place = true;
            return Ok(());
        }
        mappings.run(machine)?;
        for listed in self.nft.rules_commented(table, HOSTPORTS, &identity.comment)? {
            let is_new = !old_rules.iter().any(|old| old.handle == listed.handle);
            let is_untagged = identity.ownership_of(&listed.rule) == identity::Ownership::Container;
            // Another attachment of the container may have added rules meanwhile, to its own
            // address.
            let leads_here = match shape::container(&listed.rule) {
                Some(address) => mappings.claims.iter().any(|claim| claim.container.ip() == address),
                // Taken for a rule of this ADD, so that it is deleted if the ADD fails.
                None => true,
            };
            if is_new && is_untagged && leads_here {
                mappings.added_handles.push(listed.handle);
            }
        }
        Ok(())
    }

    /// Deletes the rules that the program has added. A rule that no longer exists is not an error.
    pub(super) fn delete_added(&mut self, program_mappings: &[ProgramMappings]) -> Result<()> {
        for mappings in program_mappings {
            for handle in &mappings.added_handles {
                let mut batch = Batch::new();
                batch.delete_rule(shape::table(mappings.family), HOSTPORTS, *handle);
                match self.nft.commit(batch) {
                    Err(error) if error.is_not_found() => {}
                    result => result?,
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::portmap::Protocol;

    #[test]
    fn the_text_is_a_rule_for_each_mapping() {
        let claim = ClaimedPort {
            protocol: Protocol::Udp,
            host_ip: "fd00::1".parse().ok(),
            host_port: 53,
            container: "[fd00::2]:5353".parse().unwrap(),
        };
        let conditions = ["ct".to_owned(), "state new".to_owned()];
        assert_eq!(
            text(Family::V6, &conditions, &[claim], "c1"),
            "add rule ip6 cni_hostport hostports ct state new ip6 daddr fd00::1 udp dport 53 dnat to [fd00::2]:5353 \
             comment \"c1\"\n"
        );
    }
}
