//! Adds a default route behind the existing ones, which keep the traffic.

use super::{Family, Route, SavedRoute};
use crate::error::Result;
use crate::netlink::Netlink;

/// How many metrics are tried, because another process may add a default route at the same time.
const ATTEMPTS: usize = 16;

impl Netlink {
    /// Adds the default route over `paths` behind the default routes of its family that are in its
    /// table, of any type: its metric is that of the last one plus one. Returns the metric, or
    /// `None` if no metric is left or `paths` is empty. For `paths`, see
    /// [`add_multipath_route`](Netlink::add_multipath_route).
    pub fn add_default_route_behind(&self, paths: &[Route]) -> Result<Option<u32>> {
        let Some(first) = paths.first() else { return Ok(None) };
        let existing = self.save_routes(Family::of(first.dst.address()))?;
        let in_table = existing.iter().filter(|route| route.is_default() && route.table_id() == first.table_id());
        let last = in_table.map(SavedRoute::metric).max().unwrap_or(first.metric());
        for metric in (last..u32::MAX).skip(1).take(ATTEMPTS) {
            let behind: Vec<Route> = paths.iter().map(|path| Route { priority: Some(metric), ..*path }).collect();
            match self.add_multipath_route(&behind) {
                Err(error) if error.is_exists() => {}
                added => return added.map(|()| Some(metric)),
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{in_new_netns, output};

    /// Returns the default routes of one family as `ip route` shows them.
    fn defaults(family: &str) -> Vec<String> {
        let shown = output(&format!("ip {family} route show default"));
        shown.lines().map(|line| line.replace(" linkdown", "").replace(" pref medium", "").trim().to_owned()).collect()
    }

    #[test]
    fn a_default_route_is_added_behind_the_last_one() {
        in_new_netns(|| {
            for line in [
                "ip link add n0 type veth peer name n1",
                "ip link set n0 up",
                "ip link set n1 up",
                "ip address add 10.1.0.2/24 dev n0",
                "ip address add fd01::2/64 dev n0 nodad",
                "ip address add 10.2.0.2/24 dev n1",
                "ip address add fd02::2/64 dev n1 nodad",
                "ip route add default via 10.1.0.1",
                "ip route add blackhole default metric 7",
                "ip route add default via 10.1.0.1 metric 90 table 100",
                "ip -6 route add default via fd01::1",
            ] {
                output(line);
            }
            let netlink = Netlink::open().unwrap();
            let index = netlink.link("n1").unwrap().index;
            let v4 = Route::new("0.0.0.0/0".parse().unwrap(), Some("10.2.0.1".parse().unwrap()), index);
            let v6 = Route::new("::/0".parse().unwrap(), Some("fd02::1".parse().unwrap()), index);
            assert_eq!(netlink.add_default_route_behind(&[v4]).unwrap(), Some(8));
            assert_eq!(netlink.add_default_route_behind(&[v6]).unwrap(), Some(1025));
            let in_table = Route { table: Some(100), ..v4 };
            assert_eq!(netlink.add_default_route_behind(&[in_table]).unwrap(), Some(91));
            let several = [v6, Route { gw: Some("fd02::9".parse().unwrap()), ..v6 }];
            assert_eq!(netlink.add_default_route_behind(&several).unwrap(), Some(1026));
            assert_eq!(
                defaults("-4"),
                ["default via 10.1.0.1 dev n0", "blackhole default metric 7", "default via 10.2.0.1 dev n1 metric 8"]
            );
            let shown = defaults("-6");
            assert_eq!(
                shown[..2],
                ["default via fd01::1 dev n0 metric 1024", "default via fd02::1 dev n1 metric 1025"],
                "{shown:?}"
            );
            // No metric is left behind the last one.
            output(&format!("ip route add default via 10.1.0.1 metric {}", u32::MAX));
            assert_eq!(netlink.add_default_route_behind(&[v4]).unwrap(), None);
            assert_eq!(netlink.add_default_route_behind(&[]).unwrap(), None);
        });
    }
}
