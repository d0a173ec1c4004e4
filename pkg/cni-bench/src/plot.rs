//! Draws plots as SVG: bars, and lines over a growing number.
//!
//! Only plain shapes and text are used, which every viewer draws alike. A side has the same colour
//! in all plots.

use std::collections::BTreeSet;

use crate::cases::{AT_ONCE, CHAINS, MAPPINGS, MASQUERADE, RESERVATIONS, SIMPLE, START, Side, WHOLE, grouped};
use crate::measure::Results;
use crate::targets::short;

const FONT: &str = "font-family=\"Helvetica, Arial, sans-serif\"";
const INK: &str = "#333333";
const GRID: &str = "#dddddd";

/// Returns the colour of a side.
fn colour(side: Side) -> &'static str {
    match side {
        Side::Ours => "#1f6fb4",
        Side::OursNft => "#2ca25f",
        Side::Theirs => "#d95f0e",
        Side::Kernel => "#888888",
    }
}

/// Escapes a text for XML.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// An SVG image to which shapes are added.
struct Drawing {
    width: f64,
    height: f64,
    shapes: String,
}

impl Drawing {
    /// Adds a text. `anchor` is the part of the text that is at `x`: `start`, `middle` or `end`.
    fn text(&mut self, x: f64, y: f64, anchor: &str, size: u32, text: &str) {
        let text = escape(text);
        self.shapes.push_str(&format!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" font-size=\"{size}\" fill=\"{INK}\" {FONT}>{text}</text>\n"
        ));
    }

    /// Adds a filled rectangle with its upper left corner at `x` and `y`.
    fn bar(&mut self, x: f64, y: f64, width: f64, height: f64, colour: &str) {
        self.shapes.push_str(&format!(
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{colour}\"/>\n"
        ));
    }

    /// Adds a line between two points.
    fn line(&mut self, from: (f64, f64), to: (f64, f64), colour: &str, width: f64) {
        self.shapes.push_str(&format!(
            "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"{colour}\" stroke-width=\"{width}\"/>\n",
            from.0, from.1, to.0, to.1
        ));
    }

    /// Adds a dot.
    fn dot(&mut self, at: (f64, f64), colour: &str) {
        self.shapes.push_str(&format!("<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3.5\" fill=\"{colour}\"/>\n", at.0, at.1));
    }

    /// Adds the colours and names of the sides, from left to right.
    fn legend(&mut self, x: f64, y: f64, sides: &[Side]) {
        let mut x = x;
        for side in sides {
            self.bar(x, y - 9.0, 10.0, 10.0, colour(*side));
            self.text(x + 14.0, y, "start", 12, side.label());
            x += 30.0 + 7.0 * side.label().len() as f64;
        }
    }

    /// Returns the image as SVG.
    fn svg(self) -> String {
        let Drawing { width, height, shapes } = self;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
             viewBox=\"0 0 {width:.0} {height:.0}\">\n<rect width=\"{width:.0}\" height=\"{height:.0}\" fill=\"white\"/>\n\
             {shapes}</svg>\n"
        )
    }
}

/// What a bar plot compares, such as cases: the name of each, and a value for each side.
type Bars = Vec<(String, Vec<(Side, f64)>)>;

/// Draws a horizontal bar for each value, to the right of the name that the value belongs to.
fn draw_bars(title: &str, unit: &str, bars: &Bars) -> String {
    const LEFT: f64 = 400.0;
    const RIGHT: f64 = 70.0;
    const BAR: f64 = 13.0;
    const GAP: f64 = 9.0;
    let count: usize = bars.iter().map(|(_, values)| values.len()).sum();
    let height = 70.0 + count as f64 * BAR + bars.len() as f64 * GAP;
    let mut drawing = Drawing { width: 980.0, height, shapes: String::new() };
    drawing.text(20.0, 24.0, "start", 16, title);
    let all_values = || bars.iter().flat_map(|(_, values)| values);
    drawing.legend(20.0, 46.0, &sorted_sides(all_values().map(|(side, _)| *side)));
    let highest = all_values().map(|(_, value)| *value).fold(0.0, f64::max);
    let scale = (drawing.width - LEFT - RIGHT) / highest.max(1e-9);
    let mut y = 60.0;
    for (name, values) in bars {
        let middle = y + values.len() as f64 * BAR / 2.0 + 4.0;
        drawing.text(LEFT - 8.0, middle, "end", 12, name);
        for (side, value) in values {
            drawing.bar(LEFT, y + 1.0, value * scale, BAR - 2.0, colour(*side));
            drawing.text(LEFT + value * scale + 4.0, y + BAR - 3.0, "start", 10, &format!("{} {unit}", short(*value)));
            y += BAR;
        }
        y += GAP;
    }
    drawing.svg()
}

/// Sorts sides and removes duplicates.
fn sorted_sides(sides: impl Iterator<Item = Side>) -> Vec<Side> {
    sides.collect::<BTreeSet<_>>().into_iter().collect()
}

/// Draws a line for each side over equidistant `steps`, on a logarithmic scale. Each series has a
/// value for each step, or `None` if there is no point.
fn draw_lines(
    title: &str,
    x_label: &str,
    y_label: &str,
    steps: &[String],
    series: &[(Side, Vec<Option<f64>>)],
) -> String {
    const LEFT: f64 = 70.0;
    const TOP: f64 = 66.0;
    const HEIGHT: f64 = 250.0;
    const WIDTH: f64 = 480.0;
    let values = || series.iter().flat_map(|(_, values)| values.iter().flatten().copied());
    // The exponents of the powers of ten at both ends of the axis.
    let lowest = values().fold(f64::INFINITY, f64::min).max(1e-3).log10().floor();
    let highest = values().fold(1e-2, f64::max).log10().ceil().max(lowest + 1.0);
    let mut drawing = Drawing { width: LEFT + WIDTH + 40.0, height: TOP + HEIGHT + 56.0, shapes: String::new() };
    let x_of = |step: usize| LEFT + 30.0 + (WIDTH - 60.0) * step as f64 / (steps.len().max(2) - 1) as f64;
    let y_of = |value: f64| TOP + HEIGHT * (1.0 - (value.max(1e-3).log10() - lowest) / (highest - lowest));
    drawing.text(20.0, 24.0, "start", 16, title);
    drawing.legend(20.0, 46.0, &sorted_sides(series.iter().map(|(side, _)| *side)));
    let mut power = lowest;
    while power <= highest {
        let value = 10f64.powf(power);
        let y = y_of(value);
        drawing.line((LEFT, y), (LEFT + WIDTH, y), GRID, 1.0);
        drawing.text(LEFT - 6.0, y + 4.0, "end", 11, &value.to_string());
        power += 1.0;
    }
    for (step, name) in steps.iter().enumerate() {
        drawing.text(x_of(step), TOP + HEIGHT + 18.0, "middle", 11, name);
    }
    drawing.text(
        LEFT + WIDTH / 2.0,
        TOP + HEIGHT + 40.0,
        "middle",
        12,
        &format!("{x_label} (up: {y_label}, logarithmic)"),
    );
    for (side, values) in series {
        let points: Vec<((f64, f64), f64)> = values
            .iter()
            .enumerate()
            .filter_map(|(step, value)| value.map(|value| ((x_of(step), y_of(value)), value)))
            .collect();
        for pair in points.windows(2) {
            if let [from, to] = pair {
                drawing.line(from.0, to.0, colour(*side), 2.0);
            }
        }
        for (point, value) in points {
            drawing.dot(point, colour(*side));
            drawing.text(point.0, point.1 - 7.0, "middle", 10, &short(value));
        }
    }
    drawing.svg()
}

/// Returns the plots for which there are figures: file name, title and SVG of each.
pub(crate) fn all(results: &Results) -> Vec<(String, String, String)> {
    let mut plots = Vec::new();
    let mut add = |name: &str, title: &str, svg: Option<String>| {
        if let Some(svg) = svg {
            plots.push((format!("{name}.svg"), title.to_owned(), svg));
        }
    };
    for (name, verb, title) in
        [("chains-add", "ADD", "ADD: median wall time"), ("chains-del", "DEL", "DEL: median wall time")]
    {
        add(name, title, verb_bars(results, CHAINS, verb, title, |row| row.wall.median()));
    }
    let title = "ADD: user and system CPU time";
    add("chains-cpu", title, verb_bars(results, CHAINS, "ADD", title, |row| row.cpu.median()));
    let title = "Start-up: VERSION, median wall time";
    add("start", title, verb_bars(results, START, "VERSION", title, |row| row.wall.median()));
    for (name, spec) in [("at-once-simple", SIMPLE), ("at-once-whole", WHOLE)] {
        let title = format!("At once: {}", spec.name());
        add(name, &title, crowd_lines(results, &spec.name(), &title));
    }
    let title = "host-local ADD with reservations present";
    let svg = growth_lines(results, RESERVATIONS, "reservations", title);
    add("reservations", title, svg);
    for (name, group, what, title) in [
        ("portmap-mappings", MAPPINGS, "mappings", "portmap ADD with others' mappings present"),
        (
            "masquerade-addresses",
            MASQUERADE,
            "masqueraded addresses",
            "bridge + host-local + ipMasq ADD, with others masqueraded",
        ),
    ] {
        add(name, title, growth_lines(results, group, what, title));
    }
    if !results.sizes.is_empty() {
        let title = "Sizes of the binaries";
        let mega = |bytes: u64| bytes as f64 / 1e6;
        let sizes = results.sizes.iter().map(|size| {
            (size.plugin.to_owned(), vec![(Side::Ours, mega(size.ours)), (Side::Theirs, mega(size.theirs))])
        });
        add("sizes", title, Some(draw_bars(title, "MB", &sizes.collect())));
    }
    plots
}

/// Draws one verb of a group of cases as bars; `None` without figures.
fn verb_bars(
    results: &Results,
    group: &str,
    verb: &str,
    title: &str,
    value: fn(&crate::measure::Row) -> f64,
) -> Option<String> {
    let mut bars: Bars = Vec::new();
    for row in results.rows.iter().filter(|row| row.group == group && row.verb == verb) {
        match bars.iter_mut().find(|(name, _)| *name == row.case) {
            Some((_, values)) => values.push((row.side, value(row))),
            None => bars.push((row.case.clone(), vec![(row.side, value(row))])),
        }
    }
    for (_, values) in &mut bars {
        values.sort_by_key(|(side, _)| *side);
    }
    if bars.is_empty() { None } else { Some(draw_bars(title, "ms", &bars)) }
}

/// Draws the attachments per second over the number of attachments at once; `None` without figures.
fn crowd_lines(results: &Results, case: &str, title: &str) -> Option<String> {
    let rows = || results.crowds.iter().filter(|row| row.case == case && row.verb == "ADD");
    let mut counts: Vec<usize> = rows().map(|row| row.count).collect();
    counts.sort_unstable();
    counts.dedup();
    let series: Vec<(Side, Vec<Option<f64>>)> = sorted_sides(rows().map(|row| row.side))
        .into_iter()
        .map(|side| {
            let value = |count: &usize| results.crowd(case, *count, side, "ADD").map(|row| row.per_second.median());
            (side, counts.iter().map(value).collect())
        })
        .collect();
    let steps: Vec<String> = counts.iter().map(usize::to_string).collect();
    let x_label = format!("attachments {AT_ONCE}");
    (!steps.is_empty()).then(|| draw_lines(title, &x_label, "attachments per second", &steps, &series))
}

/// Draws the wall time of ADD over the number in the case's name, which has the form `<number>
/// <what>`. Cases of the group with other names are left out. Returns `None` without figures.
fn growth_lines(results: &Results, group: &str, what: &str, title: &str) -> Option<String> {
    let rows = || results.rows.iter().filter(|row| row.group == group && row.verb == "ADD");
    let number = |case: &str| -> Option<usize> { case.strip_suffix(what)?.trim().replace(',', "").parse().ok() };
    let mut steps: Vec<usize> = rows().filter_map(|row| number(&row.case)).collect();
    steps.sort_unstable();
    steps.dedup();
    let series: Vec<(Side, Vec<Option<f64>>)> = sorted_sides(rows().map(|row| row.side))
        .into_iter()
        .map(|side| {
            let value = |step: &usize| {
                let case = format!("{} {what}", grouped(*step));
                results.row(group, &case, side, "ADD").map(|row| row.wall.median())
            };
            (side, steps.iter().map(value).collect())
        })
        .collect();
    let names: Vec<String> = steps.iter().map(|step| grouped(*step)).collect();
    (!names.is_empty()).then(|| draw_lines(title, &format!("{what} present"), "ms", &names, &series))
}
