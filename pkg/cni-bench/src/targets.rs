//! The project's performance targets, compared with the figures of this run.

use crate::cases::{AT_ONCE, CHAINS, FIVE, RESERVATIONS, SIMPLE, START, Side, WHOLE, at_once_name};
use crate::measure::{Results, Row};

/// Returns a line of the table: a target with an upper bound, the figure that this run reached, and
/// whether the figure is within the bound. `reached` is `None` if it was not measured.
fn at_most(what: impl Into<String>, bound: f64, unit: &str, reached: Option<f64>) -> Vec<String> {
    let text = |value| format!("{}{unit}", short(value));
    line(what.into(), format!("at most {}", text(bound)), reached.map(|value| (text(value), value <= bound)))
}

/// Returns a line of the table. `reached` is the figure, and whether it is within the bound.
fn line(what: String, bound: String, reached: Option<(String, bool)>) -> Vec<String> {
    let (reached, kept) = match reached {
        Some((figure, true)) => (figure, "yes"),
        Some((figure, false)) => (figure, "no"),
        None => ("not measured".to_owned(), "-"),
    };
    vec![what, bound, reached, kept.to_owned()]
}

/// Formats a number with about three significant digits.
pub(crate) fn short(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 1.0 => format!("{value:.2}"),
        size if size >= 0.01 || size == 0.0 => format!("{value:.3}"),
        _ => format!("{value:.5}"),
    }
}

/// Returns the lines of the table of targets, with the figures of these results: what is measured,
/// the target, the figure, and whether the figure is within the target.
pub(crate) fn lines(results: &Results) -> Vec<Vec<String>> {
    let whole = WHOLE.name();
    let row = |case: &str, side, verb| results.row(CHAINS, case, side, verb);
    let wall = |row: Option<&Row>| row.map(|row| row.wall.median());
    let cpu = |row: Option<&Row>| row.map(|row| row.cpu.median());
    let peak = |row: Option<&Row>| row.and_then(|row| row.counts.as_ref()).map(|counts| counts.peak as f64);
    let ratio = |ours: Option<f64>, theirs: Option<f64>| ours.zip(theirs).map(|(ours, theirs)| ours / theirs);
    let mut targets = Vec::new();
    for (side, bound) in [(Side::Ours, 0.15), (Side::OursNft, 0.08)] {
        let (ours, theirs) = (row(&whole, side, "ADD"), row(&whole, Side::Theirs, "ADD"));
        let of = format!("ADD of {whole}, {}", backend(side));
        targets.push(at_most(format!("{of}: wall, of theirs"), bound, "", ratio(wall(ours), wall(theirs))));
        targets.push(at_most(format!("{of}: CPU, of theirs"), 0.12, "", ratio(cpu(ours), cpu(theirs))));
    }
    for (side, bound) in [(Side::Ours, 14.0), (Side::OursNft, 6.0)] {
        let dellink = wall(row(&whole, Side::Kernel, "RTM_DELLINK"));
        let beyond = wall(row(&whole, side, "DEL")).zip(dellink).map(|(del, dellink)| del - dellink);
        let what = format!("DEL of {whole}, {}: beyond one RTM_DELLINK", backend(side));
        targets.push(at_most(what, bound, " ms", beyond));
    }
    for verb in ["ADD", "DEL"] {
        let wall_of = |side| wall(results.row(RESERVATIONS, "60000 reservations", side, verb));
        let what = format!("host-local {verb} at 60000 reservations: wall, of theirs");
        targets.push(at_most(what, 0.005, "", ratio(wall_of(Side::Ours), wall_of(Side::Theirs))));
    }
    for (spec, side) in [(SIMPLE, Side::Ours), (WHOLE, Side::Ours), (WHOLE, Side::OursNft)] {
        let case = at_once_name(64, spec);
        let per_second = |side| results.row(AT_ONCE, &case, side, "ADD").map(|row| row.per_second.median());
        let times = ratio(per_second(side), per_second(Side::Theirs));
        let backend = if spec == SIMPLE { String::new() } else { format!(", {}", backend(side)) };
        let what = format!("64 ADDs of {} at once{backend}: attachments per second, times theirs", spec.name());
        targets.push(line(what, "at least 6".to_owned(), times.map(|times| (short(times), times >= 6.0))));
    }
    for side in [Side::Ours, Side::OursNft] {
        let peak_of = |side| peak(row(&whole, side, "ADD"));
        let what = format!("ADD of {whole}, {}: largest process, of theirs", backend(side));
        targets.push(at_most(what, 0.25, "", ratio(peak_of(side), peak_of(Side::Theirs))));
    }
    let sizes_of_five = || results.sizes.iter().filter(|size| FIVE.contains(&size.plugin));
    let together: u64 = sizes_of_five().map(|size| size.ours).sum();
    targets.push(at_most("The five binaries together", 8.0, " MB", Some(together as f64 / 1e6)));
    let start_ratio =
        |plugin: &str| ratio(start_time(results, Side::Ours, plugin), start_time(results, Side::Theirs, plugin));
    // `None` if one of the five was not measured.
    let start_ratios: Option<Vec<f64>> = sizes_of_five().map(|size| start_ratio(size.plugin)).collect();
    let worst = start_ratios.and_then(|ratios| ratios.into_iter().reduce(f64::max));
    targets.push(at_most("Start-up (VERSION), the slowest of the five: wall, of theirs", 0.2, "", worst));
    let simple = SIMPLE.name();
    let what = format!("ADD of {simple}: wall, of twice the kernel alone plus two starts");
    let add = wall(row(&simple, Side::Ours, "ADD"));
    targets.push(at_most(what, 1.0, "", ratio(add, limit_of_simple_add(results))));
    targets
}

/// Returns the median wall time of a plugin's VERSION; `None` if it was not measured.
fn start_time(results: &Results, side: Side, plugin: &str) -> Option<f64> {
    results.row(START, &format!("VERSION of {plugin}"), side, "VERSION").map(|row| row.wall.median())
}

/// Returns the bound for our ADD of [`SIMPLE`]: twice the time of the kernel alone, plus the
/// start-up of the two plugins. Returns `None` if one of them was not measured.
fn limit_of_simple_add(results: &Results) -> Option<f64> {
    let kernel = results.row(CHAINS, &SIMPLE.name(), Side::Kernel, "ADD")?.wall.median();
    let starts = start_time(results, Side::Ours, "bridge")? + start_time(results, Side::Ours, "host-local")?;
    Some(2.0 * kernel + starts)
}

/// Returns the name of the firewall backend that a side uses.
fn backend(side: Side) -> &'static str {
    if side == Side::OursNft { "nftables" } else { "iptables" }
}
