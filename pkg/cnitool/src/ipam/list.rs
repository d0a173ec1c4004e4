//! list: lists each network's ranges and how full they are. Takes no lock and opens no reservation,
//! so it is fast on a busy node.

use cni::Error;
use serde_json::{Value, json};

use super::IpamContext;
use crate::Streams;
use crate::report::{Colour, Format, paint, table, write, write_json};

impl IpamContext<'_, '_> {
    /// Prints a line for each range set.
    ///
    /// # Errors
    /// A folder cannot be read.
    pub(super) fn list(&self, streams: &mut Streams<'_>) -> Result<(), Error> {
        let header = ["NETWORK", "RANGES", "USED", "TOTAL", "FULL", "FOLDER"];
        let mut rows: Vec<Vec<String>> = vec![header.map(str::to_owned).to_vec()];
        let mut networks = Vec::new();
        let (mut notes, mut full) = (Vec::new(), Vec::new());
        for addresses in self.all()? {
            let store = self.store(&addresses);
            let folder = store.path().display().to_string();
            let count = store.count()?;
            let usage = match &addresses.ranges {
                Ok(ranges) => store.usage(ranges)?,
                Err(why) => {
                    notes.push(format!("{}: {why}", addresses.network));
                    Vec::new()
                }
            };
            let unknown = "?".to_owned();
            if usage.is_empty() {
                rows.push(vec![
                    addresses.network.clone(),
                    unknown.clone(),
                    count.to_string(),
                    unknown.clone(),
                    unknown,
                    folder.clone(),
                ]);
            }
            for set in &usage {
                let percent = (set.used.saturating_mul(100)).checked_div(set.total).unwrap_or(100);
                if percent >= 90 {
                    full.push(rows.len());
                }
                let cells = [set.used.to_string(), set.total.to_string(), format!("{percent}%"), folder.clone()];
                rows.push([addresses.network.clone(), set.set.clone()].into_iter().chain(cells).collect());
            }
            let inside: u128 = usage.iter().map(|set| set.used).sum();
            let outside = (count as u128).saturating_sub(inside);
            if !usage.is_empty() && outside > 0 {
                notes.push(format!(
                    "{}: {outside} reserved addresses are outside of the configured ranges",
                    addresses.network
                ));
            }
            let sets = usage.iter().map(|set| json!({"ranges": set.set, "used": set.used, "total": set.total}));
            networks.push(json!({
                "network": addresses.network,
                "folder": folder,
                "configured": addresses.configured,
                "rangesUnknown": addresses.ranges.as_ref().err(),
                "ranges": sets.collect::<Vec<_>>(),
                "reservations": count,
                "outsideOfRanges": if usage.is_empty() { Value::Null } else { json!(outside) },
            }));
        }
        match self.shared.format() {
            Format::Json => write_json(streams, &json!({"networks": networks})),
            Format::Text if rows.len() == 1 => write(streams, "No network has reservations or uses host-local.\n"),
            Format::Text => {
                let mut lines = table(&rows);
                for row in full {
                    lines[row] = paint(streams.stdout_style, Colour::Yellow, &lines[row]);
                }
                let notes: String = notes.iter().map(|note| format!("{note}\n")).collect();
                write(streams, &format!("{}\n{notes}", lines.join("\n")))
            }
        }
    }
}
