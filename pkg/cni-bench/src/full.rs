//! Fills a node: attaches containers with host ports, by the plugins that are compared.

use serde_json::json;

use crate::cases::{Before, Case, FULL, Folders, Plugins, Side, ipam, set_backend};
use crate::chain::{Attachment, Chain};
use crate::error::Result;
use crate::world::World;

/// The host port of the first mapping of the first container. The others follow it.
const FIRST_PORT: usize = 20_000;

/// The containers on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FullNode {
    pub(crate) made_by: Maker,
    /// The number of containers.
    pub(crate) containers: usize,
    /// The number of host ports of each container.
    pub(crate) ports: usize,
}

/// Which plugins attach the containers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Maker {
    /// The plugins of the measured side, with its backend.
    Same,
    /// The compared plugins.
    Theirs,
}

impl FullNode {
    /// Returns a case that measures `plugins` on this node.
    pub(crate) fn case(self, name: String, plugins: Plugins, sides: &[Side]) -> Case {
        Case { before: Before::Attached(self), ..Case::new(FULL, name, plugins, sides) }
    }

    /// Attaches the containers, on the current node, to a network of their own with ipMasq.
    pub(crate) fn attach(self, world: &World, folders: &Folders, measured: Side) -> Result<()> {
        let side = match self.made_by {
            Maker::Same => measured,
            Maker::Theirs => Side::Theirs,
        };
        let dir = if side == Side::Theirs { folders.theirs.clone() } else { folders.ours.clone() };
        let mut addresses = ipam(&world.create_folder()?);
        addresses["ranges"] = json!([[{"subnet": "10.2.0.0/16"}]]);
        for number in 0..self.containers {
            let mut mappings = Vec::new();
            for index in 0..self.ports {
                let host_port = FIRST_PORT + number * self.ports + index;
                mappings.push(json!({"hostPort": host_port, "containerPort": 80 + index, "protocol": "tcp"}));
            }
            let mut bridge =
                json!({"type": "bridge", "bridge": "full0", "isGateway": true, "ipMasq": true, "ipam": addresses});
            let mut portmap = json!({"type": "portmap", "runtimeConfig": {"portMappings": mappings}});
            let mut firewall = json!({"type": "firewall"});
            set_backend(&mut bridge, "ipMasqBackend", side);
            set_backend(&mut portmap, "backend", side);
            set_backend(&mut firewall, "backend", side);
            let mut plugins = vec![bridge, portmap, firewall];
            for conf in &mut plugins {
                conf["cniVersion"] = "1.0.0".into();
                conf["name"] = "fullnet".into();
            }
            let chain = Chain { dir: dir.clone(), plugins };
            // The number of the attachment would change the host ports.
            let attachment =
                Attachment { container: format!("full-{number}"), netns: world.create_container()?, number: 0 };
            chain.run("ADD", &attachment, None, |call| Ok(call.run(world.scratch())?.0))?;
        }
        Ok(())
    }
}
