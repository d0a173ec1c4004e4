//! Fills a node: attaches containers with host ports, by the plugins that are compared.

use serde_json::json;

use crate::call::Cost;
use crate::cases::{Before, Case, FULL, Folders, Plugins, Side, ipam, portmap, set_backend, set_network};
use crate::chain::{Attachment, Chain};
use crate::error::Result;
use crate::world;

/// The host port of the first mapping of the first container. The others follow it.
const FIRST_PORT: usize = 20_000;

/// The containers on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FullNode {
    /// Whether the compared plugins attach the containers. Otherwise the plugins of the measured
    /// side do, with its backend.
    pub(crate) by_theirs: bool,
    /// The number of containers.
    pub(crate) containers: usize,
    /// The number of host ports of each container.
    pub(crate) ports: usize,
}

impl FullNode {
    /// Returns a case that measures `plugins` on this node.
    pub(crate) fn case(self, name: String, plugins: Plugins, sides: &[Side]) -> Case {
        Case { before: Before::Attached(self), ..Case::new(FULL, name, plugins, sides) }
    }

    /// Attaches the containers, on the current node, to a network of their own with ipMasq.
    pub(crate) fn attach(self, folders: &Folders, measured: Side) -> Result<()> {
        let side = if self.by_theirs { Side::Theirs } else { measured };
        let mut addresses = ipam(&world::create_folder()?);
        addresses["ranges"] = json!([[{"subnet": "10.2.0.0/16"}]]);
        let mut bridge =
            json!({"type": "bridge", "bridge": "full0", "isGateway": true, "ipMasq": true, "ipam": addresses});
        let mut firewall = json!({"type": "firewall"});
        set_backend(&mut bridge, "ipMasqBackend", side);
        set_backend(&mut firewall, "backend", side);
        for number in 0..self.containers {
            let portmap = portmap(side, FIRST_PORT + number * self.ports, self.ports);
            let mut plugins = vec![bridge.clone(), portmap, firewall.clone()];
            set_network(&mut plugins, "fullnet");
            let chain = Chain { dir: folders.of(side).to_owned(), plugins };
            // The number of the attachment would change the host ports.
            let attachment =
                Attachment { container: format!("full-{number}"), netns: world::create_container()?, number: 0 };
            chain.run("ADD", &attachment, None, |call| call.run(&mut Cost::default()))?;
        }
        Ok(())
    }
}
