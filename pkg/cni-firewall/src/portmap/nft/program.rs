//! Conditions that only `nft` itself understands: sets, connection states, whatever its language
//! has.
//!
//! The rules of such a family are added by `nft -f -`, which costs a process, behind what the
//! attachment has; the transaction after it removes that. `nft` writes no tags, so rules without
//! effect beside them say, by their handles, whose they are, and by a hash of the text whether an
//! ADD would write the same again: then it does not. Between the two the rules look like Go's.

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

const LIMIT: Duration = Duration::from_secs(20);

/// The program, in PATH or the system's folders.
pub(super) fn find() -> Option<PathBuf> {
    program::find(&program::folders(std::env::var_os("PATH")), "nft")
}

/// The text of a family's mappings.
pub(super) fn text(family: Family, conditions: &[String], claims: &[ClaimedPort], comment: &str) -> String {
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

/// The mappings of one family, which the program writes.
pub(super) struct Written {
    pub(super) family: Family,
    claims: Vec<ClaimedPort>,
    text: String,
    token: String,
    program: PathBuf,
    /// The rules it has added; `None` if an earlier ADD had the same text and its rules are all
    /// there.
    fresh: Option<Vec<u64>>,
}

impl Written {
    /// Returns the rules of all families whose conditions are not compiled here.
    pub(super) fn all(wanted: &Forwarding) -> Result<Vec<Written>, Refusal> {
        let mut all = Vec::new();
        for (container, claims) in wanted.families() {
            let family = Family::of(container.address());
            let conditions = wanted.conditions(family);
            let Err(unknown) = conditions::compile(conditions, family) else { continue };
            let token = unknown.token;
            let Some(program) = find() else {
                let why = "it is beyond what this plugin compiles itself, and there is no program nft on this host";
                return Err(Refusal::Condition { token, why: why.to_owned() });
            };
            let text = text(family, conditions, &claims, &Identity::new(&wanted.attachment).comment);
            all.push(Written { family, claims, text, token, program, fresh: Some(Vec::new()) });
        }
        Ok(all)
    }

    /// Whether the program has added this rule just now: the attachment did not have it before.
    pub(super) fn has_added(&self, listed: &Listed) -> bool {
        self.fresh.as_ref().is_some_and(|fresh| fresh.contains(&listed.handle))
    }

    /// Whether an earlier ADD's rules stay, so that nothing is replaced.
    pub(super) fn is_in_place(&self) -> bool {
        self.fresh.is_none()
    }

    /// The rules that say whose the new ones are.
    pub(super) fn signs(&self, identity: &Identity) -> Vec<Rule> {
        self.fresh.as_deref().map(|fresh| identity.sign_others(fresh, &self.text)).unwrap_or_default()
    }

    fn run(&self, machine: &dyn Machine) -> Result<(), Refusal> {
        let refused = |why: String| Refusal::Condition { token: self.token.clone(), why };
        let child = Child {
            program: self.program.clone(),
            args: vec!["-f".into(), "-".into()],
            env: None,
            stdin: self.text.as_bytes(),
            timeout: LIMIT,
            on_sigterm: OnSigterm::Kill,
        };
        let program = self.program.display();
        let output = machine.run(&child).map_err(|error| refused(format!("{program}: {error}")))?;
        if output.status == Exit::Status(0) {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        Err(refused(format!("{program} -f -: {}: {}", output.status, said.lines().next().unwrap_or_default())))
    }
}

impl NftPortMap {
    /// Has the program add what it has to; what the attachment has stays beside it. On failure
    /// nothing is added.
    pub(super) fn write(
        &mut self,
        machine: &dyn Machine,
        wanted: &Forwarding,
        all: &mut [Written],
    ) -> Result<(), Refusal> {
        let identity = Identity::new(&wanted.attachment);
        let done = all.iter_mut().try_for_each(|written| self.write_one(machine, &identity, written));
        if done.is_err() {
            self.discard(all)?;
        }
        done
    }

    fn write_one(&mut self, machine: &dyn Machine, identity: &Identity, written: &mut Written) -> Result<(), Refusal> {
        let table = shape::table(written.family);
        let before = self.nft.rules_commented(table, HOSTPORTS, &identity.comment)?;
        if identity.has_signed(&before, &written.text) {
            written.fresh = None;
            return Ok(());
        }
        written.run(machine)?;
        let leads_here = |rule: &Rule| {
            let leads_to = shape::container(rule);
            leads_to.is_none_or(|address| written.claims.iter().any(|claim| claim.container.ip() == address))
        };
        let is_new = |listed: &&Listed| {
            !before.iter().any(|old| old.handle == listed.handle)
                && identity.owner(&listed.rule) == identity::Ownership::Container
                && leads_here(&listed.rule)
        };
        let after = self.nft.rules_commented(table, HOSTPORTS, &identity.comment)?;
        written.fresh = Some(after.iter().filter(is_new).map(|listed| listed.handle).collect());
        Ok(())
    }

    /// Takes back what the program has added.
    pub(super) fn discard(&mut self, all: &[Written]) -> Result<()> {
        for written in all {
            for handle in written.fresh.iter().flatten() {
                let mut batch = Batch::new();
                batch.delete_rule(shape::table(written.family), HOSTPORTS, *handle);
                match self.nft.commit(batch) {
                    Err(error) if error.is_not_found() => {}
                    done => done?,
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
