//! Conditions that only `nft` itself understands: sets, connection states, whatever its language has.
//!
//! The rules of such a family are written by `nft -f -`, which costs a process. `nft` writes no tags, so a rule without
//! effect beside them says, by their handles, whose they are. Between the two the rules look like Go's.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use cni::machine::{Child, Exit, Machine, OnSigterm};

use super::shape::{self, HOSTPORTS};
use super::{Identity, NftPortMap, Refusal};
use crate::error::Result;
use crate::firewall::nft::Batch;
use crate::firewall::portmap::{Claim, identity};
use crate::route::Family;

const LIMIT: Duration = Duration::from_secs(20);

/// The program, in PATH or the system's folders.
pub(super) fn find() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).filter(|folder| folder.is_absolute());
    let system = ["/usr/sbin", "/sbin", "/usr/local/sbin", "/usr/bin", "/bin"].map(PathBuf::from);
    folders.chain(system).map(|folder| folder.join("nft")).find(|program| program.is_file())
}

/// The text of a family's mappings.
pub(super) fn text(family: Family, conditions: &[String], claims: &[Claim], comment: &str) -> String {
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

impl NftPortMap {
    /// Adds the mappings of one family by the program, and signs them.
    pub(super) fn run(
        &mut self,
        machine: &dyn Machine,
        program: &std::path::Path,
        identity: &Identity,
        family: Family,
        (conditions, token): (&[String], &str),
        claims: &[Claim],
    ) -> Result<(), Refusal> {
        let refused = |why: String| Refusal::Condition { token: token.to_owned(), why };
        let text = text(family, conditions, claims, &identity.comment);
        let child = Child {
            program: program.to_owned(),
            args: vec!["-f".into(), "-".into()],
            env: None,
            stdin: text.as_bytes(),
            timeout: LIMIT,
            on_sigterm: OnSigterm::Kill,
        };
        let output = machine.run(&child).map_err(|error| refused(format!("{}: {error}", program.display())))?;
        if output.status != Exit::Status(0) {
            let said = String::from_utf8_lossy(&output.stderr);
            let said = said.lines().next().unwrap_or_default();
            return Err(refused(format!("{} -f -: {}: {said}", program.display(), output.status)));
        }
        let addresses: Vec<IpAddr> = claims.iter().map(|claim| claim.container.ip()).collect();
        Ok(self.sign(identity, family, &addresses)?)
    }

    fn sign(&mut self, identity: &Identity, family: Family, addresses: &[IpAddr]) -> Result<()> {
        let table = shape::table(family);
        let rules = self.nft.rules(table, HOSTPORTS)?;
        let own = identity.own(&rules, addresses, shape::container);
        let unsigned = own.iter().filter(|listed| identity.owner(&listed.rule) == identity::Owner::Container);
        let handles: Vec<u64> = unsigned.map(|listed| listed.handle).collect();
        let mut batch = Batch::new();
        batch.append_rule(table, HOSTPORTS, &identity.sign_others(&handles));
        self.nft.commit(batch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::firewall::portmap::Protocol;

    #[test]
    fn the_text_is_a_rule_for_each_mapping() {
        let claim = Claim {
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
