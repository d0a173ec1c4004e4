//! list: lists each network's ranges and how full they are. Takes no lock and opens no reservation,
//! so it is fast on a busy node.

use cni::Error;
use cni_ipam::store::Usage;
use serde_json::{Value, json};

use crate::call::{ColorMode, Streams};
use crate::node::ipam::{IpamContext, NEARLY_FULL_PERCENT, NetworkPool, used_percent};
use crate::report::{Colour, Row, table, write_report};

/// How full the ranges of one network are.
struct NetworkUsage {
    pool: NetworkPool,
    /// The folder of the network's reservations.
    folder: String,
    /// The number of reservations in the folder.
    reservation_count: usize,
    /// The usage of each range set; empty if the ranges are not known.
    sets: Vec<Usage>,
}

impl IpamContext<'_, '_> {
    /// Prints a line for each range set.
    ///
    /// # Errors
    /// Code 5 if a folder cannot be read.
    pub(super) fn list(&self, streams: &mut Streams<'_>) -> Result<(), Error> {
        let mut networks = Vec::new();
        for pool in self.list_pools()? {
            let store = pool.store(&self.notes);
            let sets = match &pool.ranges {
                Ok(ranges) => store.usage(ranges)?,
                Err(_) => Vec::new(),
            };
            let folder = pool.folder().display().to_string();
            networks.push(NetworkUsage { folder, reservation_count: store.count()?, sets, pool });
        }
        let json = || json!({"networks": networks.iter().map(as_json).collect::<Vec<Value>>()});
        write_report(streams, self.shared.format(), json, |style| as_text(&networks, style))
    }
}

impl NetworkUsage {
    /// Returns the number of reservations outside of all ranges, or `None` if the ranges are not
    /// known.
    fn count_outside(&self) -> Option<u128> {
        if self.sets.is_empty() {
            return None;
        }
        let inside: u128 = self.sets.iter().map(|set| set.used).sum();
        Some((self.reservation_count as u128).saturating_sub(inside))
    }
}

/// Returns the table and the notes below it. Nearly full range sets are coloured.
fn as_text(networks: &[NetworkUsage], style: ColorMode) -> String {
    if networks.is_empty() {
        return "No network has reservations or uses host-local.\n".to_owned();
    }
    let mut rows: Vec<Row> = Vec::new();
    let mut notes = String::new();
    for usage in networks {
        let NetworkUsage { pool: NetworkPool { network, ranges, .. }, folder, reservation_count, sets } = usage;
        if let Err(why) = ranges {
            notes += &format!("{network}: {why}\n");
        }
        if sets.is_empty() {
            let count = reservation_count.to_string();
            rows.push(([network, "?", &count, "?", "?", folder].map(str::to_owned).to_vec(), None));
        }
        for set in sets {
            let percent = used_percent(set);
            let (used, total) = (set.used.to_string(), set.total.to_string());
            let cells = vec![network.clone(), set.set.clone(), used, total, format!("{percent}%"), folder.clone()];
            rows.push((cells, (percent >= NEARLY_FULL_PERCENT).then_some(Colour::Yellow)));
        }
        if let Some(outside) = usage.count_outside().filter(|outside| *outside > 0) {
            notes += &format!("{network}: {outside} reserved addresses are outside of the configured ranges\n");
        }
    }
    table(&["NETWORK", "RANGES", "USED", "TOTAL", "FULL", "FOLDER"], rows, style) + &notes
}

/// Returns the usage of a network for `--json`.
fn as_json(usage: &NetworkUsage) -> Value {
    let set_json = |set: &Usage| json!({"ranges": set.set, "used": set.used, "total": set.total});
    json!({
        "network": usage.pool.network,
        "folder": usage.folder,
        "configured": usage.pool.is_configured,
        "rangesUnknown": usage.pool.ranges.as_ref().err(),
        "ranges": usage.sets.iter().map(set_json).collect::<Vec<_>>(),
        "reservations": usage.reservation_count,
        "outsideOfRanges": usage.count_outside(),
    })
}
