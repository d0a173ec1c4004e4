//! list: lists each network's ranges and how full they are. Takes no lock and opens no reservation,
//! so it is fast on a busy node.

use cni::Error;
use cni_ipam::store::Usage;
use serde_json::{Value, json};

use crate::call::Streams;
use crate::node::ipam::{IpamContext, NEARLY_FULL_PERCENT, used_percent};
use crate::report::{Colour, Report};

impl IpamContext<'_> {
    /// Prints a line for each range set, and for the reservations of each network that are in none.
    ///
    /// # Errors
    /// Code 5 if a folder cannot be read.
    pub(super) fn list(&self, streams: &mut Streams<'_>) -> Result<(), Error> {
        let mut rows: Vec<Value> = Vec::new();
        for pool in self.list_pools()? {
            let (network, folder) = (&pool.network, pool.folder().display().to_string());
            let mut outside = pool.store(&self.context.notes).count()? as u128;
            let mut add = |range: Option<&str>,
                           used: u128,
                           total: Option<u128>,
                           percent: Option<u128>,
                           note: Option<&str>| {
                // JSON's numbers are not exact beyond 64 bits.
                let [used, total, percent] =
                    [Some(used), total, percent].map(|n| n.map(|n| u64::try_from(n).unwrap_or(u64::MAX)));
                rows.push(json!({"network": network, "range": range, "used": used, "total": total, "percent": percent, "folder": folder, "note": note}));
            };
            for usage in &pool.usage(&self.context.notes)? {
                let Usage { set, used, total, .. } = usage;
                outside = outside.saturating_sub(*used);
                add(Some(set), *used, Some(*total), Some(used_percent(usage)), None);
            }
            match &pool.ranges {
                Err(why) => add(None, outside, None, None, Some(why)),
                Ok(_) if outside > 0 => add(None, outside, None, None, Some("outside of the configured ranges")),
                Ok(_) => {}
            }
        }
        let is_nearly_full =
            |row: &Value| u128::from(row["percent"].as_u64().unwrap_or_default()) >= NEARLY_FULL_PERCENT;
        let mut report = Report::new(streams);
        let columns = ["network", "range", "used", "total", "percent", "folder", "note"];
        let colour = |row: &Value| is_nearly_full(row).then_some(Colour::Yellow);
        report.table("ranges", &columns, rows, colour, "No network has reservations or uses host-local.");
        report.write(streams, self.context.format())
    }
}
