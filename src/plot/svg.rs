//! Draws the picture.

use std::fmt::Write as _;

use super::axis::{self, Axis};
use super::{Heading, Point, Series};

const WIDTH: f64 = 860.0;
/// The left and the right end of both panels.
const LEFT: f64 = 90.0;
const RIGHT: f64 = 830.0;
/// The height of a panel, and the gap between two of them.
const PANEL: f64 = 250.0;
const GAP: f64 = 50.0;
/// The greatest width of a letter, to place texts beside each other.
const LETTER: f64 = 7.2;

/// Colours that are distinguishable with colour blindness (Okabe and Ito).
const COLOURS: [&str; 7] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000",
];
/// After all colours, the same again with dashed lines.
const DASHES: [&str; 3] = ["none", "7 4", "2 3"];

/// With more curves, the spreads would hide each other.
const MOST_SPREADS: usize = 6;

/// The contents of a panel.
struct Panel<'a> {
    title: String,
    of: &'a dyn Fn(&Point) -> f64,
    /// The label of a value on the axis.
    text: &'a dyn Fn(f64) -> String,
    has_spread: bool,
    nothing: &'static str,
}

pub(super) fn draw(series: &[Series], heading: &Heading) -> String {
    let mut body = String::new();
    let mut y = 30.0;
    text(&mut body, WIDTH / 2.0, y, "class=\"title\"", &heading.title);
    y += 20.0;
    text(
        &mut body,
        WIDTH / 2.0,
        y,
        "class=\"small\"",
        &heading.details,
    );
    if let Some(warning) = &heading.warning {
        y += 20.0;
        text(&mut body, WIDTH / 2.0, y, "class=\"warning\"", warning);
    }
    y = legend(&mut body, series, y + 24.0) + 22.0;

    let points = || series.iter().flat_map(|series| &series.points);
    let sizes = Axis::of_sizes(points().map(|point| point.bytes), LEFT, RIGHT);
    let panels = [
        Panel {
            title: "bus bandwidth (GB/s)".to_owned(),
            of: &|point| point.bus,
            text: &|value| format!("{value}"),
            has_spread: false,
            nothing: "nothing to show: there was no data on a bus",
        },
        Panel {
            title: heading.time.to_owned(),
            of: &|point| point.seconds,
            text: &|value| axis::time(value),
            has_spread: true,
            nothing: "nothing to show",
        },
    ];
    for panel in panels {
        draw_panel(&mut body, series, &panel, sizes, y);
        y += PANEL + GAP;
    }
    y -= GAP - 42.0;
    let what = "size (bytes per rank; K, M and G are powers of 1024)";
    text(&mut body, (LEFT + RIGHT) / 2.0, y, "", what);
    if series.len() <= MOST_SPREADS && points().any(|point| point.spread.is_some()) {
        y += 20.0;
        let what =
            "bars: from the fastest iteration to what 99 of 100 do not exceed, by CUDA events";
        text(&mut body, (LEFT + RIGHT) / 2.0, y, "class=\"small\"", what);
    }
    let height = y + 20.0;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
         height=\"{height}\" font-family=\"Helvetica, Arial, sans-serif\" font-size=\"13\" text-anchor=\"middle\">\n\
         <style>.title {{ font-size: 17px; font-weight: bold }} .small {{ font-size: 12px; fill: #444 }} \
         .warning {{ font-weight: bold; fill: #b00000 }} .end {{ text-anchor: end }} .start {{ text-anchor: start }}\
         </style>\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"white\"/>\n{body}</svg>\n"
    )
}

fn draw_panel(
    body: &mut String,
    series: &[Series],
    panel: &Panel<'_>,
    sizes: Option<Axis>,
    top: f64,
) {
    let bottom = top + PANEL;
    let _ = writeln!(
        body,
        "<rect x=\"{LEFT}\" y=\"{top}\" width=\"{}\" height=\"{PANEL}\" fill=\"none\" stroke=\"#888\"/>",
        RIGHT - LEFT
    );
    let (x, y) = (18.0, (top + bottom) / 2.0);
    let turned = format!("transform=\"rotate(-90 {x} {y})\"");
    text(body, x, y, &turned, &panel.title);
    let shows_spread = panel.has_spread && series.len() <= MOST_SPREADS;
    let points = series.iter().flat_map(|series| &series.points);
    let values = points.filter(|point| point.bytes > 0.0).flat_map(|point| {
        let spread = point.spread.filter(|_| shows_spread);
        let (low, high) = spread.unwrap_or((f64::NAN, f64::NAN));
        [(panel.of)(point), low, high]
    });
    let quantities = Axis::of_quantities(values, bottom, top);
    let (Some(sizes), Some(quantities)) = (sizes, quantities) else {
        text(
            body,
            (LEFT + RIGHT) / 2.0,
            y,
            "class=\"small\"",
            panel.nothing,
        );
        return;
    };
    for bytes in sizes.powers_of_two(46.0) {
        let x = sizes.at(bytes);
        let _ = writeln!(body, "<path d=\"M{x:.1} {top}V{bottom}\" stroke=\"#ddd\"/>");
        text(body, x, bottom + 18.0, "", &axis::size(bytes));
    }
    for (value, written) in quantities.round_numbers() {
        let y = quantities.at(value);
        let colour = if written { "#ccc" } else { "#eee" };
        let _ = writeln!(
            body,
            "<path d=\"M{LEFT} {y:.1}H{RIGHT}\" stroke=\"{colour}\"/>"
        );
        if written {
            let name = (panel.text)(value);
            text(body, LEFT - 8.0, y + 4.5, "class=\"end\"", &name);
        }
    }
    let all = series.len();
    for (index, series) in series.iter().enumerate() {
        let mut points: Vec<&Point> = series.points.iter().collect();
        points.sort_by(|a, b| a.bytes.total_cmp(&b.bytes));
        let places = points.iter().filter_map(|point| {
            let value = (panel.of)(point);
            let shown = point.bytes > 0.0 && value.is_finite() && value > 0.0;
            shown.then(|| (sizes.at(point.bytes), quantities.at(value)))
        });
        let places: Vec<_> = places.collect();
        line(body, index, &places);
        for &(x, y) in &places {
            marker(body, index, x, y);
        }
        // Beside each other, or the last spread would hide the others.
        let beside = 5.0 * (index as f64 - (all - 1) as f64 / 2.0);
        let spreads = points
            .iter()
            .filter(|point| shows_spread && point.bytes > 0.0);
        for point in spreads {
            if let Some((low, high)) = point.spread.filter(|(low, _)| *low > 0.0) {
                let _ = writeln!(
                    body,
                    "<path d=\"M{:.1} {:.1}V{:.1}\" stroke=\"{}\" stroke-opacity=\"0.4\" stroke-width=\"4\"/>",
                    sizes.at(point.bytes) + beside,
                    quantities.at(low),
                    quantities.at(high),
                    colour(index)
                );
            }
        }
    }
}

/// Names with their lines and marks, in rows and columns; returns the position of the last row.
fn legend(body: &mut String, series: &[Series], top: f64) -> f64 {
    let letters = series.iter().map(|series| series.name.chars().count());
    let width = 46.0 + LETTER * letters.max().unwrap_or(0) as f64 + 20.0;
    let columns = (((RIGHT - LEFT) / width) as usize).clamp(1, series.len().max(1));
    let left = (WIDTH - width * columns as f64 + 20.0) / 2.0;
    for (index, series) in series.iter().enumerate() {
        let x = left + width * (index % columns) as f64;
        let y = top + 20.0 * (index / columns) as f64;
        line(body, index, &[(x, y - 4.5), (x + 36.0, y - 4.5)]);
        marker(body, index, x + 18.0, y - 4.5);
        text(body, x + 44.0, y, "class=\"start\"", &series.name);
    }
    top + 20.0 * (series.len().saturating_sub(1) / columns) as f64
}

fn colour(index: usize) -> &'static str {
    COLOURS[index % COLOURS.len()]
}

fn line(body: &mut String, index: usize, places: &[(f64, f64)]) {
    let mut path = String::new();
    for (number, (x, y)) in places.iter().enumerate() {
        let command = if number == 0 { 'M' } else { 'L' };
        let _ = write!(path, "{command}{x:.1} {y:.1}");
    }
    let dash = DASHES[index / COLOURS.len() % DASHES.len()];
    let _ = writeln!(
        body,
        "<path d=\"{path}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\" stroke-dasharray=\"{dash}\"/>",
        colour(index)
    );
}

/// A mark that differs by form as well as by colour.
fn marker(body: &mut String, index: usize, x: f64, y: f64) {
    let form = match index % 4 {
        0 => format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\""),
        1 => format!("<path d=\"M{x:.1} {y:.1}m-4 3.5h8l-4 -7.5z\""),
        2 => format!("<path d=\"M{x:.1} {y:.1}m-3.2 -3.2h6.4v6.4h-6.4z\""),
        _ => format!("<path d=\"M{x:.1} {y:.1}m0 -5l4.5 5l-4.5 5l-4.5 -5z\""),
    };
    let _ = writeln!(body, "{form} fill=\"{}\"/>", colour(index));
}

fn text(body: &mut String, x: f64, y: f64, attributes: &str, words: &str) {
    let words = words
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;");
    let _ = writeln!(
        body,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" {attributes}>{words}</text>"
    );
}
