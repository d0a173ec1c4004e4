//! Writes mappings with the program `nft`, in each family whose conditions [`conditions`] does not
//! compile: sets, connection states, and the rest of nft's language.
//!
//! `nft` cannot write tags, so these rules look like Go's: see module `identity`.
//! The program runs after the transaction that has written everything else. If another ADD maps the
//! same port in between, both succeed.

use std::path::PathBuf;
use std::time::Duration;

use cni::machine::{Child, Exit, Machine, OnSigterm};

use super::shape::{self, HOSTPORTS};
use super::{Identity, Refusal, conditions};
use crate::portmap::{ClaimedPort, Forwarding};
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
    /// The input of the program.
    text: String,
    /// The first token that [`conditions`] does not compile, for errors.
    token: String,
    program: PathBuf,
}

impl ProgramMappings {
    /// Returns the mappings that only the program can write: those of each family whose conditions
    /// [`conditions`] does not compile. Usually empty. Fails if there are some and `nft` is not
    /// installed.
    pub(super) fn uncompiled(wanted: &Forwarding) -> Result<Vec<ProgramMappings>, Refusal> {
        let mut uncompiled = Vec::new();
        for request in wanted.families() {
            let (family, conditions) = (request.family, request.conditions());
            let Err(unknown) = conditions::compile(conditions, family) else { continue };
            let token = unknown.token;
            let Some(program) = find_nft() else {
                let why = "portmap itself compiles only a part of nft's language, and the program nft, which knows all \
                           of it, is not installed";
                return Err(Refusal::Condition { token, why: why.to_owned() });
            };
            let text = text(family, conditions, &request.claims, &Identity::new(&wanted.attachment).comment);
            uncompiled.push(ProgramMappings { text, token, program });
        }
        Ok(uncompiled)
    }

    /// Runs `nft` with the text. If `nft` refuses the text, the error has the first line of its
    /// stderr.
    pub(super) fn run(&self, machine: &dyn Machine) -> Result<(), Refusal> {
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
