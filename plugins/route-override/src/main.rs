//! The CNI plugin `route-override`: removes routes of earlier plugins and adds others.

cni_plugin::main!(plugin_route_override::RouteOverride);
