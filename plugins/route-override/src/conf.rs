//! Reads and checks the configuration of the plugin `route-override`.

use cni::config::NetConf;
use cni::json::{Json, UnknownKey};
use cni::result::Route as ResultRoute;
use cni::{Cidr, Result};
use cni_linux::Route;
use cni_plugin::interface::SCOPE_LINK;
use serde::Deserialize;

/// A checked configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Conf {
    /// Whether ADD removes the routes through a gateway, and the default routes.
    flush_routes: bool,
    /// Whether ADD removes the default routes, and the gateways of the result's addresses.
    pub(crate) flush_gateway: bool,
    /// The destinations whose routes ADD removes.
    removed: Vec<Cidr>,
    /// The routes that ADD adds. A route without a gateway has the scope of a destination on the
    /// link.
    pub(crate) added: Vec<ResultRoute>,
    /// Whether CHECK ignores the routes.
    pub(crate) skip_check: bool,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Keys {
    flushroutes: Option<bool>,
    flushgateway: Option<bool>,
    delroutes: Option<Vec<ResultRoute>>,
    addroutes: Option<Vec<ResultRoute>>,
    delecmproutes: Option<Vec<ResultRoute>>,
    addecmproutes: Option<Vec<ResultRoute>>,
    skipcheck: Option<bool>,
    args: Option<Args>,
}

/// The object `args`, whose object `cni` may have the plugin's keys.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Args {
    cni: Option<Box<Keys>>,
}

impl Keys {
    /// Replaces the keys that `other` has.
    fn replace_by(&mut self, other: Keys) {
        self.flushroutes = other.flushroutes.or(self.flushroutes);
        self.flushgateway = other.flushgateway.or(self.flushgateway);
        self.skipcheck = other.skipcheck.or(self.skipcheck);
        for (own, replacement) in [
            (&mut self.delroutes, other.delroutes),
            (&mut self.addroutes, other.addroutes),
            (&mut self.delecmproutes, other.delecmproutes),
            (&mut self.addecmproutes, other.addecmproutes),
        ] {
            if replacement.is_some() {
                *own = replacement;
            }
        }
    }
}

/// Checks the gateways of a route to add. A route without a gateway gets the scope of a destination
/// on the link.
///
/// # Errors
/// Code 7 if a gateway is not of the destination's family, or `gws` is invalid.
fn route_to_add(mut route: ResultRoute) -> Result<ResultRoute> {
    route.settle_gateways()?;
    route.check_family()?;
    route.dst = route.dst.network();
    if route.gw.is_none() {
        route.scope.get_or_insert(SCOPE_LINK);
    }
    Ok(route)
}

impl Conf {
    /// Reads the configuration. A key in `args.cni` replaces the same key of the configuration.
    ///
    /// # Errors
    /// - Code 6 if a key has the wrong type.
    /// - Code 7 if a gateway is not of the destination's family, or `gws` is invalid.
    pub(crate) fn new(conf: &NetConf) -> Result<Conf> {
        let mut keys: Keys = conf.decode()?;
        if let Some(args) = keys.args.take().and_then(|args| args.cni) {
            keys.replace_by(*args);
        }
        let all = |several: [Option<Vec<ResultRoute>>; 2]| several.into_iter().flatten().flatten();
        let added = all([keys.addroutes, keys.addecmproutes]).map(route_to_add).collect::<Result<_>>()?;
        Ok(Conf {
            flush_routes: keys.flushroutes.unwrap_or_default(),
            flush_gateway: keys.flushgateway.unwrap_or_default(),
            removed: all([keys.delroutes, keys.delecmproutes]).map(|route| route.dst.network()).collect(),
            added,
            skip_check: keys.skipcheck.unwrap_or_default(),
        })
    }

    /// Whether ADD removes this route of the main table, if it leaves by an interface of the
    /// attachment.
    pub(crate) fn removes(&self, route: &Route) -> bool {
        let is_default = route.dst.is_default_route();
        (self.flush_routes && (is_default || route.gw.is_some()))
            || (self.flush_gateway && is_default)
            || self.removed.contains(&route.dst)
    }
}

/// Returns the keys that this plugin does not read. `args` is for other programs too.
pub(crate) fn unknown_keys(json: &Json) -> Vec<UnknownKey> {
    let mut unknown = json.unknown_keys::<Keys>();
    unknown.retain(|key| !key.path.starts_with("args."));
    unknown
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(keys: &str) -> Result<Conf> {
        let conf = format!(r#"{{"cniVersion":"1.0.0","name":"net","type":"route-override"{keys}}}"#);
        Conf::new(&NetConf::parse(conf)?)
    }

    fn route(dst: &str, gw: Option<&str>) -> Route {
        Route::new(dst.parse().unwrap(), gw.map(|gw| gw.parse().unwrap()), 2)
    }

    #[test]
    fn args_replace_single_keys() {
        let conf = parse(
            r#","flushroutes":true,"skipcheck":true,"addroutes":[{"dst":"10.8.0.0/16"}],
               "delroutes":[{"dst":"10.9.0.1/16"}],
               "args":{"cni":{"flushroutes":false,"addroutes":[{"dst":"fd08::/64","gw":"fd02::1"}],"mac":"x"}}"#,
        )
        .unwrap();
        assert!(!conf.flush_routes && conf.skip_check);
        let expected = ResultRoute::new("fd08::/64".parse().unwrap(), Some("fd02::1".parse().unwrap()));
        assert_eq!(conf.added, [expected]);
        assert_eq!(conf.removed, ["10.9.0.0/16".parse().unwrap()]);
        assert_eq!(parse(r#","args":{},"addroutes":null"#).unwrap(), Conf::default());
    }

    #[test]
    fn a_route_may_have_several_gateways_or_none() {
        let conf = parse(
            r#","addroutes":[{"dst":"10.8.0.0/16","gw":""}],
               "addecmproutes":[{"dst":"10.9.0.0/16","gws":["10.2.0.8","10.2.0.9"],"priority":5}]"#,
        )
        .unwrap();
        let added: Vec<_> = conf.added.iter().map(|route| (route.gateways(), route.scope, route.priority)).collect();
        let gateways = ["10.2.0.8", "10.2.0.9"].map(|text| text.parse().unwrap());
        assert_eq!(added, [(vec![], Some(SCOPE_LINK), None), (gateways.to_vec(), None, Some(5))]);
    }

    #[test]
    fn a_gateway_that_cannot_work_is_refused() {
        for gateway in [r#""gw":"fd02::1""#, r#""gws":["10.2.0.8","fd02::1"]"#] {
            let error = parse(&format!(r#","addroutes":[{{"dst":"10.8.0.0/16",{gateway}}}]"#)).unwrap_err();
            let text = "route 10.8.0.0/16 via fd02::1: the gateway is of the other address family";
            assert_eq!((error.code(), error.msg()), (cni::Code::INVALID_CONFIG, text));
        }
        for route in [r#""dst":"x""#, r#""dst":"10.8.0.0/16","gw":"x""#] {
            let error = parse(&format!(r#","addroutes":[{{{route}}}]"#)).unwrap_err();
            assert_eq!(error.code(), cni::Code::DECODE);
        }
    }

    #[test]
    fn each_key_removes_its_routes() {
        let default = route("0.0.0.0/0", Some("10.2.0.1"));
        let (default_on_link, other) = (route("::/0", None), route("10.8.0.0/16", Some("10.2.0.1")));
        let (connected, listed) = (route("10.2.0.0/24", None), route("10.9.0.0/16", None));
        for (keys, removed) in [
            (r#","flushroutes":true"#, vec![default, default_on_link, other]),
            (r#","flushgateway":true"#, vec![default, default_on_link]),
            (r#","delroutes":[{"dst":"10.9.0.0/16"}]"#, vec![listed]),
            (r#","delecmproutes":[{"dst":"10.9.0.0/16","gws":[]}]"#, vec![listed]),
            ("", vec![]),
        ] {
            let conf = parse(keys).unwrap();
            let mut all = vec![default, default_on_link, other, connected, listed];
            all.retain(|route| conf.removes(route));
            assert_eq!(all, removed, "{keys}");
        }
    }
}
